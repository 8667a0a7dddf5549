"""Provider ``slurm``: batch jobs of a Slurm cluster, by its own command line tools, here or on a login node by ssh.

Its Request holds a batch script, complete with its ``#SBATCH`` lines, as ``sbatch`` takes it. `request`, `script` and
`validate` make and check it. `api` sends it. `node` is the node half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...provider_api.protocol import Need
from .._cloud import ClusterProvider, shared_store

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "slurm"
STORE = shared_store("/shared/cloudtrain", "a folder that every node and this machine see under the same path")
ALIASES = ("sbatch", "srun", "hpc", "submitit", "hyperpod")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The cluster's settings, in Slurm's own words.

    ``host`` is a login node for ``ssh``; empty: the tools of this machine. ``mounts`` are folders of the nodes by the
    URL of the bucket, or the folder of this machine, that they show; empty: nodes see this machine's paths. ``folder``
    is a folder of the nodes for Slurm's own files of a run, logs and secrets; empty: the run's, if that is no bucket.
    ``partition``, ``account``, ``qos``, ``constraint``, ``reservation``, ``nodelist`` and ``exclude`` are options of
    sbatch. ``gres_type`` is the cluster's type of a GPU by the name in a job, ``{"H100": "nvidia_h100_80gb_hbm3"}``; an
    empty text asks for no type. ``mem`` (per node) and ``cpus_per_task`` are for jobs that ask for no memory or cores.
    ``extra`` are further options of sbatch by their long names. ``setup`` are lines of bash before the start, and
    ``python`` is Python on the nodes. ``container`` is none, pyxis or apptainer. ``max_time`` is the partition's time
    limit in seconds: a longer job runs in parts. ``stop_grace`` is seconds from the stop signal to the kill. ``prices``
    are US dollars an hour of a node by partition, for ``max_cost``.
    """

    host: str = ""
    mounts: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    nodelist: str = ""
    exclude: str = ""
    gres_type: dict[str, Any] = field(default_factory=dict)
    mem: str = ""
    cpus_per_task: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    python: str = "python3"
    container: str = "none"
    max_time: int = 0
    stop_grace: int = 30
    prices: dict[str, Any] = field(default_factory=dict)


class Provider(ClusterProvider):
    """Provider of Slurm's batch jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    max_poll_s: ClassVar[float] = 10.0
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE}


DIFFERENCES = (
    "the stop signal reaches the first process of a node: Slurm signals the ranks, too",
    "lines of slurm.setup do not run, and containers stand in for the cluster's machines",
)
"""Differences that a rehearsal does not show."""
SAMPLE = {
    "settings": {"partition": "low", "gres_type": {"A100": "a100"}, "prices": {"low": 2.0}},
    "rows": {
        "resources.instance_type": {"instance_type": "bigmem"},
        "resources.gpu": {"gpu": ("H100:2",)},
        "resources.total_gpus": {"total_gpus": 4},
        "max_cost": {"max_cost": 0.5},
        "inputs.mode": {"inputs": {"data": {"url": "/tmp", "mode": "copy"}}},
        "options": {"options": {"slurm": {"sbatch": {"nice": 100}}}},
    },
    "bases": {
        "resources.total_gpus": {"gpu": ("H100:2",)},
        "max_gpu_hours": {"gpu": ("H100:1",)},
        "inputs.mode": {"inputs": {"data": {"url": "/tmp", "mode": "mount"}}},
    },
}
