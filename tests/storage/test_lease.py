"""lease.py: one client at a time, even if clients die or stall. Clients that stage and clients that delete see each
other."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from faulty_s3 import FaultyS3
from fsspec.implementations.memory import MemoryFileSystem
from servers import point_aws_at, race

from cloudtrain.errors import AuthError, StorageError
from cloudtrain.storage import lease as leases
from cloudtrain.storage.errors import Retries
from cloudtrain.storage.files import Entry, Files, Loaded, LocalFiles, files, parallel
from cloudtrain.storage.lease import FOLDER, MARK, Lease, announce, is_mark, is_released, withdraw
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.storage.timings import CLIENT_TIMINGS

EARLIER = [
    b"0123456789abcdef" * 2,
    b"1" * 32,
    b'{"client": "0123456789abcdef"}',
    b"",
    b"\xff",
    b"[]",
    b'{"holder": null}',
]
"""Marks of earlier versions: a token of gc, a claim of Vertex AI, and a partial file of a killed writer."""


class OnlyCreates(LocalFiles):
    """A folder that cannot replace a file under a condition."""

    swaps = False

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        assert version is None
        return super().swap(key, version, data)


@pytest.fixture(params=["local", "memory", "only creates"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    if request.param == "only creates":
        yield OnlyCreates(root=tmp_path / "store")
        return
    yield files(f"file://{tmp_path}/store" if request.param == "local" else "memory://bucket/store")
    MemoryFileSystem.store.clear()


REMOTE = [pytest.param(name, marks=pytest.mark.remote) for name in ("s3", "azure", "gcs", "obs")]


@pytest.fixture(params=["local", *REMOTE])
def url(request: pytest.FixtureRequest, tmp_path: object) -> str:
    """Return the URL of a store that several processes reach."""
    return f"file://{tmp_path}/store" if request.param == "local" else request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def close_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a lease often, so that a wait for it lasts hardly longer than the lease."""
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_pauses", (0.05, 0.1))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put holders on other machines: their processes cannot be checked."""
    monkeypatch.setattr(leases, "_machine", lambda: "")


def held(store: Files) -> bool:
    found = leases.load_lease(store, MARK)
    return found is not None and not is_released(found)


def below(store: Files, name: str) -> Files:
    """Return another store of the same kind."""
    return OnlyCreates(root=store.root / name) if isinstance(store, OnlyCreates) else files(f"{store.url}/{name}")


def content(store: Files) -> bytes:
    """Return the content of the lease's file."""
    found = leases.load_lease(store, MARK)
    assert found is not None
    return found.data


def replace(store: Files, data: bytes) -> None:
    """Write the lease's file, as another client that took over."""
    found = leases.load_lease(store, MARK)
    store.write(MARK if store.swaps else f"{MARK}.versions/{int(found.version) + 1 if found else 1}", data)


# ------------------------------------------------------------------------------------------------- staging and deleting


def test_what_is_announced_is_there_until_it_is_taken_back(store: Files) -> None:
    key = announce(store, "run-1", ["b", "a"])
    assert list(store.list(FOLDER)) == [key]
    assert b'"contents": ["a", "b"]' in store.read(key)
    again = announce(store, "run-1", ["c"])
    assert again != key, "two clients with one run id do not write over each other's word"
    withdraw(store, key)
    withdraw(store, key)
    assert list(store.list(FOLDER)) == [again]


def test_who_stages_waits_for_who_deletes(store: Files) -> None:
    messages: list[str] = []
    with Lease(store, MARK, seconds=60) as deleting:
        waiting = threading.Thread(target=announce, args=(store, "run-1", ["a"]), kwargs={"say": messages.append})
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        assert len(store.list(FOLDER)) == 2, "it is announced all the while"
        deleting.check()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    assert messages == ["waiting: another client deletes from this store"]
    assert not held(store)


def test_a_store_that_forbids_removal_is_no_failure(tmp_path: Path) -> None:
    class Kept(LocalFiles):
        def remove(self, prefix: str) -> None:
            raise FileExistsError(prefix)

        def discard(self, keys: Sequence[str]) -> None:
            raise AuthError("no removal")

    store = Kept(root=tmp_path)
    withdraw(store, announce(store, "run-1", ["a"]))
    store.write(MARK, b"another's")
    Lease(store, MARK, seconds=0.5).wait()
    assert not held(store)


# --------------------------------------------------------------------------------------------------------- many holders


def test_one_deletes_at_a_time(store: Files) -> None:
    at_once: list[int] = []
    inside: set[int] = set()

    def work(number: int) -> None:
        with Lease(store, MARK, seconds=60):
            inside.add(number)
            at_once.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert at_once == [1, 1, 1, 1]
    assert all(is_mark(key) for key in store.list(FOLDER))
    assert not held(store)


#: For `race`: ``argv[2]`` times one more in the file ``n`` of the store ``argv[1]``, which only a lease makes safe.
HOLDER = """
import time
from cloudtrain.storage import lease
from cloudtrain.storage.files import files
from cloudtrain.storage.timings import CLIENT_TIMINGS
CLIENT_TIMINGS.lease_pauses = (0.01, 0.05)
tree = files(sys.argv[1])
tree.load("n")
ready()
for _ in range(int(sys.argv[2])):
    with lease.Lease(tree, lease.MARK, seconds=120) as held:
        found = tree.load("n")
        time.sleep(0.02)
        held.check()
        tree.write("n", str(int(found.data if found else 0) + 1).encode())
print(json.dumps(None))
"""


@pytest.mark.slow
def test_processes_hold_it_one_after_another(url: str) -> None:
    race(HOLDER, url, "4", count=3)
    assert files(url).read("n") == b"12"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        point_aws_at(server.url, monkeypatch, tmp_path)
        yield server
        server.shutdown()


@pytest.mark.remote
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2))])
def test_lost_answers_make_no_second_holder(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """After a lost answer, the client finds out the swap's effect. A client that gives up delays the others only
    briefly."""
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_pauses", (0.01, 0.05))
    draw = random.Random(seed)
    s3.faults = [draw.choice(["lost", "lost", "reset", "refuse", None, None, None]) for _ in range(600)]
    inside, took = set[int](), list[int]()

    def work(number: int) -> None:
        retries = Retries(tries=2, sleep=lambda _: None)
        tree = RemoteFiles(url="s3://bucket/store", retries=retries)
        for _ in range(4):
            while True:
                try:
                    with Lease(tree, MARK, seconds=120, after=0.05) as lease:
                        inside.add(number)
                        assert inside == {number}
                        time.sleep(0.01)
                        lease.check()
                        assert inside == {number}
                        took.append(number)
                        inside.remove(number)
                    break
                except StorageError:
                    continue

    parallel(work, list(range(4)), jobs=4)
    assert sorted(took) == sorted([0, 1, 2, 3] * 4)


def test_an_answer_that_was_lost_is_no_reason_to_wait_for_oneself(tmp_path: Path) -> None:
    class Lossy(LocalFiles):
        lose = False

        def swap(self, key: str, version: str | None, data: bytes) -> str:
            made = super().swap(key, version, data)
            if self.lose:
                raise StorageError("no answer")
            return made

    store = Lossy(root=tmp_path)
    store.lose = True
    with pytest.raises(StorageError, match="no answer"), Lease(store, MARK, seconds=60):
        raise AssertionError
    assert held(store)
    store.lose = False
    began = time.monotonic()
    with Lease(store, MARK, seconds=60) as lease:
        lease.check()
    assert time.monotonic() - began < 30


# ----------------------------------------------------------------------------------------------- renewal, loss, release


@pytest.mark.slow
def test_a_live_one_renews_its_mark(store: Files, elsewhere: None) -> None:
    with Lease(store, MARK, seconds=5) as lease:
        words, began = {content(store)}, time.monotonic()
        other = threading.Thread(target=lambda: Lease(store, MARK, seconds=1.5).wait(), daemon=True)
        other.start()
        while len(words) < 4 or time.monotonic() - began < 1.7:
            time.sleep(0.05)
            words.add(content(store))
            lease.check()
        assert other.is_alive()
    other.join(timeout=10)


def test_who_lost_its_mark_deletes_no_more(store: Files) -> None:
    with Lease(store, MARK, seconds=1) as lease:
        replace(store, b"another's")
        time.sleep(0.3)
        with pytest.raises(StorageError, match="run the same command again"):
            lease.check()
    assert content(store) == b"another's"


def test_who_was_held_up_does_nothing_more(store: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lease(store, MARK, seconds=60) as lease:
        lease._since = (0.0, 0.0)
        with pytest.raises(StorageError, match="held up for too long, so another client may have taken over"):
            lease.check()
    assert not held(store), "it was ours all the same"


def test_a_release_that_comes_late_hits_no_other_lease(store: Files) -> None:
    first = Lease(store, MARK, seconds=60)
    with first:
        replace(store, b"another's")
    assert content(store) == b"another's"


def test_a_kept_lease_is_left_to_its_expiry(store: Files, elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lease(store, MARK, seconds=60) as lease:
        lease.kept = True
    assert held(store)
    began = time.monotonic()
    with Lease(store, MARK, seconds=60, after=0.5):
        assert time.monotonic() - began >= 0.5, "this process has given it up"
    with Lease(store, MARK, seconds=60) as lease:
        lease.kept = True
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_given_up", 0.5)
    began = time.monotonic()
    with Lease(store, MARK, seconds=60, after=60):
        assert 0.5 <= time.monotonic() - began < 30, "the process does not know that its own call has ended"


# ------------------------------------------------------------------------------------- a store that only creates files


class Dated(OnlyCreates):
    """A store with a set clock: each file has the age that ``ages`` gives for its number."""

    ages: Mapping[str, float] = {}

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        found = super().entries(prefix)
        return {key: entry._replace(modified=entry.modified - self.ages.get(key, 0.0)) for key, entry in found.items()}


def version(number: int) -> str:
    return f"{MARK}.versions/{number}"


def test_old_versions_go_at_the_release(tmp_path: Path) -> None:
    store = Dated(root=tmp_path)
    for _ in range(3):
        with Lease(store, MARK, seconds=300):
            pass
    assert set(store.list()) == {version(number) for number in range(1, 7)}, "a client may be about to take one's place"
    store.ages = {version(1): 301.0, version(2): 299.0, version(6): 1000.0}
    with Lease(store, MARK, seconds=300) as lease:
        assert lease.renew()
    assert set(store.list()) == {version(number) for number in (2, 3, 4, 5, 7, 8, 9)}


def test_the_newest_version_stays_whatever_its_age(tmp_path: Path) -> None:
    store = Dated(root=tmp_path)
    store.ages = {version(number): 1000.0 for number in range(1, 10)}
    with Lease(store, MARK, seconds=300):
        pass
    assert set(store.list()) == {version(1), version(2)}


def test_a_client_that_makes_a_removed_version_again_has_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It paused between its check and its creation. No other client takes its file for the newest."""
    store = Dated(root=tmp_path)
    with Lease(store, MARK, seconds=300):
        pass

    class Slow(OnlyCreates):
        def swap(self, key: str, version_: str | None, data: bytes) -> str:
            with Lease(store, MARK, seconds=300):
                pass
            store.discard([key])  # as a release does 300 s later
            real = time.monotonic()
            monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: real + 301, time=time.time))
            return super().swap(key, version_, data)

    with Lease(Slow(root=tmp_path), MARK, seconds=300) as lease:
        assert store.exists(version(3))
        with pytest.raises(StorageError, match="another client may have taken over"):
            lease.check()
        assert not held(store)
        assert not lease.renew()
    assert not held(store)


# --------------------------------------------------------------------------------------------- dead and stalled holders

#: Holds the lease of the store ``argv[1]`` for ``argv[2]`` seconds, and prints whether it may continue after each line.
LONG_HOLDER = """
import sys
from cloudtrain.errors import StorageError
from cloudtrain.storage import lease
from cloudtrain.storage.files import files
if sys.argv[3] == "elsewhere":
    lease._machine = lambda: "another machine"
tree = files(sys.argv[1])
tree.create(sys.argv[2], b"the bucket is probed")
with lease.Lease(tree, lease.MARK, seconds=float(sys.argv[2])) as held:
    print("held", flush=True)
    for line in sys.stdin:
        try:
            held.check()
            print("goes on", flush=True)
        except StorageError:
            print("stops", flush=True)
"""


@pytest.fixture
def holder(url: str) -> Iterator[Any]:
    processes: list[subprocess.Popen[str]] = []

    def hold(seconds: float, where: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LONG_HOLDER, url, str(seconds), where]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        with process:
            process.kill()


def taken_over(url: str, seconds: float, *, by: int = 4) -> float:
    """Let ``by`` clients of threads want the lease at once: one at a time has it; the seconds until the first did."""
    inside, began, first = list[int](), time.monotonic(), list[float]()

    def work(number: int) -> None:
        with Lease(files(url), MARK, seconds=seconds) as lease:
            first.append(time.monotonic() - began)
            inside.append(number)
            assert len(inside) == 1
            time.sleep(0.05)
            lease.check()
            inside.remove(number)

    parallel(work, list(range(by)), jobs=by)
    assert len(first) == by
    return min(first)


def test_the_lease_of_a_killed_process_of_this_machine_is_free(url: str, holder: Any, close_looks: None) -> None:
    process = holder(120, "here")
    process.kill()
    process.wait()
    assert 1 <= taken_over(url, 120) < 60


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_process_that_the_system_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, as on shared machines, /proc has no folder of another user's process."""

    def is_ended(kill: Exception | None) -> bool:
        monkeypatch.setattr(os, "kill", Mock(side_effect=kill))
        record = {"machine": leases._machine(), "process": f"{os.getpid()} 1", "client": "another", "holder": "token"}
        return leases._has_ended(record)

    assert is_ended(PermissionError()), "the id is in use again"
    monkeypatch.setattr(leases, "_process", lambda pid: "")
    assert not is_ended(PermissionError())
    assert is_ended(ProcessLookupError())
    assert is_ended(None), "a process of this user is never hidden, so this is one that nothing waits for"


@pytest.mark.slow
def test_the_lease_of_a_killed_process_elsewhere_expires(url: str, holder: Any, close_looks: None) -> None:
    process = holder(120, "elsewhere")
    process.kill()
    process.wait()
    assert taken_over(url, 3) >= 1.5, "the client watches the lease; it does not trust the store's clock"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_who_was_stopped_for_too_long_does_not_go_on(url: str, holder: Any, close_looks: None) -> None:
    process = holder(3, "elsewhere")
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "goes on\n"
    process.send_signal(signal.SIGSTOP)
    try:
        with Lease(files(url), MARK, seconds=3) as lease:
            process.send_signal(signal.SIGCONT)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "stops\n"
            time.sleep(0.5)  # it neither renews nor releases now
            process.communicate(timeout=30)
            lease.check()
            assert held(files(url))
    finally:
        process.send_signal(signal.SIGCONT)
    assert not held(files(url))


@pytest.mark.slow
def test_a_mark_of_an_earlier_version_counts_until_it_expires(store: Files) -> None:
    """Each has its own store, and all run at once, because nearly all of the time is waiting."""

    def check(number: int) -> None:
        own, mark = below(store, str(number)), EARLIER[number]
        replace(own, mark)
        begun = time.monotonic()
        announce(own, "run-1", ["a"], seconds=0.5)
        assert time.monotonic() - begun >= 0.15
        assert not held(own), "and is not waited for again"
        replace(own, mark)
        with Lease(own, MARK, seconds=1) as lease:
            lease.check()
            assert held(own)

    parallel(check, list(range(len(EARLIER))), jobs=len(EARLIER))


class NoTimes(LocalFiles):
    """A store whose listing has neither versions nor times."""

    def load(self, key: str) -> Loaded | None:
        found = super().load(key)
        return found and found._replace(modified=0.0)

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        return {key: Entry(entry.size, "", 0.0) for key, entry in super().entries(prefix).items()}


def test_a_store_that_tells_no_times(tmp_path: Path) -> None:
    store = NoTimes(root=tmp_path)
    store.write(MARK, b"of a killed one")
    begun = time.monotonic()
    announce(store, "run-1", ["a"], seconds=1)
    assert time.monotonic() - begun >= 1
    with Lease(store, MARK, seconds=1) as lease:
        lease.check()
