"""Transfers of a store: atomic files, exclusive creation, safe paths, retries and the error table."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.errors import AuthError, LostContactError, SpecError, StorageError
from cloudtrain.storage.errors import FinalError, Retries, UnreachableError, classify, report_retries
from cloudtrain.storage.files import LocalFiles, files, parallel
from cloudtrain.storage.fsspec_backend import FsspecMover
from cloudtrain.storage.fsspec_pool import Clients
from cloudtrain.storage.local_disk import _unnameable, hold_lock, inside, local_path, normalize, safe, sha256_file, walk
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.storage.timings import CLIENT_TIMINGS


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def local(tmp_path: Path) -> LocalFiles:
    return LocalFiles(root=tmp_path / "store")


@pytest.fixture
def memory() -> Iterator[RemoteFiles]:
    MemoryFileSystem.store.clear()  # one for the whole process, which other test modules use too
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield RemoteFiles(url="memory://bucket/store", retries=Retries(sleep=lambda _: None))
    MemoryFileSystem.store.clear()


# ----------------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.skipif(os.name == "nt", reason="POSIX paths")
@for_each(
    ("url", "normal"),
    [
        ("store", "file:///work/here/store"),
        ("./a/../.cloudtrain/", "file:///work/here/.cloudtrain"),
        ("/abs//path/", "file:///abs/path"),
        ("file:///abs/path/", "file:///abs/path"),
        ("file:/abs/path", "file:///abs/path"),
        ("FILE://localhost/abs", "file:///abs"),
        ("/with space/100%/#1", "file:///with space/100%/#1"),
        ("S3://Bucket/Key/", "s3://Bucket/Key"),
        ("gs://bucket", "gs://bucket"),
        ("abfs://c@account.dfs.core.windows.net/x//", "abfs://c@account.dfs.core.windows.net/x"),
    ],
)
def test_normalize(url: str, normal: str) -> None:
    assert normalize(url, cwd=Path("/work/here")) == normal
    assert normalize(normal, cwd=Path("/elsewhere")) == normal


@for_each("url", ["s3://", "gs:///", "file://host/share"])
def test_normalize_refuses(url: str) -> None:
    with pytest.raises(SpecError):
        normalize(url, cwd=Path("/"))


def test_normalize_keeps_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert normalize("link/store", cwd=tmp_path) == f"file://{tmp_path}/link/store"


def test_local_path() -> None:
    assert local_path("file:///a b/c") == Path("/a b/c")
    assert local_path("file:///C:/data") == Path("C:/data")
    assert local_path("/a") == Path("/a")
    assert local_path("s3://bucket/a") is None


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20))
@example("s3://bucket")
def test_a_file_url_is_its_path_again(name: str) -> None:
    if "://" in name:  # a URL that was joined to a folder by mistake
        with pytest.raises(SpecError, match="is not a URL"):
            normalize(f"/root/{name}", cwd=Path("/"))
        return
    path = os.path.abspath("/root/" + name)
    assert str(local_path(normalize(f"/root/{name}", cwd=Path("/")))) == path.replace("//", "/")


def test_a_local_store_never_imports_fsspec(tmp_path: Path) -> None:
    code = (
        "import sys; from cloudtrain.store.store import Store; s = Store(sys.argv[1]);"
        "s.files.write('runs/a/run.json', b'{}');"
        "assert s.runs() == ['a']; assert not {m for m in sys.modules if m.split('.')[0] == 'fsspec'}"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True)


# ------------------------------------------------------------------------------------------------ a folder's own locks


def test_a_lock_ends_with_its_process_and_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    code = (
        "import sys, time; from pathlib import Path; from cloudtrain.storage.local_disk import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(StorageError, match="another process has locked it for 0 s"), hold_lock(path, seconds=0.1):
            raise AssertionError
        holder.kill()
        holder.wait()
        assert path.exists()
        with hold_lock(path, seconds=10):
            pass
    assert not path.exists()


def test_a_file_that_is_missing_within_a_lock_is_an_error_of_the_block(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), hold_lock(tmp_path / "lock"):
        raise FileNotFoundError("gone")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="fcntl")
def test_a_file_system_without_locks_is_refused(local: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StorageError, match="the file system has no locks: No locks available"):
        local.swap("key", None, b"1")


# ----------------------------------------------------------------------------------------------------------- safe paths


@given(
    st.lists(st.sampled_from(["a", "b.txt", "..", ".", "", "C:", "\\", "~", "con", "x y", "ü"]), min_size=1, max_size=6)
)
@example(["", "etc", "passwd"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_lies_inside(tmp_path: Path, parts: list[str]) -> None:
    key = "/".join(parts)
    if safe(key):
        path = inside(tmp_path, key)
        assert Path(os.path.abspath(path)).is_relative_to(tmp_path)
        assert Path(os.path.abspath(path)) != tmp_path
    else:
        with pytest.raises(StorageError):
            inside(tmp_path, key)


@for_each(
    ("name", "posix", "nt"),
    [
        ("a" * 255, False, False), ("a" * 256, True, True), ("ü" * 128, True, True), ("con", False, True),
        ("NUL.txt", False, True), ("aux .tar.gz", False, True), ("com1", False, True), ("LPT\u00b9", False, True),
        ("console", False, False), ("com10", False, False), ("a.", False, True), ("a ", False, True),
        ("a:b", False, True), ("a?", False, True), ("a\n", False, True), ("ü.txt", False, False),
    ],
)  # fmt: skip
def test_names_that_no_file_can_have(name: str, posix: bool, nt: bool, tmp_path: Path) -> None:
    assert (_unnameable(name, "posix"), _unnameable(name, "nt")) == (posix, nt)
    if posix:
        assert not safe(f"a/{name}")
        with pytest.raises(StorageError, match="this system allows no such name"):
            inside(tmp_path, f"a/{name}")


def test_a_hostile_tree_is_refused_before_anything_is_fetched(memory: RemoteFiles, tmp_path: Path) -> None:
    memory.write("t/a", b"1")
    fs = MemoryFileSystem()
    fs.pipe_file("/bucket/store/t/x\\..\\y", b"2")
    with pytest.raises(StorageError, match="unsafe path"):
        memory.download_tree("t", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_goes_through_a_symbolic_link(memory: RemoteFiles, tmp_path: Path) -> None:
    memory.write("t/sub/file", b"1")
    memory.write("t/inner/file", b"2")
    memory.write("t/file", b"3")
    (tmp_path / "outside").mkdir()
    (tmp_path / "secret").write_bytes(b"kept")
    out = tmp_path / "out"
    (out / "real").mkdir(parents=True)
    (out / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="symbolic link"):
        memory.download_tree("t", out)
    assert os.listdir(tmp_path / "outside") == []
    (out / "sub").unlink()
    (out / "inner").symlink_to("real")  # stays inside: the user's own arrangement
    (out / "file").symlink_to(tmp_path / "secret")  # replaced, not followed
    memory.download_tree("t", out)
    assert (out / "real" / "file").read_bytes() == b"2"
    assert (out / "file").read_bytes() == b"3"
    assert not (out / "file").is_symlink()
    assert (tmp_path / "secret").read_bytes() == b"kept"


def test_a_local_list_leaves_links_and_unfinished_files_out(local: LocalFiles) -> None:
    local.write("a/file", b"1")
    (local.root / "a" / "link").symlink_to("file")
    (local.root / "etc").symlink_to("/etc")
    (local.root / "a" / ".cloudtrain-tmp-1").write_bytes(b"")
    assert local.list() == {"a/file": 1}
    assert local.names("a") == ["file", "link"]
    local.remove("etc")
    assert Path("/etc").exists()


def test_walk_follows_links_but_no_circles(tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    (tmp_path / "tree" / "linked").symlink_to(tmp_path / "data")
    (tmp_path / "tree" / "twice").symlink_to(tmp_path / "data")
    assert list(walk(tmp_path / "tree")) == ["linked/x", "twice/x"]
    assert list(walk(tmp_path / "data" / "x")) == ["x"]
    (tmp_path / "tree" / "sub" / "up").symlink_to(tmp_path / "tree")
    with pytest.raises(StorageError, match="circle"):
        walk(tmp_path / "tree")
    (tmp_path / "tree" / "sub" / "up").unlink()
    (tmp_path / "tree" / "gone").symlink_to("nowhere")
    with pytest.raises(StorageError, match="broken link"):
        walk(tmp_path / "tree")
    (tmp_path / "tree" / "gone").unlink()
    (tmp_path / "tree" / "a\\b").write_bytes(b"")
    with pytest.raises(StorageError, match="unsafe"):
        walk(tmp_path / "tree")


# ------------------------------------------------------------------------------ crashes and concurrency, real processes


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["create", "write", "download"])
def test_a_killed_writer_leaves_the_whole_or_nothing(tmp_path: Path, verb: str) -> None:
    """SIGKILL at arbitrary moments of the write leaves one of the complete contents."""
    code = (
        "import sys; from pathlib import Path; from cloudtrain.storage.files import LocalFiles\n"
        "root, verb = Path(sys.argv[1]), sys.argv[2]; tree = LocalFiles(root=root); data = b'x' * 8_000_000\n"
        "tree.write('source', data); print('go', flush=True)\n"
        "for i in range(1000):\n"
        "    if verb == 'download': tree.download('source', root / f'key{i}')\n"
        "    else: getattr(tree, verb)(f'key{i}', data)\n"
    )
    for number in range(5):
        root = tmp_path / str(number)
        child = subprocess.Popen([sys.executable, "-c", code, str(root), verb], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
            time.sleep(0.01 + 0.017 * number)
            child.send_signal(signal.SIGKILL)
            child.wait()
        sizes = LocalFiles(root=root).list()
        assert set(sizes.values()) == {8_000_000}
        # A dead creator's partial file does not block the name.
        free = f"key{len(sizes)}"
        assert LocalFiles(root=root).create(free, b"next")


def test_parallel_stops_at_the_first_failure() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise StorageError("second")
        time.sleep(0.001)
        return number

    with pytest.raises(StorageError, match="second"):
        parallel(work, list(range(2000)), jobs=2)
    assert len(begun) < 2000
    assert parallel(lambda n: n + 1, [3, 1, 2], jobs=2) == [4, 2, 3]


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_parallel_work_starts_no_more_and_waits_for_the_rest() -> None:
    begun, ended, main = list[int](), list[int](), threading.get_ident()

    def work(number: int) -> None:
        begun.append(number)
        if number == 3:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.4 if number == 0 else 0.05)  # the caller waits for this one when the signal comes
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        parallel(work, list(range(200)), jobs=2)
    assert len(begun) < 20
    assert sorted(begun) == sorted(ended)


# ------------------------------------------------------------------------------------------------------- the local disk


def test_private_and_plain_modes(local: LocalFiles) -> None:
    before = os.umask(0o022)
    try:
        local.create("key", b"secret", private=True)
        local.create("open", b"1")
        local.write("written", b"1")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((local.root / name).stat().st_mode) for name in ("key", "open", "written")}
    assert modes == {"key": 0o600, "open": 0o644, "written": 0o644}


def test_gitignore_is_written_once_and_with_the_first_write(tmp_path: Path) -> None:
    tree = files(str(tmp_path / "store"), gitignore=True)
    assert tree.list() == {}
    assert not (tmp_path / "store").exists()
    tree.write("runs/x", b"")
    assert tree.read(".gitignore") == b"*\n"
    tree.write(".gitignore", b"user's own")
    files(str(tmp_path / "store"), gitignore=True).write("runs/y", b"")
    assert tree.read(".gitignore") == b"user's own"


def test_disk_errors_name_path_and_reason(local: LocalFiles, tmp_path: Path) -> None:
    local.write("file", b"")
    with pytest.raises(StorageError, match=r"store/file.*(Not a directory|File exists)"):
        local.write("file/below", b"")
    with pytest.raises(StorageError, match=r"store.*Is a directory"):
        local.read("")
    local.write("folder/x", b"")
    with pytest.raises(StorageError, match=r"folder.*Is a directory"):
        local.write("folder", b"")
    assert local.list() == {"file": 0, "folder/x": 0}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as out:
            out.write(b"x")

    monkeypatch.setattr(os, "link", full)
    tree = LocalFiles(root=Path("/tmp") / f"cloudtrain-full-{os.getpid()}")
    try:
        with pytest.raises(StorageError, match="No space left on device"):
            tree.create("key", b"data")
        assert tree.list() == {}
    finally:
        tree.root.rmdir()


# -------------------------------------------------------------------------------------------- retries, the error table


def http(status: int, name: str = "Whatever") -> Exception:
    """Return an exception with an HTTP status, like the client libraries'."""
    return type(name, (Exception,), {"status_code": status})(f"status {status}")


def botocore(status: int, code: str) -> OSError:
    """Return s3fs's exception for an unknown code."""
    cause = type("ClientError", (Exception,), {})(code)
    cause.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(errno.EIO, code)
    error.__cause__ = cause
    return error


def named(name: str, text: str = "said so", base: type[Exception] = Exception) -> Exception:
    return type(name, (base,), {})(text)


@for_each(
    ("exc", "kind"),
    [
        (FileNotFoundError("key"), "missing"),
        (http(404), "missing"),
        (named("ResourceNotFoundError"), "missing"),
        (FileExistsError("key"), "taken"),
        (botocore(409, "ConditionalRequestConflict"), "taken"),
        (botocore(412, "PreconditionFailed"), "taken"),
        (http(503), "transient"),
        (http(429), "transient"),
        (botocore(500, "InternalError"), "transient"),
        (botocore(503, "SlowDown"), "transient"),
        (ConnectionResetError("reset"), "transient"),
        (TimeoutError(), "transient"),
        (named("EndpointConnectionError", base=ConnectionError), "transient"),
        (named("ServiceRequestError"), "transient"),
        (PermissionError("Access Denied"), "auth"),
        (named("NoCredentialsError"), "auth"),
        (named("ClientAuthenticationError"), "auth"),
        (named("RefreshError", base=type("GoogleAuthError", (Exception,), {})), "auth"),
        (http(401), "auth"),
        (OSError("Forbidden: https://…"), "auth"),
        (ValueError("unable to connect to account for Must provide … credentials!!"), "auth"),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "disk"),
        (OSError(errno.EROFS, "Read-only file system", "/tmp/x"), "disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/tmp/x"), "disk"),
        (named("UnauthenticatedError"), "auth"),
        (named("AlreadyExistsError"), "taken"),
        (ValueError("something else"), "other"),
        (http(400), "other"),
    ],
)
def test_the_error_table(exc: Exception, kind: str) -> None:
    assert classify(exc) == kind


class Flaky(MemoryFileSystem):
    """A file system that raises the given errors in turn, then works. ``also`` runs before each error. Without
    ``reads``, reads work."""

    cachable = False

    def __init__(self, errors: list[Exception], also: Callable[[], None] = lambda: None, *, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.errors, self.also, self.calls = errors, also, 0

    def _next(self) -> None:
        self.calls += 1
        self.also()
        if self.errors:
            raise self.errors.pop(0)

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        if self.reads:
            self._next()
        return super().cat_file(path, *args, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        self._next()
        return super().pipe_file(path, value, mode=mode, **options)

    def get_file(self, rpath: str, lpath: Any, *args: Any, **options: Any) -> Any:
        Path(lpath).write_bytes(b"as long as..")  # after a failed part, s3fs leaves a file of full size
        self._next()
        return super().get_file(rpath, lpath, *args, **options)


@pytest.fixture
def flaky(memory: RemoteFiles) -> Callable[..., tuple[RemoteFiles, Flaky, list[float]]]:
    def make(*errors: Exception, **options: Any) -> tuple[RemoteFiles, Flaky, list[float]]:
        fs, waits = Flaky(list(errors), **options), list[float]()
        retries = Retries(tries=4, sleep=waits.append)
        clients = Clients(lambda: (fs, "/bucket/store"))
        mover = FsspecMover(url=memory.url, clients=clients, retries=retries)
        tree = RemoteFiles(url=memory.url, retries=retries)
        tree._connect = lambda: mover  # type: ignore[method-assign]
        return tree, fs, waits

    return make


def test_transient_errors_are_tried_again_and_backed_off(memory: RemoteFiles, flaky: Any) -> None:
    memory.write("key", b"data")
    tree, fs, waits = flaky(http(503), ConnectionResetError(), TimeoutError())
    assert tree.read("key") == b"data"
    assert fs.calls == 4
    assert len(waits) == 3
    assert all(0.25 * 2**n <= wait <= 0.75 * 2**n for n, wait in enumerate(waits))


def test_tries_end(flaky: Any) -> None:
    tree, fs, waits = flaky(*[http(503, "SlowDown")] * 9)
    with pytest.raises(StorageError, match=r"memory://bucket/store/key: status 503$"):
        tree.read("key")
    assert (fs.calls, len(waits)) == (4, 3)


@for_each(
    ("error", "kind"),
    [
        (PermissionError("Access Denied"), AuthError),
        (ValueError("a\n b"), StorageError),
        (FileNotFoundError(), FileNotFoundError),
    ],
)
def test_other_errors_are_not_tried_again(flaky: Any, error: Exception, kind: type[Exception]) -> None:
    tree, fs, _ = flaky(error)
    with pytest.raises(kind) as caught:
        tree.read("key")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
    assert fs.calls == 1


def test_a_missing_bucket_is_no_missing_file(flaky: Any, tmp_path: Path) -> None:
    tree, _, _ = flaky(FileNotFoundError("bucket"), FileNotFoundError("bucket"))
    for attempt in (tree.write, tree.create):
        with pytest.raises(FinalError, match="bucket or container does not exist"):
            attempt("key", b"")


def test_a_failed_download_leaves_nothing(memory: RemoteFiles, flaky: Any, tmp_path: Path) -> None:
    memory.write("key", b"the content!")
    tree, _, _ = flaky(ValueError("part 3 failed"))
    (tmp_path / "file").write_bytes(b"good")
    with pytest.raises(StorageError, match="part 3"):
        tree.download("key", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"good"
    assert os.listdir(tmp_path) == ["file"]
    tree, _, _ = flaky(http(500))
    moved: list[int] = []
    tree.download("key", tmp_path / "file", size=12, progress=lambda _, more: moved.append(more))
    assert (tmp_path / "file").read_bytes() == b"the content!"
    assert os.listdir(tmp_path) == ["file"]
    assert sum(moved) == 12


def test_a_conflict_with_the_winner_is_false(memory: RemoteFiles, flaky: Any) -> None:
    """409: another creator is active. Once its object exists, it has won."""
    tree, _, _ = flaky(botocore(409, "ConditionalRequestConflict"), also=lambda: memory.write("key", b"theirs"))
    assert tree.create("key", b"mine") is False
    assert memory.read("key") == b"theirs"


def test_a_conflict_with_a_loser_is_tried_again(memory: RemoteFiles, flaky: Any) -> None:
    conflict = botocore(409, "ConditionalRequestConflict")
    tree, fs, waits = flaky(conflict, conflict, reads=False)
    assert tree.create("key", b"mine") is True
    assert memory.read("key") == b"mine"
    assert (fs.calls, len(waits)) == (3, 2)
    tree, _, _ = flaky(*[conflict] * 9, reads=False)
    with pytest.raises(StorageError, match="other clients change it"):
        tree.create("other", b"mine")


@pytest.mark.costly
def test_an_unknown_scheme_and_a_missing_package() -> None:
    with pytest.raises(SpecError, match="fsspec knows no file system for nosuch:"):
        files("nosuch://bucket/x").read("key")
    code = (
        "import sys; sys.modules['gcsfs'] = None\n"
        "from cloudtrain.storage.files import files\n"
        "from cloudtrain.errors import SpecError\n"
        "try: files('gs://bucket/x').read('key')\n"
        "except SpecError as exc: said = f'{exc} {exc.hint}'\n"
        "else: raise SystemExit('no error')\n"
        "assert 'gs:// needs gcsfs, which is not installed' in said and '[vertex]' in said, said\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sha256_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 1_000_000)
    assert sha256_file(tmp_path / "x") == digest(b"abc" * 1_000_000)


UNREACHED = [
    ("Could not connect to the endpoint URL: \"http://nohost.invalid/b/x\"", "[Errno -2] Name or service not known",
     "nohost.invalid: name not resolved"),
    ("Error performing GET http://127.0.0.1:9/b/x in 1ms - HTTP error", "Connection refused",
     "127.0.0.1:9: connection refused"),
    ("Cannot connect to host storage.googleapis.com:443 ssl:default", "Network is unreachable",
     "storage.googleapis.com:443: no route to host"),
    ("HTTPSConnectionPool(host='a.blob.core.windows.net', port=443)", "ConnectTimeoutError: timed out",
     "a.blob.core.windows.net: no answer"),
    ("it is gone", "Connection refused", "s3://b/x: connection refused"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "words"), [("gs", "run: gcloud auth application-default login"), ("slow", "no conn")]
)
def test_a_store_that_opens_slowly_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, words: str) -> None:
    class Slow(MemoryFileSystem):
        def __init__(self, **options: Any) -> None:
            deadline = time.monotonic() + 10
            while not lines and time.monotonic() < deadline:
                time.sleep(0.01)
            super().__init__(**options)

    lines: list[str] = []
    monkeypatch.setitem(_registry, scheme, Slow)
    monkeypatch.setattr(CLIENT_TIMINGS, "opening", 0.01)
    with report_retries(lines.append):
        files(f"{scheme}://bucket/x").exists("key")
    assert len(lines) == 1
    assert lines[0].startswith(f"{scheme}://bucket/x: ")
    assert words in lines[0]


@for_each(("outer", "inner", "said"), UNREACHED)
def test_a_host_that_cannot_be_reached_is_named_and_is_no_failure_of_the_store(
    outer: str, inner: str, said: str
) -> None:
    def call() -> None:
        raise ConnectionError(outer) from OSError(inner)

    tries: list[str] = []
    with report_retries(tries.append), pytest.raises(UnreachableError) as caught:
        Retries(tries=4, sleep=lambda _: None)("s3://b/x", call)
    assert str(caught.value) == f"cannot reach {said}"
    assert caught.value.hint == "check the network, then run: cloudtrain doctor"
    assert (caught.value.exit_code, caught.value.__cause__) == (7, None)
    assert isinstance(caught.value, (LostContactError, StorageError))
    assert tries == [f"s3://b/x does not answer (try {number} of 4)" for number in (3, 4)]
