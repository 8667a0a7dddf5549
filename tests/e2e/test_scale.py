"""A run of hundreds of nodes: the cost of each node, and that all are reported. docs/scale.md has the figures. Real
runtime code runs on simulated machines (`fleet`). The client is real too, on foldercloud."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import foldercloud
import pytest
from fleet import Fleet, Ranks
from fleet_run import PROCESSES, Place

from cloudtrain.engine.processes import free_port_pair
from cloudtrain.provider_api.protocol import LogLine, LogPage
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.log_order import Line
from cloudtrain.runtime.link import Link
from cloudtrain.storage.files import LocalFiles

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error")]

SIZES = [32, pytest.param(256, marks=pytest.mark.proof)]
STEPS, SAVED = 6, 3
REQUESTS = ("read", "entries", "names", "size", "create", "write", "download")
Say = Callable[[str, object], None]


@pytest.fixture(params=SIZES)
def nodes(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


# ------------------------------------------------------------------------------------------------------------- topology


def hosts_of_sagemaker(nodes: int, folder: Path) -> Iterator[tuple[int, Any]]:
    hosts = sorted(f"algo-{i + 1}" for i in range(nodes))  # as text, as the platform does
    config = folder / "input/config/resourceconfig.json"
    config.parent.mkdir(parents=True)
    for host in random.Random(0).sample(hosts, nodes):
        config.write_text(json.dumps({"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}))
        site = find_provider("sagemaker").node_environment({"SAGEMAKER_BASE_DIR": str(folder)}, {})
        assert json.loads(site.export_env["SM_HOSTS"]) == [f"algo-{i + 1}" for i in range(nodes)]
        yield int(host[5:]) - 1, site.topology


def nodes_of_azureml(nodes: int, folder: Path) -> Iterator[tuple[int, Any]]:
    for i in range(nodes):
        given = {"CLOUDTRAIN_NODES": str(nodes), "NODE_RANK": str(i), "MASTER_ADDR": "algo-1", "MASTER_PORT": "6105"}
        yield (
            i,
            find_provider("azureml")
            .node_environment({**given, "RANK": str(8 * i), "WORLD_SIZE": str(8 * nodes)}, {})
            .topology,
        )


def replicas_of_vertex(nodes: int, folder: Path) -> Iterator[tuple[int, Any]]:
    pools = {"workerpool0": ["algo-1:2222"], "workerpool1": [f"worker-1-{i}:2222" for i in range(nodes - 1)]}
    for i in range(nodes):
        task = {"type": f"workerpool{min(i, 1)}", "index": max(i - 1, 0)}
        spec = json.dumps({"cluster": pools, "environment": "cloud", "task": task})
        yield (
            i,
            find_provider("vertex")
            .node_environment({"CLOUDTRAIN_NODES": str(nodes), "CLUSTER_SPEC": spec}, {})
            .topology,
        )


@pytest.mark.parametrize("worlds_of", [hosts_of_sagemaker, nodes_of_azureml, replicas_of_vertex])
def test_256_nodes_each_know_which_they_are(
    worlds_of: Callable[[int, Path], Iterator[tuple[int, Any]]], tmp_path: Path
) -> None:
    found = dict(worlds_of(256, tmp_path))
    assert {number: topology.node_rank for number, topology in found.items()} == {i: i for i in range(256)}
    assert {(t.nodes, t.master_addr) for t in found.values()} == {(256, "algo-1")}
    assert len({t.master_port for t in found.values()}) == 1


# ---------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture
def place(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Place]:
    made = Place(tmp_path, nodes, monkeypatch, request)
    yield made
    made.close()


def content(node: int) -> bytes:
    """Return a node's part of a checkpoint."""
    return f"part {node} ".encode() * (node + 1)


def trains(ranks: Ranks) -> None:
    """Play a healthy script: lines, metrics, and one checkpoint of which each node writes a part."""
    ranks.start()
    for step in range(STEPS):
        if ranks.stop.wait(1.0):
            return ranks.stopped()
        for local in range(PROCESSES):
            ranks.says(f"step {step} of rank {ranks.first_rank + local}", local)
        if ranks.node == 0:
            ranks.measures(step)
        if step == SAVED:
            ranks.saves(f"step-{step}", content(ranks.node))
    ranks.over(0)
    return None


class Requests(Counter[str]):
    """The number of requests to the store, by method."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for name in REQUESTS:
            patch.setattr(LocalFiles, name, self._counting(name, getattr(LocalFiles, name)))

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            self[name] += 1
            return method(*args, **more)

        return counted


def pages_of(said: dict[int, list[str]], *, seed: int, lost: int = 0) -> list[tuple[LogLine, ...]]:
    """Return the platform's log. Its nodes are mixed; lines come up to some hundred positions late, some twice.
    ``lost`` nodes lack their second line."""
    chance = random.Random(seed)
    rows = [(i, LogLine(node=f"algo-{node}", text=text)) for node, of in said.items() for i, text in enumerate(of)]
    rows = [(i, line) for i, line in rows if not (i == 1 and int(line.node[5:]) < lost)]
    rows += chance.sample(rows, len(rows) // 10)
    mixed = [line for _, line in sorted(rows, key=lambda row: row[0] + chance.uniform(0, 3))]
    return [tuple(mixed[i : i + 1000]) for i in range(0, len(mixed), 1000)]


def test_a_run_of_many_nodes_from_its_start_to_the_client(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet although one is late, train, commit one checkpoint of all parts, and leave. The client gets
    every line."""
    nodes = place.nodes
    fleet = place.fleet(trains, late={nodes // 3: 20.0})
    fleet.run()
    place.costs(fleet)
    place.figure("peak memory for each node", f"{fleet.rss() / 1024:.0f} KiB")
    assert fleet.codes == dict.fromkeys(range(nodes), 0)
    # Each sends a few messages, for any number of nodes.
    assert max(fleet.world.sent[i] for i in range(1, nodes)) < 40
    assert fleet.world.sent[0] < 40 * nodes
    [commit] = place.live.glob("checkpoints/step-3/*/commit.json")
    output = json.loads(commit.read_bytes())
    assert output["nodes"] == nodes
    assert len(output["files"]) == nodes + 1
    assert all((commit.parent / f"node-{i}/step-3/__{i}_0.distcp").read_bytes() == content(i) for i in range(nodes))
    exits = fleet.exits()
    assert sorted(exits) == list(range(nodes))
    assert {(e["outcome"], e["decided"]) for n, e in exits.items() if n} == {("succeeded", False)}
    assert all(exits[i]["lines"] == len(fleet.said[i]) for i in range(nodes))
    place.jobs.stand("r.0", state="succeeded")
    requests = Requests(monkeypatch)
    assert place.run.status().state == "succeeded"
    assert place.run.result()["state"] == "succeeded"
    place.figure("requests of a result for each node", f"{requests.total() / nodes:.2f}")
    assert requests["entries"] + requests["names"] < 15  # the number of listings does not grow with the nodes
    requests.clear()
    followed(place, fleet, requests)
    requests.clear()
    pulled = place.run.pull(place.folder / "out")
    place.figure("requests of a pull for each node", f"{requests.total() / nodes:.2f}")
    assert requests["entries"] + requests["names"] < 20
    assert pulled is not None
    [part] = (place.folder / "out").rglob(f"__{nodes - 1}_0.distcp")
    assert part.read_bytes() == content(nodes - 1)


def followed(place: Place, fleet: Fleet, requests: Requests) -> None:
    """Read a log as a client does. Lines come late and twice, and a quarter of the nodes lack one."""
    pages = pages_of(fleet.said, seed=1, lost=place.nodes // 4)

    def logs(_: Any, native_id: str, cursor: Any = None) -> LogPage:
        at = cursor or 0
        return LogPage(lines=pages[at] if at < len(pages) else (), cursor=min(at + 1, len(pages)), more=at < len(pages))

    foldercloud.Provider.logs, before = logs, foldercloud.Provider.logs  # type: ignore[method-assign]
    try:
        began = time.process_time()
        got = list(place.run.logs(follow=True))
        place.figure(
            "CPU of the follower for each node", f"{1000 * (time.process_time() - began) / place.nodes:.1f} ms"
        )
    finally:
        foldercloud.Provider.logs = before  # type: ignore[method-assign]
    for node, lines in fleet.said.items():
        assert [numbered(line) for line in got if line.node == node] == lines
    place.figure("requests of a follower for each node", f"{requests.total() / place.nodes:.2f}")
    # A gap costs its segment, and no extra listing.
    assert requests["entries"] + requests["names"] < 15


def numbered(line: Line) -> str:
    rank = "-" if line.rank is None else line.rank
    return f"[a{line.attempt} n{line.node} r{rank} #{line.seq}] {line.text}"


# --------------------------------------------------------------------------------------------------------------- faults


CONSEQUENCES = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "RuntimeError: Broken pipe",
)


def fails(ranks: Ranks, *, bad: int) -> None:
    """Let one node's rank raise. Within milliseconds, by differing clocks, the others' collectives fail."""
    ranks.start()
    for step in range(3):
        if ranks.stop.wait(1.0):
            return ranks.stopped()
        ranks.says(f"step {step}")
    moment = 1010.0  # of the true time, when all have started
    ranks.world.sleep(moment - ranks.world.now + (0.0 if ranks.node == bad else 0.002 + 0.0001 * (ranks.node % 7)))
    if ranks.node == bad:
        ranks.raises("ValueError: bad sample 17", local=1)
    elif ranks.node % 5 == 0 and ranks.stop.wait(600.0):  # these hang in theirs
        ranks.stopped()
    elif ranks.node % 5:
        ranks.raises(CONSEQUENCES[ranks.node % 3])
    return None


def test_the_node_that_failed_is_named_among_all_whose_collectives_broke(place: Place) -> None:
    bad = place.nodes - 3
    fleet = place.fleet(partial(fails, bad=bad))
    fleet.run()
    place.costs(fleet)
    assert set(fleet.codes.values()) == {1}
    exits = fleet.exits()
    assert len(exits) == place.nodes
    raw = [exits[i]["failure"]["time_ns"] for i in range(1, place.nodes) if exits[i]["failure"]]
    assert min(raw) < exits[bad]["failure"]["time_ns"]  # by their own clocks, some consequences came first
    assert exits[0]["decided"]
    assert (exits[0]["failure"]["node"], exits[0]["failure"]["rank"]) == (bad, bad * PROCESSES + 1)
    place.jobs.stand("r.0", state="failed", category="user_error", reason="exit code 1")
    result = place.run.result()
    assert (result["state"], result["category"]) == ("failed", "user_error")
    assert result["reason"] == f"rank {bad * PROCESSES + 1} on node {bad} raised ValueError: bad sample 17 (train.py:7)"
    assert place.run.status().state == "failed"
    assert fleet.world.sent[0] < 20 * place.nodes


def hangs(ranks: Ranks) -> None:
    """Play a script whose collective never ends."""
    ranks.start()
    ranks.says("step 0")
    ranks.stop.wait(3600.0)
    ranks.stopped()


def test_a_machine_that_vanishes_is_named_when_it_has_been_silent_for_long(place: Place) -> None:
    """No node hears from it, and the others' collectives wait."""
    gone = place.nodes // 2
    fleet = place.fleet(hangs)
    fleet.start()
    fleet.until(lambda: len(fleet.said) == place.nodes and all(len(of) > 0 for of in fleet.said.values()), 30)
    fleet.world.end(gone, silent=True)
    fleet.until(fleet.over, 150)
    place.costs(fleet)
    assert fleet.codes.keys() == set(range(place.nodes)) - {gone}
    [said] = [line for line in fleet.said[0] if "failed: " in line]
    assert said.endswith(f"failed: node {gone} was lost: it was not heard of for 90 s")
    place.jobs.stand("r.0", state="failed", category="user_error", reason="exit code 1")
    result = place.run.result()
    assert (result["category"], result["failure"]["node"]) == ("infra", gone)
    assert result["reason"].startswith(f"node {gone} was lost")


def heeds(ranks: Ranks) -> None:
    """Play a script that handles the notice: it saves, and exits with 0."""
    ranks.start()
    ranks.says("step 0")
    ranks.notice.wait(3600.0)
    ranks.saves("step-1", content(ranks.node))
    ranks.world.sleep(1.0)
    ranks.over(0)


def test_a_platform_that_tells_all_nodes_at_once_costs_each_but_a_few_messages(place: Place) -> None:
    fleet = place.fleet(heeds, handles_notice=True)
    fleet.start()
    fleet.until(lambda: len(fleet.said) == place.nodes, 30)
    fleet.world.sleep(2.0)
    before = fleet.world.sent[0]
    for number in range(place.nodes):
        fleet.tell_to_stop(number)
    fleet.until(fleet.over, 110)
    place.costs(fleet)
    assert set(fleet.codes.values()) == {75}
    assert {e["outcome"] for e in fleet.exits().values()} == {"preempted"}
    [commit] = place.live.glob("checkpoints/step-1/*/commit.json")
    assert json.loads(commit.read_bytes())["nodes"] == place.nodes
    assert fleet.world.sent[0] - before < 30 * place.nodes


# --------------------------------------------------------------------------------------------------------- real sockets


def test_the_link_of_many_nodes_on_real_sockets(nodes: int, request: pytest.FixtureRequest) -> None:
    """Node 0 has one socket for each peer, and all receive its messages."""
    inboxes: list[queue.SimpleQueue[tuple[int, dict[str, Any]]]] = [queue.SimpleQueue() for _ in range(nodes)]
    port, threads = free_port_pair() + 1, threading.active_count()
    began = time.process_time()
    links = [
        Link(node=i, nodes=nodes, addr="127.0.0.1", port=port, key=b"k" * 32, inbox=inbox)
        for i, inbox in enumerate(inboxes)
    ]
    try:
        for link in links:
            link.open()
        for _ in range(nodes - 1):
            assert inboxes[0].get(timeout=60)[1]["t"] == "hello"
        assert links[0].connected() == set(range(1, nodes))
        links[0].send_all({"t": "go", "resume": ""})
        for inbox in inboxes[1:]:
            kinds = [inbox.get(timeout=60)[1]["t"] for _ in range(2)]
            assert kinds == ["hello", "go"]
        request.node.user_properties.append(
            (f"CPU of joining, {nodes} nodes", f"{1000 * (time.process_time() - began) / nodes:.1f} ms")
        )
    finally:
        for link in links:
            link.close()
        deadline = time.monotonic() + 30
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.02)
    assert threading.active_count() <= threads
