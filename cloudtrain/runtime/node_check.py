"""Check every node, for ``cloudtrain doctor --job`` and for ``node_check``: this one file runs there, once a rank.

Each node reports its versions, GPUs, folders and clock. It connects to every other on a port that the system chose, as
NCCL and gloo do. It also tries further ports of node 0 (``--ports``), by the common name and by node 0's own address.
Then all ranks time all-reduces. Rank 0 writes ``preflight.json`` among the artifacts and a table on stdout. With
``--grace`` each node then waits for the stop signal, and prints the seconds since then until it is killed. Uses the
standard library, and torch if installed, but nothing of cloudtrain.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import importlib
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
GPU_SIZES = tuple(MIB << shift for shift in range(0, 9, 2))  # bytes of one all-reduce: 1 to 256 MiB
CPU_SIZES = (MIB >> 4, MIB >> 2, MIB, 4 * MIB)
WARM, TIMED = 2, 5
PATIENCE = 120.0  # seconds to wait for the slowest node, and for an all-reduce
ANSWER = 10.0  # seconds for a folder's file system to answer
CONNECT = 10.0  # seconds for one connection between nodes: a filtered port never answers
SKEW = 1.0  # seconds between two clocks: beyond that, servers begin to refuse tokens and signatures
SMALL_SHM = 64 * MIB  # the default of container engines, with which DataLoader's workers crash
SETTLE = 5.0  # seconds from the report to the line that announces it: by then it has been copied out of the node
HOLD = 300.0  # seconds to wait for the stop signal, and then for the kill
BEAT = 0.5
REPORT = "preflight.json"
NO_TORCH = "this image has no torch"
BEGUN = "preflight: this rank has begun"
READY = "preflight: the report is written; waiting for the stop signal"
SINCE = re.compile(r"preflight: (\d+\.\d) s since the stop signal")
OWN = ("checkpoints", "artifacts", "temporary files")  # folders that every training needs
SHARED = re.compile(r"fuse|nfs|lustre|cifs|smb|ceph|9p|gpfs|beegfs|weka|virtiofs")  # those of stores and networks
ALIKE = ("driver", "torch", "cuda", "nccl", "python", "machine")


# ------------------------------------------------------------------------------------------------------------- one node


def facts() -> dict[str, Any]:
    """Return this node's versions and sizes in bytes; None for what it lacks."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "shm_bytes": _or_none(lambda: shutil.disk_usage("/dev/shm").total),
        "folders": folders(),
        "driver": _or_none(_driver),
        **dict.fromkeys(("torch", "cuda", "nccl")),
        "gpus": 0,
        "gpu": None,
    }
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return found
    nccl = _or_none(lambda: ".".join(map(str, torch.cuda.nccl.version())))  # torch may be built without it
    found |= {"torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl}
    if torch.cuda.is_available():
        found |= {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0)}
    return found


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError, TypeError, IndexError):
        return None


def _driver() -> str:
    """Return the version of NVIDIA's driver, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()[0]


def folders(mounts: Path = Path("/proc/mounts")) -> dict[str, dict[str, Any]]:
    """Return the script's folders and this node's network mounts, by name. ``writable``: a test file could be created;
    for mounts, as the file system says, because nothing is created there. None: no answer within `ANSWER` seconds, as
    of a network mount whose server is gone."""
    named = {
        "checkpoints": os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR"),
        "artifacts": os.environ.get("CLOUDTRAIN_ARTIFACT_DIR"),
        "current folder": os.getcwd(),
        "home": os.environ.get("HOME"),
        "temporary files": tempfile.gettempdir(),
        "shared memory": "/dev/shm",
    }
    kinds = _mounted(mounts)
    wanted = {name: (path, True) for name, path in named.items() if path}
    wanted |= {path: (path, False) for path, kind in sorted(kinds.items()) if SHARED.search(kind)}
    found: dict[str, dict[str, Any]] = {}

    def look(name: str, path: str, create: bool) -> None:
        found[name] = _folder(path, kinds, create=create) if create or not os.path.isfile(path) else {}

    # A call to a dead mount never returns.
    looks = [threading.Thread(target=look, args=(name, *row), daemon=True) for name, row in wanted.items()]
    for each in looks:
        each.start()
    deadline = time.monotonic() + ANSWER
    for each in looks:
        each.join(max(0.0, deadline - time.monotonic()))
    rows = dict(found)
    silent = {"free_bytes": None, "writable": None}
    return {
        name: rows.get(name) or {"path": path, "kind": kinds.get(path), **silent}
        for name, (path, _) in wanted.items()
        if rows.get(name) != {}
    }


def _mounted(mounts: Path) -> dict[str, str]:
    """Return the kind of file system by its mount point."""
    kinds = {}
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, path, kind, *_ = line.split(" ")
            kinds[re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)] = kind
    return kinds


def _folder(path: str, kinds: Mapping[str, str], *, create: bool) -> dict[str, Any]:
    real = os.path.realpath(path)
    above = [at for at in kinds if real == at or real.startswith(at.rstrip("/") + "/")]
    kind = kinds[max(above, key=len)] if above else None
    try:
        free: int | None = shutil.disk_usage(real).free
        writable = os.access(real, os.W_OK)
        if create:
            with tempfile.TemporaryFile(dir=real):
                writable = True
    except OSError:
        free, writable = None, False
    return {"path": path, "kind": kind, "free_bytes": free, "writable": writable}


# ---------------------------------------------------------------------------------------------------- between two nodes


class Door(socketserver.ThreadingTCPServer):
    """A listener on ``port`` (0: chosen by the system). It answers each line with this node's number and clock.

    Raises `OSError` if it cannot have the port.
    """

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, node: int, port: int = 0) -> None:
        self.node = node
        super().__init__(("", port), _Answers)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.2,), daemon=True).start()

    def server_bind(self) -> None:
        """Bind the port for both kinds of addresses."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def close(self) -> None:
        """Close the listener and end its thread."""
        self.shutdown()
        self.server_close()


class _Answers(socketserver.StreamRequestHandler):
    timeout = CONNECT
    server: Door

    def handle(self) -> None:
        with suppress(OSError, ValueError):
            for _ in self.rfile:
                self.wfile.write(json.dumps({"node": self.server.node, "time": time.time()}).encode() + b"\n")


def look_in(node: int, address: str, port: int) -> dict[str, Any]:
    """Connect to a node. ``error`` is empty if it answered. ``skew_s`` is its clock less ours, within ``within_s``:
    half the quickest round trip of a few requests."""
    try:
        with (
            socket.create_connection((address, port), timeout=CONNECT) as client,
            client.makefile("rw", encoding="utf-8") as stream,
        ):
            skew, within = 0.0, math.inf
            for _ in range(5):
                asked, began = time.time(), time.monotonic()
                stream.write("\n")
                stream.flush()
                answer = json.loads(stream.readline())
                half = (time.monotonic() - began) / 2
                if answer["node"] != node:
                    return {"error": f"{address}:{port} is node {answer['node']}"}
                if half < within:
                    skew, within = answer["time"] - (asked + half), half
    except (OSError, ValueError, KeyError) as exc:
        return {"error": f"{address}:{port}: {_why(exc)}"}
    return {"error": "", "skew_s": round(skew, 6), "within_s": round(within, 6)}


def _why(exc: Exception) -> str:
    return str(getattr(exc, "strerror", None) or exc or type(exc).__name__)


def knock(address: str, port: int) -> str:
    """Connect without sending anything. Return an empty text if a server listens there, else the reason."""
    try:
        socket.create_connection((address, port), timeout=CONNECT).close()
    except OSError as exc:
        return _why(exc)
    return ""


def knock_at_all(doors: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Try `knock` at each port of node 0, by name and by address; in parallel, because filtered ports are slow."""
    with ThreadPoolExecutor(32) as pool:
        tries = {
            way: {port: pool.submit(knock, doors[way], int(port)) for port in doors["ports"]}
            for way in ("name", "address")
        }
        return {way: {port: one.result() for port, one in row.items()} for way, row in tries.items()}


@contextmanager
def doors_of(ports: Sequence[int], free: int) -> Iterator[dict[str, str]]:
    """Listen on each free one of ``ports``. Yield the state of each port; ``free`` is one that the system chose."""
    with ExitStack() as stack:
        found = {}
        for port in ports:
            try:
                stack.callback(Door(0, port).close)
                found[str(port)] = "free"
            except OSError as exc:
                found[str(port)] = "in use" if exc.errno == errno.EADDRINUSE else os.strerror(exc.errno or 0)
        yield {**found, str(free): "chosen by the system"}


def address_towards(other: str) -> str:
    """Return this node's own address towards ``other``, by which others reach it on any port, as NCCL does.

    A name may belong to a service that forwards only some ports.
    """
    family, kind, _, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # UDP: nothing is sent, the system only chooses the source address
        return str(probe.getsockname()[0])


# ------------------------------------------------------------------------------------------------------------ all nodes


def main(words: Sequence[str] | None = None) -> int:
    """Run one rank's part. Return 0 if the checks could run; the report has their findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", default="", help="ports of node 0 to try, with commas between")
    parser.add_argument("--grace", action="store_true", help="then wait for the stop signal")
    options = parser.parse_args(words)
    rank, node = int(os.environ.get("RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
    stopped: list[float] = []  # the time of the stop signal (monotonic seconds), which does not end this process then
    if options.grace:
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(time.monotonic()))
    mine = facts()
    if mine["torch"] is None:
        bare = {"nodes": {str(node): mine}, "links": {}, "allreduce": None, "error": NO_TORCH}
        _write(bare, rank)
        return 0
    _use_gpu(mine)
    _say(BEGUN)
    dist: Any = importlib.import_module("torch.distributed")
    wait = datetime.timedelta(seconds=PATIENCE)
    store, rank, world = next(dist.rendezvous("env://", timeout=wait))
    store.set_timeout(wait)
    report = between(store, rank, world, mine, [int(port) for port in options.ports.split(",") if port])
    if not options.grace:
        _write(report, rank)  # written before a possible hang
    if any(link["error"] for row in report["links"].values() for link in row.values()):
        report["error"] = "no all-reduce: some nodes cannot reach others"
    elif world > 1:
        gpus = all(at["gpus"] >= at["ranks"] for at in report["nodes"].values())
        report["allreduce"] = allreduce(store, rank, world, "nccl" if gpus else "gloo")
    store.set(f"done{rank}", "")
    if rank == 0:  # its process may hold the store
        for number in range(world):
            store.get(f"done{number}")
    report = json.loads(json.dumps(report))  # its keys are texts, as in the file
    _write(report, rank)
    if rank == 0:
        _say(table(report))
    if options.grace:
        _hold(stopped, says=os.environ.get("LOCAL_RANK", "0") == "0", first=rank == 0)
    return 0


def between(store: Any, rank: int, world: int, mine: dict[str, Any], ports: Sequence[int]) -> dict[str, Any]:
    """Return the report, less the all-reduce: each node's facts, its links, and its way to each port of node 0."""
    node, leads = int(os.environ.get("GROUP_RANK", "0")), os.environ.get("LOCAL_RANK", "0") == "0"
    name, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    count = _nodes(store, world)
    with ExitStack() as stack:
        if leads:
            door = stack.enter_context(closing(Door(node)))
            towards = json.loads(store.get("node1"))["address"] if node == 0 and count > 1 else name
            mine |= {"address": address_towards(towards), "port": door.port}
            if node == 0:
                tried = sorted({*ports, *((port, port + 1) if port else ())})
                opened = stack.enter_context(doors_of(tried, door.port))
                store.set("doors", json.dumps({"name": name, "address": mine["address"], "ports": opened}))
            store.set(f"node{node}", json.dumps(mine))
        nodes = {number: json.loads(store.get(f"node{number}")) for number in range(count)}
        doors = json.loads(store.get("doors"))
        if leads:
            others = {n: look_in(n, at["address"], at["port"]) for n, at in nodes.items() if n != node}
            store.set(f"links{node}", json.dumps([others, knock_at_all(doors) if node else None]))
        found = {number: json.loads(store.get(f"links{number}")) for number in nodes}
    return {
        "nodes": nodes,
        "links": {number: links for number, (links, _) in found.items()},
        "ports": {**doors, "from": {number: tried for number, (_, tried) in found.items() if number}},
        "allreduce": None,
        "error": "",
    }


def _use_gpu(mine: Mapping[str, Any]) -> None:
    """Run a kernel on this rank's own GPU, if each rank has one. A broken GPU raises here, or never answers."""
    if mine["gpus"] >= mine["ranks"]:
        torch: Any = importlib.import_module("torch")
        (torch.zeros(1, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}") + 1).cpu()


def _hold(stopped: Sequence[float], *, says: bool, first: bool) -> None:
    """Wait for the stop signal, then repeatedly print the seconds since then, until this process is killed."""
    time.sleep(SETTLE)
    end = time.monotonic() + HOLD
    if first:
        _say(READY)
    while time.monotonic() < (stopped[0] + HOLD if stopped else end):
        if stopped and says:
            _say(f"preflight: {time.monotonic() - stopped[0]:.1f} s since the stop signal")
        time.sleep(BEAT)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _nodes(store: Any, world: int) -> int:
    """Return the number of nodes: every rank writes its own node's number and reads all others'."""
    rank, node = os.environ.get("RANK", "0"), os.environ.get("GROUP_RANK", "0")
    store.set(f"rank{rank}", node)
    return max(int(store.get(f"rank{number}")) for number in range(world)) + 1


def allreduce(store: Any, rank: int, world: int, backend: str) -> dict[str, Any]:
    """Time all-reduces of all ranks.

    Bandwidths are those of nccl-tests, in 10^9 bytes a second. The algorithm's is bytes by seconds of the slowest rank;
    the bus's is that times 2 (n - 1) / n.
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
            seconds = float(took.item())
            speed = size / seconds / 1e9
            bus = speed * 2 * (world - 1) / world
            rows.append({"bytes": size, "seconds": seconds, "algbw": speed, "busbw": bus})
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {"backend": backend, "ranks": world, "right": right, "rows": rows}


def _write(report: Mapping[str, Any], rank: int) -> None:
    if rank == 0:
        folder = Path(os.environ.get("CLOUDTRAIN_ARTIFACT_DIR", "."))
        (folder / REPORT).write_text(json.dumps(report), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- the report


class Finding(NamedTuple):
    """A problem and its fix in one line. ``node`` has it; None: no single node does. With a ``category`` of failures,
    ranks must not start."""

    text: str
    node: int | None = None
    category: str = "infra"


def problems(report: Mapping[str, Any], *, nodes: int, gpus: int | None) -> list[str]:
    """Return a line for each problem, with its fix. ``gpus`` is the number that each node must have (None: unknown)."""
    return [found.text for found in findings(report, nodes=nodes, gpus=gpus)]


def findings(report: Mapping[str, Any], *, nodes: int, gpus: int | None) -> Iterator[Finding]:
    """Yield the problems in a report; see `problems`."""
    rows: Mapping[str, Mapping[str, Any]] = report["nodes"]
    if report.get("error") and not report["links"] and not any(row.get("torch") for row in rows.values()):
        why = f"no node could be compared: {report['error']}; give the job an image with torch"
        yield Finding(why, category="image")
        return
    if len(rows) != nodes:
        yield Finding(f"{len(rows)} of {nodes} nodes have reported; see the logs of the others")
    yield from _differences(rows)
    most = max((row["gpus"] for row in rows.values()), default=0)
    for number, row in rows.items():
        wanted = gpus if gpus is not None else max(most, row["ranks"]) if most else 0
        if row["gpus"] != wanted:
            few = row["gpus"] < wanted
            why = "CUDA in the image, or a driver that it can use" if few else "another machine"
            text = f"node {number} has {row['gpus']} GPUs for torch, {wanted} are expected: check {why}"
            yield Finding(text, int(number), "infra" if few else "")
    yield from _bad_links(report["links"])
    for number, row in rows.items():
        writable = {name: each["writable"] for name, each in row.get("folders", {}).items()}
        if silent := [name for name in OWN if writable.get(name, True) is None]:
            why = f"gives no answer for its {', '.join(silent)} in {ANSWER:.0f} s: look at the mounts of this machine"
            yield Finding(f"node {number} {why}", int(number))
        if closed := [name for name in OWN if writable.get(name) is False]:
            fix = "make room there, or let its user write"
            yield Finding(f"node {number} cannot write to its {', '.join(closed)}: {fix}", int(number))
    speeds = report.get("allreduce")
    if speeds is not None and not speeds["right"]:
        yield Finding("an all-reduce gave a wrong sum; do not train on these nodes")
    alone = sum(row["ranks"] for row in rows.values()) == 1
    unreached = any(link["error"] for links in report["links"].values() for link in links.values())
    if speeds is None and (report.get("error") or not alone) and not unreached:
        yield Finding(f"no all-reduce came to its end: {report.get('error') or 'see the logs of the run'}")


def _differences(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name in ALIKE:
        values: dict[Any, list[str]] = {}
        for number, row in rows.items():
            values.setdefault(row.get(name), []).append(number)
        if len(values) > 1:
            listed = ", ".join(f"{value or 'none'} on node {', '.join(numbers)}" for value, numbers in values.items())
            fix = "give all nodes one kind of machine" if name in ("driver", "machine") else "give all nodes one image"
            yield Finding(f"{name} differs: {listed}; {fix}", category="")


def _bad_links(links: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Yield the broken links, each with the one of its two nodes that has more of them, and clocks that are wrong."""
    broken = [(number, other) for number, row in links.items() for other, link in row.items() if link["error"]]
    ends = [number for link in broken for number in link]
    for number, row in links.items():
        for other, link in row.items():
            if link["error"]:
                fix = "open all TCP ports between the nodes (security group, firewall, network)"
                most = max((number, other), key=ends.count)
                alone = ends.count(number) != ends.count(other)
                text = f"node {number} cannot reach node {other} ({link['error']}); {fix}"
                yield Finding(text, int(most) if alone else None)
            elif number == "0" and abs(link["skew_s"]) - link["within_s"] > SKEW:
                way = "ahead of" if link["skew_s"] > 0 else "behind"
                fix = "let the nodes keep time (chrony, NTP)"
                text = f"the clock of node {other} is {abs(link['skew_s']):.1f} s {way} that of node 0; {fix}"
                yield Finding(text, int(other), category="")


def table(report: Mapping[str, Any]) -> str:
    """Return the report for people."""
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
    pairs = [link for links in report["links"].values() for link in links.values()]
    if pairs:
        lines.append(f"connections between nodes: {sum(not link['error'] for link in pairs)} of {len(pairs)}")
    lines += _ports(report.get("ports") or {})
    lines += _folders(report["nodes"])
    lines += _grace(report.get("grace") or {})
    if any((row["shm_bytes"] or SMALL_SHM + 1) <= SMALL_SHM for row in report["nodes"].values()):
        lines.append("note: /dev/shm is small; DataLoader's workers may die of it (shm_gb)")
    if speeds := report.get("allreduce"):
        lines.append(f"all-reduce of {speeds['ranks']} ranks by {speeds['backend']}:")
        body = [(f"{r['bytes'] / MIB:g} MiB", f"{r['algbw']:.3g}", f"{r['busbw']:.3g}") for r in speeds["rows"]]
        lines += _columns([("size", "algbw GB/s", "busbw GB/s"), *body])
    return "\n".join(lines)


def _ports(found: Mapping[str, Any]) -> list[str]:
    """Return how many other nodes reach each port of node 0, and the first failure."""
    tries: Mapping[str, Mapping[str, Mapping[str, str]]] = found.get("from") or {}
    if not tries:
        return []

    def reached(way: str, port: str) -> str:
        errors = [tried[way][port] for tried in tries.values()]
        wrong = next(filter(None, errors), "")
        return f"{errors.count('')} of {len(errors)}" + (f" ({wrong})" if wrong else "")

    rows = [(port, what, reached("name", port), reached("address", port)) for port, what in found["ports"].items()]
    head = f"ports of node 0, and how many other nodes reach them by its name ({found['name']}) and by its address"
    return [f"{head} ({found['address']}):", *_columns([("port", "on node 0", "by name", "by address"), *rows])]


def _grace(found: Mapping[str, Any]) -> list[str]:
    """Return lines with each node's life after the stop signal."""
    rows = []
    for number, row in (found.get("nodes") or {}).items():
        seconds = "-" if row["seconds"] is None else f"at least {row['seconds']:.1f} s"
        rows.append((number, seconds, "its own, in time" if row["recorded"] else "killed"))
    head = f"from SIGTERM to SIGKILL ({found['reckoned']:g} s are reckoned with):" if rows else ""
    return [head, *_columns([("node", "time", "end"), *rows])] if rows else []


def _folders(nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the nodes' folders, with equal ones in one row."""
    alike: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for number, node in nodes.items():
        for name, row in (node.get("folders") or {}).items():
            writable = {True: "yes", False: "no", None: "no answer"}[row["writable"]]
            alike.setdefault((name, row["kind"] or "-", writable), []).append((number, row))
    rows = []
    for (name, kind, writable), of in sorted(alike.items()):
        free = min((row["free_bytes"] for _, row in of if row["free_bytes"] is not None), default=None)
        where = "all" if len(of) == len(nodes) else ", ".join(number for number, _ in of)
        rows.append((name, where, kind, "-" if free is None else f"{free / 1e9:.1f} GB", writable, of[0][1]["path"]))
    return _columns([("folder", "nodes", "file system", "free", "writable", "path"), *rows]) if rows else []


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
