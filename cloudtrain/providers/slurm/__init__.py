"""Provider ``slurm``: batch jobs of a Slurm cluster, by its own command line tools, here or on a login node by ssh.

Its Request holds a batch script, complete with its ``#SBATCH`` lines, as ``sbatch`` takes it. `request`, `script` and
`validate` make and check it. `api` sends it. `node` is the node half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...provider_api.protocol import Need, setting
from .._cloud import ClusterProvider, shared_store

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "slurm"
STORE = shared_store("/shared/cloudtrain", "a folder that every node and this machine see under the same path")
ALIASES = ("sbatch", "srun", "hpc", "submitit", "hyperpod")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the cluster, in Slurm's own words."""

    host: str = setting("login node that ssh reaches; default: the tools of this machine")
    mounts: dict[str, Any] = setting(
        "the nodes' folder by the URL or folder here that it shows; default: nodes see this machine's paths", dict
    )
    folder: str = setting("folder of all nodes for a run's secrets and Slurm's logs; default: the run's own")
    partition: str = setting("--partition of sbatch")
    account: str = setting("--account of sbatch")
    qos: str = setting("--qos of sbatch")
    constraint: str = setting("--constraint of sbatch; a job's instance type is added")
    reservation: str = setting("--reservation of sbatch")
    nodelist: str = setting("--nodelist of sbatch")
    exclude: str = setting("--exclude of sbatch")
    gres_type: dict[str, Any] = setting(
        "the cluster's type by the GPU's name: H100 = 'nvidia_h100_80gb_hbm3'; default: the name in lower case", dict
    )
    mem: str = setting("memory of a node for jobs without memory_gb: 64G")
    cpus_per_task: int = setting("cores of a node for jobs without cpus", 0, least=0)
    extra: dict[str, Any] = setting("further options of sbatch by their long names", dict)
    setup: tuple[str, ...] = setting("lines of bash before the start: modules, environments", ())
    python: str = setting("Python on the nodes, after setup", "python3")
    container: str = setting("containers for a job with an image", "none", choices=("pyxis", "apptainer"))
    max_time: int = setting("the partition's time limit in seconds; a longer job runs in parts", 0, least=0)
    stop_grace: int = setting("seconds from the stop signal to the kill", 30, least=2)
    prices: dict[str, Any] = setting("US dollars for an hour of a node, by partition", dict)


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
