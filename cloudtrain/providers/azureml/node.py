"""Node half of provider ``azureml``: read a container's environment. Standard library alone.

Paths come from the command line: Azure ML fills them in nowhere else. The variables of the topology have differed
between clusters (InnerEye-DeepLearning #801), so each has fallbacks.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping

from ...errors import SpecError
from ...provider_api.node import NodeEnvironment, Topology
from .names import GRACE, METADATA, NODES, PREEMPTED
from .notices import URL, ScheduledEvents, marker
from .secrets import secret

__all__ = ["node_environment"]

PORT = 29500
"""torchrun's own default, used if Azure ML names no port."""
HOLD = 120.0
"""Seconds that a node stays alive after it has saved. If a node is taken away, Azure ML restarts its job. It does not
restart a job that has ended (microsoft/ai4s-jobq, 2.5.1)."""
SHUTDOWN = "25"
"""Seconds that torchrun leaves its ranks after SIGTERM; its own default is the whole grace."""
_RANKS = ("NODE_RANK", "AZUREML_CR_NODE_RANK")
_HOSTS = ("MASTER_ADDR", "AZ_BATCHAI_JOB_MASTER_NODE_IP", "AZ_BATCH_MASTER_NODE")
DEVICES, NETWORKS = "/sys/class/infiniband", "/sys/class/net"


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that Azure ML gave this node."""
    return NodeEnvironment(
        topology=_topology(environ),
        paths=_paths(argv),
        scratch=(os.getcwd(), "/tmp"),  # the job's own folder is on the machine's large disk
        export_env={
            **_network(environ),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN),
        },
        stop_grace=GRACE,
        exit_code={"succeeded": 0, "failed": 1, "preempted": PREEMPTED},
        secrets=lambda reference: secret(reference.partition(":")[2], environ),
        notices=(marker, ScheduledEvents(environ.get(METADATA) or URL)),
        hold=HOLD,
        folders={"outputs": "artifacts"},  # scripts write to ./outputs, which Azure ML keeps from its own folder alone
    )


def _paths(argv: Mapping[str, str]) -> dict[str, str]:
    """Return the paths by name. Azure ML gives a one-file channel as a file; the runtime needs its folder."""
    paths = {}
    for name, path in argv.items():
        kind, _, channel = name.partition(".")
        paths[f"input.{channel}" if kind == "file" else name] = posixpath.dirname(path) if kind == "file" else path
    return paths


def _topology(environ: Mapping[str, str]) -> Topology:
    told = environ.get("MASTER_PORT", "")
    port = int(told) if told.isdigit() and 0 < int(told) < 65535 else PORT
    nodes = int(environ.get(NODES) or environ.get("AZUREML_NODE_COUNT") or 1)
    if nodes == 1:
        return Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=port)
    rank = next((environ[name] for name in _RANKS if environ.get(name, "").isdigit()), None)
    if rank is None and environ.get("WORLD_SIZE") == str(nodes):  # one process a node: its rank is the node's
        rank = environ.get("RANK")
    address = next((environ[name] for name in _HOSTS if environ.get(name)), None)
    if rank is None or address is None:
        missing = " or ".join(_RANKS if rank is None else _HOSTS)
        raise SpecError(f"this node of {nodes} is not told which it is: {missing} is not set", field=NODES)
    return Topology(nodes=nodes, node_rank=int(rank), master_addr=address.partition(":")[0], master_port=port)


def _network(environ: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's network settings, if the machine really has InfiniBand and the job has not set them.

    The devices decide, never a list of sizes. Images come with NCCL_IB_DISABLE=1 (azureml-examples #675), which would
    leave the fast network idle. A job's own env still wins. NCCL_TOPO_FILE is never set: a file for another size breaks
    the job (azhpc-images #327).
    """
    fast, other = _ports()
    if not fast:
        return {}
    words = {"NCCL_IB_DISABLE": "0"}
    if other and "NCCL_IB_HCA" not in environ:  # RDMA over the slow network, which NCCL would use too
        words["NCCL_IB_HCA"] = "=" + ",".join(fast)
    if "NCCL_SOCKET_IFNAME" not in environ and os.path.exists(f"{NETWORKS}/eth0"):
        words["NCCL_SOCKET_IFNAME"] = "eth0"
    return words


def _ports() -> tuple[list[str], list[str]]:
    """Return active ports (``device:number``) of InfiniBand, and of other RDMA devices."""
    found: tuple[list[str], list[str]] = ([], [])
    for device in _names(DEVICES):
        for port in _names(f"{DEVICES}/{device}/ports"):
            here = f"{DEVICES}/{device}/ports/{port}"
            if "ACTIVE" in _said(f"{here}/state"):
                found[_said(f"{here}/link_layer") != "InfiniBand"].append(f"{device}:{port}")
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _said(path: str) -> str:
    try:
        with open(path, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""
