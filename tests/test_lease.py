"""lease.py: who stages and who deletes see each other; a mark that nobody renews holds nobody up for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cloudtrain.errors import StorageError
from cloudtrain.storage.files import Entry, Files, LocalFiles, files
from cloudtrain.storage.lease import FOLDER, MARK, GcLease, announce, withdraw


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: object) -> Iterator[Files]:
    yield files(f"file://{tmp_path}/store" if request.param == "local" else "memory://bucket/store")
    MemoryFileSystem.store.clear()


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
    said: list[str] = []
    with GcLease(store, seconds=60) as deleting:
        waiting = threading.Thread(target=announce, args=(store, "run-1", ["a"]), kwargs={"say": said.append})
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        assert len(store.list(FOLDER)) == 2, "it is announced all the while"
        deleting.check()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    assert said == ["waiting: somebody deletes from this store"]
    assert MARK not in store.list(FOLDER)


def test_one_deletes_at_a_time(store: Files) -> None:
    at_once: list[int] = []
    inside: set[int] = set()

    def work(number: int) -> None:
        with GcLease(store, seconds=60):
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
    assert store.list(FOLDER) == {}


def test_the_mark_of_one_that_died_runs_out(store: Files) -> None:
    begun = time.monotonic()
    store.write(MARK, b"of a killed one")
    announce(store, "run-1", ["a"], seconds=0.5)
    assert time.monotonic() - begun >= 0.3
    assert store.read(MARK) == b"of a killed one", "only who deletes takes it over"
    with GcLease(store, seconds=0.5) as deleting:
        deleting.check()
        assert store.read(MARK) != b"of a killed one"
    assert MARK not in store.list(FOLDER)


def test_a_live_one_renews_its_mark(store: Files) -> None:
    with GcLease(store, seconds=1) as deleting:
        words = {store.read(MARK)}
        for _ in range(15):
            time.sleep(0.1)
            words.add(store.read(MARK))
            deleting.check()
        assert len(words) > 5


def test_who_lost_its_mark_deletes_no_more(store: Files) -> None:
    with GcLease(store, seconds=0.5) as deleting:
        store.write(MARK, b"another's")
        time.sleep(0.3)
        with pytest.raises(StorageError, match="start again"):
            deleting.check()
    assert store.read(MARK) == b"another's"


class NoTimes(LocalFiles):
    """A store whose listing tells neither versions nor times."""

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        return {key: Entry(entry.size, "", 0.0) for key, entry in super().entries(prefix).items()}


def test_a_store_that_tells_no_times(tmp_path: Path) -> None:
    store = NoTimes(root=tmp_path)
    store.write(MARK, b"of a killed one")
    begun = time.monotonic()
    announce(store, "run-1", ["a"], seconds=0.5)
    assert time.monotonic() - begun >= 0.5
    with GcLease(store, seconds=0.5) as deleting:
        deleting.check()
    assert time.monotonic() - begun < 10


def test_times_alone_make_nobody_pass(tmp_path: Path) -> None:
    """A clock that is put forward while the mark is alive: it is watched all the same."""
    store = files(f"file://{tmp_path}/store")
    with GcLease(store, seconds=3):
        os.utime(tmp_path / "store" / MARK, (1, 1))
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            announce(store, "run-1", ["a"], seconds=3, sleep=_once)
        assert time.monotonic() - begun < 3


def _once(seconds: float) -> None:
    raise TimeoutError


def test_who_was_held_up_leaves_the_mark(store: Files) -> None:
    with GcLease(store, seconds=60) as deleting:
        deleting._since = (0.0, 0.0)
    assert MARK in store.list(FOLDER)


def test_a_store_that_forbids_removal_is_no_failure(tmp_path: Path) -> None:
    class Kept(LocalFiles):
        def remove(self, prefix: str) -> None:
            raise FileExistsError(prefix)

    store = Kept(root=tmp_path)
    withdraw(store, announce(store, "run-1", ["a"]))
