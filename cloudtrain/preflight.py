"""What ``cloudtrain doctor --job`` runs on every node: this one file, by the launcher that a training has.

Each node tells its versions, its GPUs, /dev/shm and its clock, and connects to every other on a port that the system
chose, as NCCL and gloo do. Then all ranks time all-reduces. Rank 0 writes ``preflight.json`` among the artifacts and a
table on stdout. The standard library, and torch where there is one; it knows nothing of cloudtrain.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["facts", "main", "problems", "table"]

MIB = 1 << 20
GPU_SIZES = tuple(MIB << shift for shift in range(0, 9, 2))
"""Bytes of one all-reduce: 1 to 256 MiB."""
CPU_SIZES = (MIB >> 4, MIB >> 2, MIB, 4 * MIB)
WARM, TIMED = 2, 5
PATIENCE = 120.0
"""Seconds for the slowest node to come, and for an all-reduce."""
CONNECT = 10.0
"""Seconds for one connection between nodes: a port that is filtered never answers."""
SKEW = 1.0
"""Seconds by which two clocks may differ: beyond that, tokens and signatures of requests begin to be refused."""
SMALL_SHM = 64 * MIB
"""What an engine of containers gives when nobody asks: DataLoader's workers die of it."""
ALIKE = ("driver", "torch", "cuda", "nccl", "python", "machine")


# ------------------------------------------------------------------------------------------------------------- one node


def facts() -> dict[str, Any]:
    """This node's versions and sizes; None is what it has not. Bytes."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "shm_bytes": _shm(),
        "driver": _driver(),
        **dict.fromkeys(("torch", "cuda", "nccl")),
        "gpus": 0,
        "gpu": None,
    }
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return found
    found |= {"torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": _nccl(torch)}
    if torch.cuda.is_available():
        found |= {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0)}
    return found


def _shm() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _driver() -> str | None:
    """Of NVIDIA's, as its own tool says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words else None


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError, TypeError):  # built without it
        return None


# ---------------------------------------------------------------------------------------------------- between two nodes


class Door:
    """A listener on a port that the system chose: it answers each line with this node's number and clock."""

    def __init__(self, node: int) -> None:
        self._node = node
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        self._server.settimeout(0.2)
        self.port = int(self._server.getsockname()[1])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                continue
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        try:
            with client, client.makefile("rw", encoding="utf-8") as stream:
                client.settimeout(CONNECT)
                for _ in stream:
                    stream.write(json.dumps({"node": self._node, "time": time.time()}) + "\n")
                    stream.flush()
        except (OSError, ValueError):
            return

    def close(self) -> None:
        """No thread of it is left that listens."""
        self._over.set()
        self._thread.join()
        self._server.close()


def look_in(node: int, address: str, port: int) -> dict[str, Any]:
    """Connect to a node. ``error`` is empty when it answered; ``skew_s`` is its clock less ours, give or take
    ``within_s``: the quickest of a few questions, half a round trip each way."""
    try:
        with (
            socket.create_connection((address, port), timeout=CONNECT) as client,
            client.makefile("rw", encoding="utf-8") as stream,
        ):
            best: tuple[float, float] | None = None
            for _ in range(5):
                asked, began = time.time(), time.monotonic()
                stream.write("\n")
                stream.flush()
                told = json.loads(stream.readline())
                took = time.monotonic() - began
                if told["node"] != node:
                    return {"error": f"{address}:{port} is node {told['node']}"}
                if best is None or took / 2 < best[1]:
                    best = told["time"] - (asked + took / 2), took / 2
    except (OSError, ValueError, KeyError) as exc:
        return {"error": f"{address}:{port}: {getattr(exc, 'strerror', None) or exc or type(exc).__name__}"}
    assert best is not None
    return {"error": "", "skew_s": round(best[0], 6), "within_s": round(best[1], 6)}


def own_address(node: int) -> str:
    """How the others reach this node: node 0 by the name that they were all given, another from where it calls."""
    main = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if node == 0:
        return main
    family, kind, _, _, place = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of a datagram: nothing is sent, the system only chooses from where it would
        return str(probe.getsockname()[0])


# ------------------------------------------------------------------------------------------------------------ all nodes


def main() -> int:
    """One rank's part. 0 when it could look; what was found is for whoever reads the report."""
    rank, node = int(os.environ.get("RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    mine = facts()
    if mine["torch"] is None:
        bare = {"nodes": {str(node): mine}, "links": {}, "allreduce": None, "error": "this image has no torch"}
        _write(bare if rank == 0 else None)
        return 0
    dist: Any = importlib.import_module("torch.distributed")
    wait = datetime.timedelta(seconds=PATIENCE)
    store, rank, world = next(dist.rendezvous("env://", timeout=wait))
    store.set_timeout(wait)
    with _listening(node) if leads else _nobody() as door:
        if door is not None:
            store.set(f"node{node}", json.dumps({**mine, "address": own_address(node), "port": door.port}))
        count = _nodes(store, world)
        nodes = {number: json.loads(store.get(f"node{number}")) for number in range(count)}
        if leads:
            others = {n: look_in(n, at["address"], at["port"]) for n, at in nodes.items() if n != node}
            store.set(f"links{node}", json.dumps(others))
        links = {number: json.loads(store.get(f"links{number}")) for number in nodes}
        report: dict[str, Any] = {"nodes": nodes, "links": links, "allreduce": None, "error": ""}
        _write(report if rank == 0 else None)  # of a hang in what follows, too, the run has this to show
        if any(link["error"] for row in links.values() for link in row.values()):
            report["error"] = "no all-reduce: some nodes cannot reach others"
        else:
            gpus = all(at["gpus"] >= at["ranks"] for at in nodes.values())
            report["allreduce"] = allreduce(store, rank, world, "nccl" if gpus else "gloo")
    store.set(f"done{rank}", "")
    if rank == 0:  # in whose process the store may be
        for number in range(world):
            store.get(f"done{number}")
    report = json.loads(json.dumps(report))  # its keys are texts, as everybody reads them
    _write(report if rank == 0 else None)
    if rank == 0:
        sys.stdout.write(table(report) + "\n")
        sys.stdout.flush()
    return 0


def _nodes(store: Any, world: int) -> int:
    """How many nodes there are: every rank leaves the number of its own, and reads all others'."""
    rank, node = os.environ.get("RANK", "0"), os.environ.get("GROUP_RANK", "0")
    store.set(f"rank{rank}", node)
    return max(int(store.get(f"rank{number}")) for number in range(world)) + 1


@contextmanager
def _listening(node: int) -> Iterator[Door | None]:
    door = Door(node)
    try:
        yield door
    finally:
        door.close()


@contextmanager
def _nobody() -> Iterator[Door | None]:
    yield None


def allreduce(store: Any, rank: int, world: int, backend: str) -> dict[str, Any]:
    """Time all-reduces of all ranks.

    Bandwidths are those of nccl-tests, in 10^9 bytes a second: of the algorithm, bytes by seconds of the slowest rank;
    of the bus, that by 2 (n - 1) / n.
    """
    torch: Any = importlib.import_module("torch")
    dist = torch.distributed
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if backend == "nccl" else torch.device("cpu")
    settle: Callable[[], Any] = (lambda: torch.cuda.synchronize(device)) if backend == "nccl" else (lambda: None)
    if backend == "nccl":
        torch.cuda.set_device(device)
    wait = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, store=dist.PrefixStore("all", store), rank=rank, world_size=world, timeout=wait)
    try:
        rows, right = [], True
        for size in GPU_SIZES if backend == "nccl" else CPU_SIZES:
            data = torch.ones(size // 4, dtype=torch.float32, device=device)
            dist.all_reduce(data)
            right = right and bool((data == world).all())
            for _ in range(WARM):
                dist.all_reduce(data.fill_(1.0))
            settle()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(TIMED):
                dist.all_reduce(data)
            settle()
            took = torch.tensor([(time.perf_counter() - began) / TIMED], dtype=torch.float64, device=device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            speed = size / float(took.item()) / 1e9
            rows.append(
                {"bytes": size, "seconds": float(took.item()), "algbw": speed, "busbw": speed * 2 * (world - 1) / world}
            )
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {"backend": backend, "ranks": world, "right": right, "rows": rows}


def _write(report: Mapping[str, Any] | None) -> None:
    if report is not None:
        folder = Path(os.environ.get("CLOUDTRAIN_ARTIFACT_DIR", "."))
        (folder / "preflight.json").write_text(json.dumps(report), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------- what it comes to


def problems(report: Mapping[str, Any], *, nodes: int, gpus: int | None) -> list[str]:
    """What is wrong, a line each, with what to do. ``gpus``: that each node must have; None where nobody knows."""
    rows: Mapping[str, Mapping[str, Any]] = report["nodes"]
    if report.get("error") and not report["links"] and not any(row.get("torch") for row in rows.values()):
        return [f"no node could be compared: {report['error']}; give the job an image with torch"]
    found = []
    if len(rows) != nodes:
        found.append(f"{len(rows)} of {nodes} nodes have told anything; see the logs of the others")
    for name in ALIKE:
        values: dict[Any, list[str]] = {}
        for number, row in rows.items():
            values.setdefault(row.get(name), []).append(number)
        if len(values) > 1:
            told = ", ".join(f"{value or 'none'} on node {', '.join(numbers)}" for value, numbers in values.items())
            fix = "give all nodes one kind of machine" if name in ("driver", "machine") else "give all nodes one image"
            found.append(f"{name} differs: {told}; {fix}")
    for number, row in rows.items():
        if gpus is not None and row["gpus"] != gpus:
            why = "CUDA in the image, or a driver that it can use" if row["gpus"] < gpus else "another machine"
            found.append(f"node {number} has {row['gpus']} GPUs for torch, {gpus} are expected: see to {why}")
    for number, links in report["links"].items():
        for other, link in links.items():
            if link["error"]:
                fix = "open all TCP ports between the nodes (security group, firewall, network)"
                found.append(f"node {number} cannot reach node {other} ({link['error']}); {fix}")
            elif number == "0" and abs(link["skew_s"]) - link["within_s"] > SKEW:
                way = "ahead of" if link["skew_s"] > 0 else "behind"
                fix = "let the nodes keep time (chrony, NTP)"
                found.append(f"the clock of node {other} is {abs(link['skew_s']):.1f} s {way} that of node 0; {fix}")
    speeds = report.get("allreduce")
    if speeds is not None and not speeds["right"]:
        found.append("an all-reduce gave a wrong sum; do not train on these nodes")
    if speeds is None and not any("cannot reach" in line for line in found):
        found.append(f"no all-reduce came to its end: {report.get('error') or 'see the logs of the run'}")
    return found


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    head = ("node", "host", "ranks", "gpus", "driver", "torch", "cuda", "nccl", "/dev/shm", "skew")
    rows = [head]
    for number, row in report["nodes"].items():
        link = report["links"].get("0", {}).get(number)
        skew = f"{link['skew_s'] * 1000:+.1f} ms" if link and not link["error"] else "-"
        gpus = f"{row['gpus']} ({row['gpu']})" if row["gpu"] else "0"
        shm = "-" if row["shm_bytes"] is None else f"{row['shm_bytes'] / MIB:.0f} MiB"
        words = [str(row[name] or "-") for name in ("driver", "torch", "cuda", "nccl")]
        rows.append((number, row["host"], str(row["ranks"]), gpus, *words, shm, skew))
    lines = _columns(rows)
    pairs = [(a, b) for a, links in report["links"].items() for b in links]
    closed = [pair for pair in pairs if report["links"][pair[0]][pair[1]]["error"]]
    if pairs:
        lines.append(f"connections between nodes: {len(pairs) - len(closed)} of {len(pairs)}")
    if any((row["shm_bytes"] or SMALL_SHM + 1) <= SMALL_SHM for row in report["nodes"].values()):
        lines.append("note: /dev/shm is small; DataLoader's workers may die of it (shm_gb)")
    if speeds := report.get("allreduce"):
        lines.append(f"all-reduce of {speeds['ranks']} ranks by {speeds['backend']}:")
        body = [(f"{r['bytes'] / MIB:g} MiB", f"{r['algbw']:.3g}", f"{r['busbw']:.3g}") for r in speeds["rows"]]
        lines += _columns([("size", "algbw GB/s", "busbw GB/s"), *body])
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
