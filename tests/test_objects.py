"""objects.py and access.py: faults at the wire, creation, forks, threads, and the same credentials as fsspec."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from faulty import FAULTS, FaultyS3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import AZURITE_ACCOUNT, AZURITE_KEY, azurite, free_port, required, served
from worlds.azureml.wire import Answer, Wire

from cloudtrain.errors import AuthError, DigestError, SpecError, StorageError
from cloudtrain.storage import fsspec_backend, obstore_backend, remote
from cloudtrain.storage.errors import Retries
from cloudtrain.storage.files import TransferOptions, files, parallel
from cloudtrain.storage.obstore_config import Unproven, find_access
from cloudtrain.storage.remote import RemoteFiles

pytestmark = pytest.mark.remote

MOVERS = ["fsspec", "obstore"]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OBSTORE = TransferOptions(mover="obstore")


@pytest.fixture(scope="module")
def wire() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server
        server.shutdown()


@pytest.fixture
def s3(wire: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyS3:
    """An empty bucket, and this test's environment pointing at it. Parts are small."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    words = {"ENDPOINT_URL": wire.url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    words |= {"MAX_ATTEMPTS": "1", "EC2_METADATA_DISABLED": "true"}
    words |= {"CONFIG_FILE": str(tmp_path / "none"), "SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    for name, value in words.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(obstore_backend, "PIECE", 1 << 15)
    monkeypatch.setattr(obstore_backend, "CHUNK", 1 << 13)
    monkeypatch.setattr(obstore_backend, "AT_ONCE", 1 << 13)
    monkeypatch.setattr(remote, "SMALL", 1 << 12)
    monkeypatch.setattr(fsspec_backend, "SMALL", -1)
    wire.clear()
    wire.only_below = ""
    return wire


def reach(mover: str = "obstore", *, url: str = "s3://bucket/store", tries: int = 4, **given: Any) -> RemoteFiles:
    retries = Retries(tries=tries, sleep=lambda _: None)
    return RemoteFiles(url=url, moving=TransferOptions(mover=mover, **given), retries=retries)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------------------------------------------ broken networks

faults = st.lists(st.sampled_from([*FAULTS, None]), max_size=7)
sizes = st.sampled_from([0, 1, 1000, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 200_000])
trial = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def opened() -> dict[str, RemoteFiles]:
    """One tree a mover for all trials: a client takes long to make."""
    return {}


@pytest.mark.parametrize("mover", MOVERS)
@trial
@given(faults=faults, size=sizes, promised=st.booleans(), told=st.booleans(), seed=st.integers(0, 99))
def test_a_target_holds_the_right_bytes_or_what_it_held(
    s3: FaultyS3,
    opened: dict[str, RemoteFiles],
    tmp_path: Path,
    mover: str,
    faults: list[str | None],
    size: int,
    promised: bool,
    told: bool,
    seed: int,
) -> None:
    if not promised:  # a changed byte is known by a digest alone
        faults = [None if fault == "corrupt" else fault for fault in faults]
    if mover == "fsspec" and not promised:  # s3fs does not look which range it was given
        faults = [None if fault == "shift" else fault for fault in faults]
    tree = opened.setdefault(mover, reach(mover))
    s3.clear()
    data = random.Random(seed).randbytes(size)
    s3.put("store/key", data)
    target = tmp_path / "target"
    target.write_bytes(b"old")
    s3.faults = list(faults)
    sha256, length = (digest(data) if promised else None), (size if told else None)
    try:
        tree.download("key", target, sha256=sha256, size=length)
    except (StorageError, DigestError):
        assert target.read_bytes() == b"old"
    else:
        assert target.read_bytes() in ([data] if promised else s3.versions["store/key"])
    s3.faults = []
    assert os.listdir(tmp_path) == ["target"]
    now = s3.objects["store/key"].data
    tree.download("key", target, sha256=digest(now))
    assert target.read_bytes() == now


@pytest.mark.parametrize("mover", MOVERS)
@trial
@given(faults=faults, size=sizes, seed=st.integers(0, 99))
def test_a_key_holds_the_whole_file_or_what_it_held(
    s3: FaultyS3,
    opened: dict[str, RemoteFiles],
    tmp_path: Path,
    mover: str,
    faults: list[str | None],
    size: int,
    seed: int,
) -> None:
    tree = opened.setdefault(mover, reach(mover))
    s3.clear()
    s3.put("store/key", b"old")
    source = tmp_path / "source"
    source.write_bytes(data := random.Random(seed).randbytes(size))
    s3.faults = list(faults)
    with suppress(StorageError):
        tree.upload(source, "key")
    assert set(s3.versions["store/key"]) <= {b"old", data}
    s3.faults = []
    tree.upload(source, "key")
    assert s3.objects["store/key"].data == data


@trial
@given(faults=st.lists(st.sampled_from(["refuse", "reset", "lost", "slow", None]), max_size=12))
def test_a_creation_whose_answer_was_lost_is_its_makers(s3: FaultyS3, faults: list[str | None]) -> None:
    s3.clear()
    s3.faults = list(faults)
    told: dict[int, bool | None] = {}

    def create(number: int) -> None:
        try:
            told[number] = reach(tries=3).create("run.json", b"the same content")
        except StorageError:
            told[number] = None

    parallel(create, list(range(3)), jobs=3)
    s3.faults = []
    created = "store/run.json" in s3.objects
    assert list(told.values()).count(True) <= int(created)
    if created and None not in told.values():
        assert list(told.values()).count(True) == 1
    assert len(s3.versions.get("store/run.json", [])) <= 1
    assert reach().create("run.json", b"another") is not created


def test_an_object_replaced_while_it_is_read_is_read_anew(s3: FaultyS3, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    s3.put("store/key", data)
    s3.faults = [None, None, "replace"]
    reach().download("key", tmp_path / "x", size=len(data))
    assert (tmp_path / "x").read_bytes() == s3.objects["store/key"].data != data
    s3.faults = [None, "replace"] * 200
    with pytest.raises(StorageError, match="replaced faster than it can be read"):
        reach().download("key", tmp_path / "y", size=len(data))
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("fault", ["shrink", "grow"])
def test_an_object_of_another_size_takes_its_place(s3: FaultyS3, tmp_path: Path, fault: str) -> None:
    s3.put("store/key", os.urandom(200_000))
    s3.faults = [None, fault]
    reach().download("key", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == s3.objects["store/key"].data == s3.versions["store/key"][1]


def test_fsspec_reads_one_version_of_a_file(s3: FaultyS3, tmp_path: Path) -> None:
    s3.put("store/key", os.urandom(200_000))
    s3.faults = [None, "truncate", "replace"]
    reach("fsspec").download("key", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == s3.objects["store/key"].data == s3.versions["store/key"][1]


def test_a_range_that_fails_after_its_last_byte_is_whole(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("store/key", data := os.urandom(100_000))
    pour, cut = obstore_backend.ObstoreMover._pour, iter([True])

    def poured(*args: Any, **words: Any) -> None:
        pour(*args, **words)
        if next(cut, False):
            raise ConnectionError("cut")

    monkeypatch.setattr(obstore_backend.ObstoreMover, "_pour", poured)
    reach().download("key", tmp_path / "x", size=100_000)
    assert (tmp_path / "x").read_bytes() == data


def test_ranges_are_asked_for_by_the_tag_of_the_first(s3: FaultyS3, tmp_path: Path) -> None:
    s3.put("store/key", os.urandom(100_000))
    reach().download("key", tmp_path / "x", size=100_000)
    asked = [headers for _, _, headers in s3.requests]  # the first range tells the tag: nothing is asked before it
    assert [headers.get("if-match") for headers in asked] == [None, *[s3.objects["store/key"].tag] * 3]
    assert {headers["range"] for headers in asked} == {
        "bytes=0-32767",
        "bytes=32768-65535",
        "bytes=65536-98303",
        "bytes=98304-99999",
    }


@pytest.mark.parametrize("size", [0, 1000, 1 << 15])
def test_a_small_file_is_one_request(s3: FaultyS3, tmp_path: Path, size: int) -> None:
    s3.put("store/key", data := os.urandom(size))
    reach().download("key", tmp_path / "x", sha256=digest(data), size=size)
    assert (tmp_path / "x").read_bytes() == data
    assert len(s3.requests) == 1
    s3.put("store/key", os.urandom(200_000))  # meanwhile, and far more than was promised
    with pytest.raises(DigestError):
        reach().download("key", tmp_path / "y", size=size)
    assert os.listdir(tmp_path) == ["x"]


def test_a_range_goes_on_where_it_was_cut(s3: FaultyS3, tmp_path: Path) -> None:
    s3.put("store/key", data := os.urandom(100_000))
    s3.faults = [None, "truncate"]
    moved: list[int] = []
    reach().download("key", tmp_path / "x", size=100_000, progress=lambda _, more: moved.append(more))
    assert (tmp_path / "x").read_bytes() == data
    assert sum(moved) == 100_000
    assert len(moved) > 4
    assert len([1 for method, _, _ in s3.requests if method == "GET"]) == 5


def test_an_upload_that_fails_leaves_no_parts(s3: FaultyS3, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(os.urandom(200_000))
    s3.faults = [None, None, "403 AccessDenied"]
    with pytest.raises(AuthError, match="403 AccessDenied"):
        reach(tries=1).upload(tmp_path / "x", "key")
    assert (s3.objects, s3.parts) == ({}, {})


def test_an_upload_whose_last_answer_was_lost_is_sent_again(s3: FaultyS3, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data := os.urandom(200_000))
    s3.faults = [*[None] * 8, "lost"]
    reach(tries=2).upload(tmp_path / "x", "key")
    assert s3.objects["store/key"].data == data
    assert s3.parts == {}


def test_a_body_may_take_long_and_an_answer_may_not(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_backend, "SILENCE", timedelta(seconds=0.3))
    tree = reach(tries=1)
    s3.faults = ["late", "late"]
    tree.write("code", b"0" * 10_000)
    with pytest.raises(StorageError, match="no answer in time"):
        tree.write("key", b"0")


def test_a_file_of_one_request_is_tried_as_often_as_all_else(s3: FaultyS3, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0" * 20_000)
    s3.faults = ["refuse"] * 99
    with pytest.raises(StorageError, match="503 SlowDown"):
        reach(tries=4).upload(tmp_path / "x", "key")
    assert len(s3.requests) == 4


def test_a_refusal_of_a_body_that_took_long_is_tried_again(s3: FaultyS3) -> None:
    s3.faults = ["400 RequestTimeout", "400 BadDigest"]
    reach().write("key", b"data")
    assert s3.objects["store/key"].data == b"data"


def test_each_mover_has_the_patience_that_it_takes(s3: FaultyS3) -> None:
    tries = {
        mover: files("s3://bucket/x", moving=TransferOptions(mover=mover))._open().mover.retries.tries
        for mover in MOVERS
    }
    assert tries == {"fsspec": 4, "obstore": 7}


# ------------------------------------------------------------------------------------- processes, threads, event loops


def test_fifty_race_for_a_name_and_one_wins(s3: FaultyS3) -> None:
    trees = [reach() for _ in range(50)]
    barrier = threading.Barrier(50)

    def create(number: int) -> bool:
        barrier.wait()
        return trees[number].create("run.json", str(number).encode())

    wins = parallel(create, list(range(50)), jobs=50)
    assert sum(wins) == 1
    assert s3.objects["store/run.json"].data == str(wins.index(True)).encode()


def run(code: str, *args: str, seconds: float = 60) -> str:
    words = "import os, signal, sys, threading, time\n"
    words += "from cloudtrain.storage.files import TransferOptions, files, parallel\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", words + code, *args], capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_goes_on_with_fsspec(s3: FaultyS3) -> None:
    """obstore's threads are not forked: used by the parent, it hangs in the child."""
    s3.put("store/key", b"data")
    code = (
        "tree = files('s3://bucket/store', moving=TransferOptions(mover=sys.argv[1]))\n"
        "assert parallel(tree.read, ['key'] * 8, jobs=4) == [b'data'] * 8\n"
        "print(tree.mover, flush=True)\n"
        "if os.fork() == 0:\n"
        "    signal.alarm(20)\n"
        "    fresh = files('s3://bucket/store')\n"
        "    assert tree.read('key') == fresh.read('key') == b'data'\n"
        "    assert parallel(tree.read, ['key'] * 8, jobs=4) == [b'data'] * 8\n"
        "    print(tree.mover, fresh.mover, flush=True)\n"
        "    os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "assert tree.read('key') == b'data'\n"
    )
    assert run(code, "auto").split() == ["obstore", "fsspec", "fsspec"]
    assert run(code, "obstore").split() == ["obstore", "fsspec", "fsspec"]


def test_a_child_of_a_process_that_has_not_used_it_may(s3: FaultyS3) -> None:
    s3.put("store/key", b"data")
    code = (
        "tree = files('s3://bucket/store')\n"
        "if os.fork() == 0:\n"
        "    signal.alarm(20)\n"
        "    assert tree.read('key') == b'data'\n"
        "    print(tree.mover, flush=True)\n"
        "    os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
    )
    assert run(code).split() == ["obstore"]


@pytest.mark.parametrize("mover", MOVERS)
def test_it_serves_where_an_event_loop_runs(s3: FaultyS3, mover: str) -> None:
    async def notebook() -> bytes:
        tree = reach(mover)
        tree.write("key", b"data")
        return tree.read("key")

    assert asyncio.run(notebook()) == b"data"


def test_ctrl_c_is_heard_while_a_server_is_silent(s3: FaultyS3) -> None:
    code = (
        "import socket\n"
        "silent = socket.socket(); silent.bind(('127.0.0.1', 0)); silent.listen()\n"
        "os.environ['AWS_ENDPOINT_URL'] = f'http://127.0.0.1:{silent.getsockname()[1]}'\n"
        "tree = files('s3://bucket/store', moving=TransferOptions(mover='obstore'))\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background may ignore it
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "began = time.monotonic()\n"
        "try: tree.read('key')\n"
        "except KeyboardInterrupt: print(time.monotonic() - began)\n"
        "os._exit(0)\n"
    )
    assert float(run(code)) < 10


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell has started in the background ignores SIGINT, and this suite may be among that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_after_ctrl_c_an_upload_does_not_go_on(s3: FaultyS3, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0" * (8 << 20))
    s3.faults = ["slow"] * 999
    main, once = threading.main_thread().ident, iter([True])

    def interrupt(*_: object) -> None:
        if next(once, False):
            signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        reach().upload(tmp_path / "x", "key", progress=interrupt)
    until = time.monotonic() + 10
    while s3.parts and time.monotonic() < until:
        time.sleep(0.05)
    assert (s3.objects, s3.parts) == ({}, {})


def test_first_users_share_one_mover(s3: FaultyS3) -> None:
    asked: list[str] = []

    def storage(url: str) -> dict[str, Any]:
        asked.append(url)
        time.sleep(0.1)
        return {}

    tree = RemoteFiles(url="s3://bucket/store", storage=storage)
    parallel(lambda _: tree.names(), list(range(8)), jobs=8)
    assert len(asked) == 1


# ----------------------------------------------------------------------------------------------- what a server is asked


@pytest.mark.parametrize("mover", MOVERS)
def test_every_put_says_how_to_encrypt(s3: FaultyS3, tmp_path: Path, mover: str) -> None:
    tree = reach(mover, sse="aws:kms", sse_kms_key_id="arn:aws:kms:us-east-1:1:key/k")
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large").write_bytes(os.urandom(120_000 if mover == "obstore" else 101 << 20))  # above, it is parts
    tree.write("written", b"1")
    tree.create("created", b"1")
    tree.upload(tmp_path / "small", "small")
    tree.upload(tmp_path / "large", "large")
    tree.copy("small", "copied")
    assert [path for _, path, _ in s3.requests if "?uploads" in path]
    for method, path, headers in s3.requests:
        if (method == "PUT" and "partNumber" not in path) or "?uploads" in path:
            assert headers["x-amz-server-side-encryption"] == "aws:kms", path
            assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:aws:kms:us-east-1:1:key/k", path
    assert tree.read("copied") == b"1"


@pytest.mark.parametrize("mover", MOVERS)
def test_lists_stay_below_the_store_and_no_bucket_is_made(s3: FaultyS3, tmp_path: Path, mover: str) -> None:
    s3.only_below = "store"
    tree = reach(mover)
    assert (tree.list(), tree.names("no")) == ({}, [])
    tree.write("a/b", b"1")
    (tmp_path / "f").write_bytes(b"1")
    tree.upload_tree(tmp_path, "a")
    assert tree.list() == {"a/b": 1, "a/f": 1}
    assert tree.names() == ["a"]
    tree.remove("a")
    assert tree.list("a") == {}
    assert not [path for method, path, _ in s3.requests if method == "PUT" and path.strip("/") == "bucket"]


def test_no_header_has_an_underscore(s3: FaultyS3) -> None:
    """nginx drops such, and what was signed is no more."""
    assert reach().create("run.json", b"1")
    assert not [name for _, _, headers in s3.requests for name in headers if "_" in name]


def test_what_fsspec_is_configured_to_send_stays(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    configured = {"s3_additional_kwargs": {"ACL": "bucket-owner-full-control"}}
    monkeypatch.setitem(__import__("fsspec.config").config.conf, "s3", configured)
    reach("fsspec", sse="AES256").write("key", b"1")
    headers = s3.requests[-1][2]
    assert headers["x-amz-acl"] == "bucket-owner-full-control"
    assert headers["x-amz-server-side-encryption"] == "AES256"


def test_markers_of_folders_are_no_files_and_empty_files_are(s3: FaultyS3) -> None:
    for key in ("store/", "store/a/", "store/a/b/", "store/a/empty", "store/a/b/c"):
        s3.put(key, b"x" if key.endswith("c") else b"")
    assert reach().list() == {"a/empty": 0, "a/b/c": 1}
    assert reach().names("a") == ["b", "empty"]


# ------------------------------------------------------------------------------------------------- which of them it is


def access(url: str, environ: dict[str, str], options: dict[str, Any] | None = None, mover: str = "auto") -> Any:
    return find_access(url, options or {}, {"HOME": "/", **environ}, moving=TransferOptions(mover=mover))


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_CONFIG_FILE": "/no", "FSSPEC_CONFIG_DIR": "/no"}
KEYS["AWS_SHARED_CREDENTIALS_FILE"] = "/no"
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "other", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}


@pytest.mark.parametrize(
    ("url", "environ", "options"),
    [
        ("memory://x", {}, {}),
        ("s3://b/x", {**KEYS, "AWS_USE_FIPS_ENDPOINT": "true"}, {}),
        ("s3://b/x", {**KEYS, "AWS_SKIP_SIGNATURE": "true"}, {}),
        ("s3://b/x", {**KEYS, "AWS_DEFAULT_REGION": "cn-north-1"}, {}),
        ("s3://b/x", KEYS, {"anon": True}),
        ("s3://b/x", KEYS, {"session": object()}),
        ("s3://b/x", KEYS, {"client_kwargs": {"verify": False}}),
        ("s3://b--x-s3/x", KEYS, {}),
        ("s3://b//x", KEYS, {}),
        ("s3://b/x//y", KEYS, {}),
        ("s3://b/x/../y", KEYS, {}),
        ("abfs://c@a.dfs.core.windows.net/x", {"AZURE_STORAGE_ANON": "true"}, {}),
        ("abfs://c@a.dfs.core.windows.net/x", {"AZURE_STORAGE_CLIENT_ID": "x"}, {}),
        ("abfs://c@a.dfs.core.windows.net/x", {}, {"credential": object()}),
        ("abfs://c/x", {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}, {}),
        ("abfs://c@a.dfs.own.example/x", AZURE, {}),
        ("abfs://c/x", {**AZURE, "AZURE_STORAGE_ACCOUNT_KEY": "no key"}, {}),
        ("abfs://a.dfs.core.windows.net/c/x", AZURE, {}),
        ("abfs://c@a.dfs.core.windows.net/x", {"AZURE_STORAGE_SAS_TOKEN": "?sig=1"}, {}),
        ("gs://b/x", {}, {"token": object()}),
    ],
)
def test_what_is_not_proved_is_left_to_fsspec(url: str, environ: dict[str, str], options: dict[str, Any]) -> None:
    with pytest.raises(Unproven):
        access(url, environ, options)


@pytest.mark.parametrize(
    ("url", "name"), [("s3://b/x", "s3a"), ("abfss://c@a.dfs.core.windows.net/x", "abfs"), ("az://c/x", "abfs")]
)
def test_fsspec_is_configured_by_any_of_its_names(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.config import conf

    environ = {**KEYS, **AZURE}
    access(url, environ)
    monkeypatch.setitem(conf, name, {"profile": "other"})
    with pytest.raises(Unproven, match="fsspec is configured"):
        access(url, environ)


def test_encryption_is_asked_of_s3_alone() -> None:
    for url in ("gs://b/x", "abfs://c/x", "memory://x/y"):
        with pytest.raises(SpecError, match=r"sse: only a store in S3"):
            files(url, moving=TransferOptions(sse="AES256")).read("key")


def test_who_insists_on_it_is_told_why_not(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
    assert files("s3://bucket/store").mover == "fsspec"
    with pytest.raises(SpecError, match=r"mover: obstore does not move s3://bucket/store: AWS_USE_DUALSTACK_ENDPOINT"):
        files("s3://bucket/store", moving=OBSTORE).read("key")
    assert files("memory://x/y", moving=OBSTORE).mover == "fsspec"


def test_a_bucket_of_another_region_is_left_to_fsspec(s3: FaultyS3) -> None:
    """botocore asks for the region and goes there; obstore does not."""
    s3.put("store/key", b"data")
    tree = reach("auto")
    assert tree.mover == "obstore"
    s3.faults = ["moved"]
    assert tree.read("key") == b"data"
    assert tree.mover == "fsspec"
    s3.faults = ["moved"]
    with pytest.raises(StorageError, match="the bucket is in another region"):
        reach("obstore").read("key")


@pytest.mark.parametrize(
    ("fault", "why"),
    [("400 AuthorizationHeaderMalformed", "in another region"), ("whole", "does not answer ranges as such")],
)
def test_what_it_cannot_read_is_left_to_fsspec(s3: FaultyS3, tmp_path: Path, fault: str, why: str) -> None:
    s3.put("store/key", data := os.urandom(100_000))
    tree = reach("auto", tries=1)
    s3.faults = [None, fault]
    tree.download("key", tmp_path / "x", size=len(data))
    assert (tmp_path / "x").read_bytes() == data
    assert tree.mover == "fsspec"
    s3.faults = [None, fault]
    with pytest.raises(StorageError, match=why):
        reach().download("key", tmp_path / "y", size=len(data))


def test_keys_that_it_cannot_name_are_left_to_fsspec(s3: FaultyS3) -> None:
    tree = reach("auto", tries=1)
    tree.write("Icon\r", b"data")
    assert (tree.read("Icon\r"), tree.mover) == (b"data", "fsspec")
    s3.put("store/a//b", b"1")
    tree = reach("auto", tries=1)
    assert "a//b" in tree.list()
    with pytest.raises(StorageError, match=r"store: a key is not a plain path$"):
        reach().list()


def test_threads_that_find_it_unable_all_go_on_with_fsspec(s3: FaultyS3) -> None:
    s3.put("store/key", b"data")
    tree = reach("auto", tries=1)
    assert tree.mover == "obstore"
    s3.faults = ["moved"] * 8
    barrier = threading.Barrier(8)

    def read(_: int) -> bytes:
        barrier.wait()
        return tree.read("key")

    assert parallel(read, list(range(8)), jobs=8) == [b"data"] * 8


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("fault", ["lost", "refuse", "reset", "409 ConditionalRequestConflict"])
def test_a_swap_whose_answer_was_lost_is_known_by_its_content(s3: FaultyS3, mover: str, fault: str) -> None:
    tree = reach(mover, tries=3)
    version = tree.swap("key", None, b"1")
    s3.faults = [fault]
    version = tree.swap("key", version, b"2")
    assert s3.versions["store/key"] == [b"1", b"2"]
    s3.faults = [fault]
    reach(mover, tries=3).swap("other", None, b"1")
    s3.put("store/key", b"theirs")
    s3.faults = [fault]
    with pytest.raises(FileExistsError):
        tree.swap("key", version, b"3")
    assert tree.read("key") == b"theirs"
    s3.faults = [fault] * 30
    with pytest.raises((StorageError, FileExistsError)):
        tree.swap("other", None, b"2")


def test_a_certificate_that_it_does_not_take_is_for_fsspec_to_judge(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server.pem").write_bytes(certificates()[1])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with FaultyS3() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url.replace("http:", "https:"))
        tree = reach("auto", tries=1)
        with pytest.raises(StorageError, match=r"key: .*(SSL|certificate)"):
            tree.read("key")
        assert tree.mover == "fsspec"
        with pytest.raises(StorageError, match="the server's certificate is not trusted"):
            reach().read("key")
        server.shutdown()


def test_where_it_is_not_installed_it_is_fsspec(s3: FaultyS3) -> None:
    code = (
        "sys.modules['obstore'] = None\n"
        "print(files('s3://bucket/store').mover)\n"
        "try: files('s3://bucket/store', moving=TransferOptions(mover='obstore')).mover\n"
        "except Exception as exc: print(exc)\n"
    )
    first, second = run(code).splitlines()
    assert first == "fsspec"
    assert "pip install obstore" in second


@pytest.mark.parametrize(
    ("endpoint", "specific", "option", "meant"),
    [
        ("http://one", None, None, "http://one"),
        ("http://one", "http://two", None, "http://two"),
        ("http://one", "http://two", "http://three", "http://three"),
    ],
)
def test_endpoints_are_found_as_botocore_finds_them(
    endpoint: str, specific: str | None, option: str | None, meant: str
) -> None:
    environ = {**KEYS, "AWS_ENDPOINT_URL": endpoint, **({"AWS_ENDPOINT_URL_S3": specific} if specific else {})}
    options = {"client_kwargs": {"endpoint_url": option}} if option else {}
    assert access("s3://b/x", environ, options).config["endpoint"] == meant


@pytest.mark.parametrize("mover", MOVERS)
def test_a_configured_profile_gives_keys_region_and_endpoint(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mover: str
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}")
    (tmp_path / "config").write_text(f"[profile p]\nregion = eu-north-1\nendpoint_url = {s3.url}\n")
    (tmp_path / "keys").write_text("[p]\naws_access_key_id = of-p\naws_secret_access_key = s\naws_session_token = t\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "p")
    reach(mover).write("key", b"1")
    headers = s3.requests[-1][2]
    assert "Credential=of-p/" in headers["authorization"]
    assert "/eu-north-1/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "t"


@pytest.mark.parametrize("mover", MOVERS)
def test_a_process_that_gives_keys_is_asked_again_when_they_expire(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mover: str
) -> None:
    """What SSO, roles, web identity and machines are to botocore: credentials that it renews itself."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    script = tmp_path / "keys.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=2)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'key{number}', 'SecretAccessKey': 's', 'SessionToken': 't',"
        " 'Expiration': end.isoformat()}))\n"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    tree = reach(mover)
    tree.write("key", b"1")
    tree.write("key", b"2")
    signers = [headers["authorization"].split("Credential=")[1].split("/")[0] for _, _, headers in s3.requests]
    assert len(set(signers)) == 2
    assert tree.mover == mover


def test_no_credentials_is_one_line(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AuthError, match=r"^s3://bucket/store: no access: .*credentials"):
        reach().read("key")


def test_what_kept_a_request_from_being_signed_is_told_of_it_alone() -> None:
    from obstore.exceptions import UnauthenticatedError

    failures: list[Exception] = [ConnectionError("no STS")]

    def ask() -> dict[str, str]:
        if failures:
            raise failures.pop()
        return {}

    keys = obstore_backend._Keys(ask)
    with pytest.raises(ConnectionError):
        keys()
    keys()
    assert obstore_backend._refusal(UnauthenticatedError("no keys"), keys.failure) is keys.failure
    answered = UnauthenticatedError("HTTP error: status code: 401 Unauthorized: <Code>Expired</Code>")
    assert "401 Expired" in str(obstore_backend._refusal(answered, keys.failure))


# ---------------------------------------------------------------------------------------------------------------- Azure


@pytest.fixture
def sas(azure_environment: str) -> str:
    from datetime import datetime, timedelta, timezone

    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    return str(
        generate_account_sas(
            account_name=AZURITE_ACCOUNT,
            account_key=AZURITE_KEY,
            resource_types=ResourceTypes(service=True, container=True, object=True),
            permission=AccountSasPermissions(read=True, write=True, list=True, create=True, delete=True, add=True),
            expiry=datetime.now(timezone.utc) + timedelta(hours=1),
        )
    )


def test_a_signature_in_the_connection_string_is_for_fsspec(
    azure_url: str, sas: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azurite answers 500 to a batch of deletions that is signed so, and obstore deletes in no other way."""
    endpoint = os.environ["AZURE_STORAGE_CONNECTION_STRING"].partition("BlobEndpoint=")[2].rstrip(";")
    string = f"BlobEndpoint={endpoint};SharedAccessSignature={sas}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", string)
    tree = files(azure_url)
    assert tree.mover == "fsspec"
    assert tree.create("a/key", b"data")
    assert not tree.create("a/key", b"data")
    tree.remove("a")
    assert tree.list() == {}


def test_a_key_of_the_environment_is_the_one_that_adlfs_takes() -> None:
    url = "abfs://c@acct.dfs.core.windows.net/x/y"
    found = access(url, {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "AZURE_STORAGE_SAS_TOKEN": "?sig=1"})
    assert (found.bucket, found.root, found.config["endpoint"]) == ("c", "x/y", "https://acct.blob.core.windows.net")
    assert found.keys()["access_key"] == "a2V5"
    for account in ({}, {"account_name": "acct"}):
        assert access(url, AZURE, account).config["account_name"] == "acct"
    own = {"account_name": "acct", "account_host": "acct.blob.own.example", "anon": False}
    found = access("abfs://c@acct.dfs.own.example/x", {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}, own)
    assert found.config["endpoint"] == "https://acct.blob.own.example"


def certificates() -> tuple[bytes, bytes]:
    """An authority's certificate, and what it vouches for: a key and certificate of 127.0.0.1; PEM."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now, keys = datetime.datetime.now(datetime.timezone.utc), [ec.generate_private_key(ec.SECP256R1()) for _ in "12"]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "server")]
    made = []
    for number in range(2):
        builder = x509.CertificateBuilder().subject_name(names[number]).issuer_name(names[0])
        builder = builder.public_key(keys[number].public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=2))
        builder = builder.add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
        own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(own, critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    kind = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made[0], keys[1].private_bytes(*kind) + made[1]


class SignedIn:
    """Azurite over TLS that takes tokens, and the managed identity that gives them: ``issued``, how many."""

    def __init__(self, folder: Path) -> None:
        self.wire = Wire(folder / "wire")
        self.issued = 0
        self.seconds = 3600
        self.wire.route("GET", "/of-storage", "GET token", self._token, open=True)
        self.identity = self.wire.listen() + "/of-storage"
        self.port = free_port()
        self.server, self.trusted = folder / "server.pem", folder / "trusted.pem"
        authority, leaf = certificates()
        self.server.write_bytes(leaf)
        self.trusted.write_bytes(authority + self.wire.pem.read_bytes())

    def _token(self, call: Any) -> Answer:
        self.issued += 1
        now, resource = int(time.time()), call.query["resource"]
        claims = {"aud": resource, "iss": "https://sts.windows.net/1/", "nbf": now - 60, "iat": now - 60}
        claims |= {"exp": now + 3600, "jti": str(self.issued)}
        parts = [json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims)]
        token = ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "c2ln"])
        until = str(now + self.seconds)
        return Answer({"access_token": token, "expires_on": until, "resource": resource, "token_type": "Bearer"})


@pytest.fixture
def signed_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[SignedIn]:
    program = azurite()
    if program is None:
        (pytest.fail if required() else pytest.skip)("Azurite is not installed; run tests/azurite.sh")
    folder = tmp_path_factory.mktemp("signed")
    made = SignedIn(folder)
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(made.port), "--location", str(folder), "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--oauth", "basic"]
    command += ["--cert", str(made.server), "--key", str(made.server)]
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(made.trusted))
    monkeypatch.setenv("IDENTITY_ENDPOINT", made.identity)
    monkeypatch.setenv("IDENTITY_HEADER", made.wire.secret)
    with served(command, made.port, folder / "log"):
        yield made
    made.wire.close()


@pytest.mark.parametrize("mover", MOVERS)
def test_who_is_signed_in_to_azure_is_let_in(signed_in: SignedIn, tmp_path: Path, mover: str) -> None:
    """In a process of its own: aiohttp reads once, as it is imported, whom to trust."""
    host = f"127.0.0.1:{signed_in.port}/{AZURITE_ACCOUNT}"
    (tmp_path / "large").write_bytes(os.urandom(9 << 20))
    code = (
        "from pathlib import Path\n"
        "from azure.storage.blob import BlobServiceClient\n"
        "mover, account, key, host, folder = sys.argv[1:]\n"
        "with BlobServiceClient(f'https://{host}', credential=key) as client: client.create_container('held')\n"
        "options = {'anon': False, 'account_name': account, 'account_host': host}\n"
        "tree = files('abfs://held/store', storage=lambda _: options, moving=TransferOptions(mover=mover))\n"
        "assert tree.create('a/key', b'data')\n"
        "assert not tree.create('a/key', b'other')\n"
        "tree.upload(Path(folder, 'large'), 'large')\n"
        "tree.download('large', Path(folder, 'back'), size=9 << 20)\n"
        "tree.remove('a')\n"
        "assert tree.list() == {'large': 9 << 20}\n"
        "print(tree.mover)\n"
    )
    assert run(code, mover, AZURITE_ACCOUNT, AZURITE_KEY, host, str(tmp_path)).split() == [mover]
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    assert signed_in.issued == 1


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.proof
def test_memory_is_bounded_whatever_the_size(s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GiB up and down, against the benchmarks' server, which keeps nothing and proves each part."""
    size = 1 << 30
    with open(tmp_path / "sparse", "wb") as out:
        out.truncate(size)
    command = [sys.executable, "-c", "import sink; sink.serve()"]
    server = subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.stdout.readline().strip())
        code = (
            "import re; from pathlib import Path\n"
            "folder, size = sys.argv[1:]\n"
            "tree = files('s3://bucket', moving=TransferOptions(mover='obstore'))\n"
            "tree.upload(Path(folder, 'sparse'), f'zeros-{size}')\n"
            "tree.download(f'zeros-{size}', Path(folder, 'back'), size=int(size))\n"
            "print(re.search('VmHWM:\\\\s*(\\\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
        )
        peak = int(run(code, str(tmp_path), str(size), seconds=240)) / 1024
    finally:
        server.kill()
        server.communicate()
    assert (tmp_path / "back").stat().st_size == size
    assert peak <= 300
