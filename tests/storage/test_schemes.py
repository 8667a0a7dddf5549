"""Stores and inputs on other schemes than the clouds' three: SFTP, FTP, a hub, a third party's file system. Clients and
servers are real, but for the hub."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from fileservers import Server, login, served_ftp, served_sftp
from fsspec.config import conf
from hub import Hub, served_hub
from jobs import Done, Jobs
from third_party_fs import BUFFERED, EXCLUSIVE, PLAIN

from cloudtrain.errors import AuthError, CloudtrainError, ConflictError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.storage.errors import Retries
from cloudtrain.storage.files import Files, files, parallel
from cloudtrain.storage.lease import FOLDER, MARK, Lease
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.store.copies import copy_inputs
from cloudtrain.store.gc import collect
from cloudtrain.store.staging import stage_input
from cloudtrain.store.store import Store

pytestmark = pytest.mark.remote

MIB = 1 << 20


@pytest.fixture
def sftp(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "sftp").mkdir()
    with served_sftp(tmp_path / "sftp") as server:
        yield server


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    (tmp_path / "ftp").mkdir()
    with served_ftp(tmp_path / "ftp") as url:
        yield tmp_path / "ftp", url


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
    with served_hub() as found:
        # Its client reads HF_ENDPOINT once, at import. Child processes read it too.
        monkeypatch.setitem(conf, "hf", {"endpoint": found.url})
        yield found


def below(root: Path) -> list[str]:
    """Return all files, finished or not."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------------ connections


def _put(server: Server, data: dict[str, bytes]) -> Files:
    """Put the files ``data`` on the server, as a user does."""
    for key, content in data.items():
        path = server.root / "set" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files(f"{server.url}/set")


def test_trees_that_are_not_used_any_more_keep_no_connection(sftp: Server) -> None:
    for _ in range(3):
        assert _put(sftp, {"a": b"1"}).read("a") == b"1"
    gc.collect()
    until = time.monotonic() + 20
    while sftp.connections > 0 and time.monotonic() < until:
        time.sleep(0.05)
    assert (sftp.logins, sftp.connections) == (3, 0)


def test_a_connection_that_is_lost_is_made_again(sftp: Server) -> None:
    tree = _put(sftp, {f"a/{n}": b"1" for n in range(8)})
    assert parallel(lambda n: tree.read(f"a/{n}"), list(range(8))) == [b"1"] * 8
    for look in (lambda: len(tree.list()), lambda: len(tree.names("a")), lambda: 8 * len(tree.read("a/1"))):
        before = sftp.logins
        sftp.hang_up()
        assert look() == 8  # not the empty folder for which fsspec takes it
        assert sftp.logins > before


def test_several_threads_take_turns_on_one_connection(sftp: Server) -> None:
    """If two threads use one at once, paramiko gives one the other's answer, or none for ever."""
    data = {f"{n}": os.urandom(50_000) for n in range(24)}
    tree = _put(sftp, data)
    assert parallel(lambda key: tree.read(key) == data[key], list(data), jobs=12) == [True] * 24
    assert sftp.logins == 1


def test_a_large_file_comes_in_ranges(sftp: Server) -> None:
    data = os.urandom(9 * MIB + 3)
    assert b"".join(_put(sftp, {"large": data}).pieces("large", len(data))) == data


def test_who_is_not_let_in_is_told_so(sftp: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setitem(conf, "sftp", {})
    with pytest.raises(AuthError, match="no access: No authentication methods available"):
        files(f"{sftp.url}/store").list()
    login(monkeypatch, "trainer", "wr0ng")
    with pytest.raises(AuthError, match=r"sftp://127.0.0.1:\d+/store: no access: Authentication failed") as told:
        files(f"{sftp.url}/store").list()
    assert "wr0ng" not in str(told.value)


# ------------------------------------------------------------------------------------------ URLs that cannot be a store


def check_refused(url: str, message: str) -> None:
    tree = files(url)
    for attempt in (lambda: tree.write("k", b"1"), lambda: tree.create("k", b"1"), lambda: tree.remove("k")):
        with pytest.raises(SpecError) as found:
            attempt()
        assert found.value.message == message
        assert "\n" not in str(found.value)


def test_what_cannot_create_exclusively_is_no_store(
    ftp: tuple[Path, str], sftp: Server, plain: Callable[[str], str]
) -> None:
    swallows = "\n    def pipe_file(self, path, value, **kwargs):\n        super().pipe_file(path, value)\n"
    for make, kind in (
        (lambda: f"{ftp[1]}/store", "FTPFileSystem"),
        (lambda: f"{sftp.url}/store", "SFTPFileSystem"),
        (lambda: plain(PLAIN), "PlainFileSystem"),
        (lambda: plain(PLAIN + swallows), "PlainFileSystem"),
    ):
        why = f"{kind} cannot create a file exclusively, so two clients could start one run"
        url = make()
        check_refused(url, f"{url} cannot be a store: {why}")
        assert not os.path.exists(os.environ.get("PLAIN_ROOT", ""))
    assert below(ftp[0]) == below(sftp.root) == []


def test_gc_of_such_a_class_gives_its_lease_back(plain: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    store = Store(plain(PLAIN + EXCLUSIVE))
    for count in (2, 4):
        assert collect(store, delete=True).found == ()
        assert set(store.files.list(FOLDER)) == {f"{MARK}.versions/{number + 1}" for number in range(count)}
        assert stage_input(store, str(tmp_path / "a"), cwd=tmp_path).files == 1
    with Lease(store.files, MARK, seconds=0.5) as lease:  # of a client that dies
        time.sleep(1)
        lease.check()  # it was renewed meanwhile
        lease.kept = True
    Lease(store.files, MARK, seconds=0.5).wait()
    assert collect(store, delete=True).found == ()


def test_a_file_whose_upload_fails_is_not_there(plain: Callable[[str], str], tmp_path: Path) -> None:
    """fsspec's default would close the partial file as complete."""
    (tmp_path / "large").write_bytes(data := os.urandom((20 << 20) + 1))
    tree = RemoteFiles(url=plain(PLAIN + BUFFERED), retries=Retries(tries=1))
    kind = tree._open().mover.clients.kind  # type: ignore[attr-defined]
    for kind.cut in (True, False):
        with pytest.raises(StorageError, match="cut") if kind.cut else nullcontext():
            tree.upload(tmp_path / "large", "a/large")
        assert tree.list() == ({} if kind.cut else {"a/large": len(data)})
    assert tree.read("a/large") == data


def test_submit_says_so_before_anything_is_sent(ftp: tuple[Path, str], jobs: Jobs) -> None:
    jobs.write("train.py", "print('never')")
    done = jobs.cli("submit", "train.py", "--store", f"{ftp[1]}/store")
    assert done.code == 2
    assert [line for line in done.err.splitlines() if "error" in line] == [
        f"error: store: '{ftp[1]}/store' cannot be a store: ftp cannot create a file exclusively, so two clients could "
        "start one run"
    ]
    assert "Traceback" not in done.err
    assert below(ftp[0]) == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smbclient", None)
    for url, words in {
        "smb://host/share": r"store: smb:// needs smbprotocol, which is not installed\nhint: .* install smbprotocol",
        "sftp:///folder": r"missing (?:a|1) required .*argument: 'host'\nhint: correct fsspec's options in ",
        "nothing://x/y": r"store: fsspec knows no file system for nothing: URLs",
    }.items():
        with pytest.raises(SpecError, match=words):
            files(url).list()


# ----------------------------------------------------------------------------------------------------------- a store


SCRIPT = """
    import os
    from pathlib import Path

    rank, data = os.environ["RANK"], Path(os.environ["CLOUDTRAIN_INPUT_TRAIN"])
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    print("rank", rank, "of", os.environ["WORLD_SIZE"], "has", size, flush=True)
    folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step-1")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        (folder / f"part-{rank}-{number}").write_bytes(bytes([int(rank)]) * 1_000_000)
"""


def submit(jobs: Jobs, store: str, source: str, run_id: str, nodes: int) -> Done:
    """Submit a run on provider local with that store, and check its success. ``source`` holds one file of 100,000
    bytes."""
    jobs.write("train.py", SCRIPT)
    words = ["submit", "train.py", "--store", store, "--input", f"train={source}", "--run-id", run_id, "--json"]
    done = jobs.cli(*words, "--nodes", str(nodes), "--max-runtime", "10m", timeout=240)
    assert (done.code, done.json.get("state")) == (0, "succeeded"), done.err
    for rank in range(nodes):
        assert f"rank {rank} of {nodes} has 100000" in done.err
    assert (done.json["checkpoint"] or {}).get("name") == "step-1", (done.out, done.err)
    return done


@pytest.fixture
def source(ftp: tuple[Path, str]) -> str:
    """Return the URL of the training data, at another scheme than the store's."""
    (ftp[0] / "set").mkdir()
    (ftp[0] / "set/x.bin").write_bytes(bytes(100_000))
    return f"{ftp[1]}/set/"


@pytest.fixture
def store(plain: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a store of that class, which this machine's processes find too."""
    url = plain(PLAIN + EXCLUSIVE)
    monkeypatch.setenv("PYTHONPATH", os.environ["PLAIN_SITE"])
    return url


@pytest.mark.slow
def test_a_run(store: str, source: str, request: pytest.FixtureRequest) -> None:
    jobs: Jobs = request.getfixturevalue("jobs")
    assert submit(jobs, store, source, "one", 1).json["uploaded"]["code_bytes"] > 0
    assert [found.name for found in Store(store).checkpoints("one")] == ["step-1"]


@pytest.mark.proof
def test_a_run_and_all_that_comes_after(
    store: str, request: pytest.FixtureRequest, source: str, tmp_path: Path
) -> None:
    jobs: Jobs = request.getfixturevalue("jobs")
    submit(jobs, store, source, "one", 2)
    again = submit(jobs, store, source, "two", 2)
    assert {again.json["uploaded"][name] for name in ("code_bytes", "runtime_bytes", "data_bytes")} == {0}
    listed = jobs.cli("list", "--store", store, "--json")
    assert sorted(run["run_id"] for run in listed.json["runs"]) == ["one", "two"]
    followed = jobs.cli("logs", "-f", "two", "--store", store)
    assert "rank 1 of 2" in followed.out
    pulled = jobs.cli("pull", "one", str(tmp_path / "out"), "--store", store, "--json")
    assert pulled.code == 0, pulled.err
    for rank in range(2):
        for number in range(8):
            part = tmp_path / f"out/checkpoints/step-1/part-{rank}-{number}"
            assert part.read_bytes() == bytes([rank]) * 1_000_000
    kept = jobs.cli("gc", "--store", store, "--json")
    assert kept.code == 0, kept.err
    assert jobs.cli("status", "one", "--store", store).code == 0
    _check_killed_pull(jobs, store)


def _check_killed_pull(jobs: Jobs, store: str) -> None:
    """Check that files of a checkpoint that a killed pull had completed are not fetched again."""
    out = jobs.tmp / "killed"
    process = jobs.start("pull", "two", str(out), "--store", store)
    Jobs.wait_for(lambda: len(list(out.rglob("part-*"))) > 2 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = {path.name: path.stat().st_mtime_ns for path in out.rglob("part-*")}
    assert len(there) > 2
    done = jobs.cli("pull", "two", str(out), "--store", store, "--json")
    assert done.code == 0, done.err
    whole = {path.name: path.stat().st_mtime_ns for path in (out / "checkpoints/step-1").iterdir()}
    assert len(whole) == 16
    assert {name: whole[name] for name in there} == there
    assert not [name for name in below(out) if ".cloudtrain-tmp-" in name]


# ----------------------------------------------------------------------------------------------------- remote inputs


class Brought:
    """An input at ``source`` that no node reads, and the store that gets a copy of it."""

    def __init__(self, source: str, store: str) -> None:
        self.source, self.store, self.scheme = source, Store(store), store.partition(":")[0]
        self.said: list[str] = []

    def layout(self, run_id: str) -> Layout:
        job = Job.from_dict({"entry_point": "train.py", "inputs": {"train": self.source}})
        placed, _ = self.store.inputs(job, frozenset({self.scheme}), run_id=run_id, cwd=Path.cwd())
        return Layout(store=self.store.url, run_id=run_id, code_digest="c0de", runtime_digest="f00d", inputs=placed)

    def bring(self, run_id: str = "run-1") -> int:
        return copy_inputs(self.store, self.layout(run_id), say=self.said.append)

    def copied(self, run_id: str = "run-1") -> dict[str, bytes]:
        tree = files(self.layout(run_id).inputs["train"].url)
        return {key: tree.read(key) for key in tree.list()}


def check_copied_once(brought: Brought, data: dict[str, bytes], change: Callable[[str, bytes], None]) -> None:
    """Check that ``data`` is copied once into a run, and only the changed files into the next one."""
    size = sum(map(len, data.values()))
    assert brought.bring() == size
    assert brought.copied() == data
    assert (brought.bring(), len(brought.said)) == (0, 1)
    change("sub/b.txt", b"changed")
    with pytest.raises(ConflictError, match="has changed since its copy for run run-1 began"):
        brought.bring()
    size += 7 - len(data["sub/b.txt"])
    assert brought.bring("run-2") == size
    assert brought.copied("run-2") == {**data, "sub/b.txt": b"changed"}
    found, again = (stage_input(brought.store, brought.source, cwd=Path.cwd()) for _ in range(2))
    assert (found.copied, again.copied, again.url) == (size, 0, found.url)
    assert {key: files(found.url).read(key) for key in files(found.url).list()} == brought.copied("run-2")


SET = {"a.bin": os.urandom(9 * MIB + 3), "sub/b.txt": b"hello", "sub/c d+%.txt": b"x", "empty": b""}


def _fill(root: Path) -> Callable[[str, bytes], None]:
    def write(name: str, data: bytes) -> None:
        path = root / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    for name, data in SET.items():
        write(name, data)
    return write


def test_a_tree_on_an_ftp_server(ftp: tuple[Path, str], s3_url: str) -> None:
    write = _fill(ftp[0])
    check_copied_once(Brought(f"{ftp[1]}/set", s3_url), SET, write)
    one = Brought(f"{ftp[1]}/set/sub/b.txt", s3_url)
    assert (one.bring("run-3"), one.bring("run-3")) == (7, 0)
    for url, words in {
        f"{ftp[1]}/nothing": "inputs.train: .*/nothing holds no file",
        f"{ftp[1]}/nothing.csv": "inputs.train: there is no file .*/nothing.csv",
        f"{ftp[1].replace('//', '//u:s3cret@')}/set": "530",
    }.items():
        with pytest.raises(CloudtrainError, match=words) as told:
            Brought(url, s3_url).bring()
        assert "s3cret" not in str(told.value)


def test_a_tree_on_an_sftp_server(sftp: Server, s3_url: str) -> None:
    write = _fill(sftp.root)
    check_copied_once(Brought(f"{sftp.url}/set", s3_url), SET, write)


def test_a_link_on_an_sftp_server_is_what_it_leads_to(sftp: Server) -> None:
    (sftp.root / "set").mkdir()
    (sftp.root / "big").write_bytes(b"12345")
    (sftp.root / "set" / "link").symlink_to("../big")
    tree = files(f"{sftp.url}/set")
    assert {key: entry.size for key, entry in tree.entries().items()} == {"link": 5}
    (sftp.root / "set" / "folder").symlink_to("..")
    with pytest.raises(StorageError, match=r"/set/folder: this symbolic link does not lead to a file"):
        tree.entries()
    (sftp.root / "set" / "folder").unlink()
    (sftp.root / "set" / "gone").symlink_to("nowhere")
    with pytest.raises(StorageError, match=r"/set/gone: this symbolic link does not lead to a file"):
        tree.entries()


# ---------------------------------------------------------------------------------------------------------- the hub


def test_a_data_set_of_the_hub(hub: Hub, s3_url: str) -> None:
    content = {f"folder/{name}": data for name, data in SET.items()} | {"README.md": b"not this"}
    hub.commit("org/name", content, "v1")

    def change(name: str, data: bytes) -> None:
        hub.commit("org/name", content | {f"folder/{name}": data}, "v1")

    check_copied_once(Brought("hf://datasets/org/name@v1/folder", s3_url), SET, change)
    requests = hub.files_asked()
    assert requests.count("folder/sub/b.txt") == 3  # once for each run, and once for all
    assert requests.count("folder/sub/c d+%.txt") == 3
    assert "README.md" not in requests
    hub.commit("org/name", {"x.csv": b"main"})
    hub.commit("org/name", {"x.csv": b"of a pull request"}, "refs/pr/1")
    for revision, size in (("", 4), ("@refs/pr/1", 17)):
        one = Brought(f"hf://datasets/org/name{revision}/x.csv", s3_url)
        run_id = f"of-{size}"
        assert (one.bring(run_id), one.bring(run_id)) == (size, 0)


def test_a_hub_that_is_busy_is_asked_again(hub: Hub, s3_url: str) -> None:
    hub.commit("org/name", {"x.csv": b"data"})
    hub.faults = [503]
    brought = Brought("hf://datasets/org/name/x.csv", s3_url)
    assert brought.bring() == 4
    assert hub.faults == []


def test_a_token_is_sent_and_never_shown(
    hub: Hub, s3_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.commit("org/gated", {"x.csv": b"data"})
    hub.gated.add("org/gated")
    hub.token = "hf_s3cretOfMine"
    brought = Brought("hf://datasets/org/gated/x.csv", s3_url)
    with pytest.raises(AuthError, match=r"hf://datasets/org/gated/x.csv: no access: .*gated"):
        brought.bring()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert brought.bring() == 4
    assert {given for path, given in hub.asked[-3:]} == {f"Bearer {hub.token}"}
    monkeypatch.setenv("HF_TOKEN", "hf_wr0ngOne")
    with pytest.raises(AuthError, match=r"no access: .*401.*Invalid credentials") as told:
        brought.bring("run-2")
    shown = f"{told.value} {capfd.readouterr()} {brought.said}"
    kept = [brought.store.files.read(key) for key in brought.store.files.list() if key.endswith(".json")]
    assert kept
    for secret in ("hf_s3cretOfMine", "hf_wr0ngOne"):
        assert secret not in shown
        assert not [data for data in kept if secret.encode() in data]


@pytest.mark.parametrize("below", ["", "/x.csv"])
def test_what_the_hub_does_not_have_is_one_line(
    below: str, hub: Hub, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("org/name", {"y.csv": b"1"})
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    for name, words in {
        "org/none": "repository not found",
        "org/name@v9": "revision not found",
        "name@v1": "must be 'namespace/name'",
    }.items():
        with pytest.raises(StorageError, match=words) as told:
            Brought(f"hf://datasets/{name}{below}", s3_url).bring()
        assert "\n" not in str(told.value)
    with pytest.raises(SpecError, match=r"inputs.train: (there is no file|.* holds no file)"):
        Brought(f"hf://datasets/org/name/none{below}", s3_url).bring()
    assert not [key for key in files(s3_url).list() if key.startswith("runs/")]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(AuthError, match="Repository Not Found"):
        Brought(f"hf://datasets/org/none{below}", s3_url).bring()


def test_a_run_here_reads_the_hub(hub: Hub, jobs: Jobs) -> None:
    """With provider local, its supervisor fetches the data."""
    hub.commit("org/name", {"set/a.bin": os.urandom(5 * MIB), "set/sub/b": b"22"}, "v1")
    jobs.write("train.py", "import os, pathlib; print(sorted(p.stat().st_size for p in "
               "pathlib.Path(os.environ['CLOUDTRAIN_INPUT_TRAIN']).rglob('*') if p.is_file()))")  # fmt: skip
    flags = ("--input", "train=hf://datasets/org/name@v1/set")
    done = jobs.submit("train.py", *flags, HF_ENDPOINT=hub.url, HF_TOKEN="hf_mine")
    assert done.code == 0, done.err
    assert f"[2, {5 * MIB}]" in done.err
    assert "Bearer hf_mine" in {given for _, given in hub.asked}
    assert "hf_mine" not in done.err + json.dumps(done.json)
