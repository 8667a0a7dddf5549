"""The newest complete checkpoint that a script wrote to the store itself: by files, by fsspec, and in trouble."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import AuthError, StorageError
from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.runtime import resume as resume_module
from cloudtrain.runtime.checkpoint_model import Checkpoint
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.resume import Resume
from cloudtrain.runtime.store_checkpoints import RefusedError, find_newest
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.workspace import Workspace

#: A file system over local files, reached like one of fsspec's own by ``fake:///folder``.
#: ``TIME`` sets the form of its times. The file ``$FAIL`` holds how many listings that contain ``$FAILS`` still fail.
FAKE = """
import os
from datetime import datetime, timezone
from fsspec.spec import AbstractFileSystem

class Fake(AbstractFileSystem):
    protocol = "fake"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("fake://").strip("/")

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        counter = os.environ.get("FAIL")
        if counter and os.environ["FAILS"] in path:
            left = int(open(counter).read())
            if left:
                open(counter, "w").write(str(left - 1))
                raise PermissionError("AccessDenied: no listing for " + path)
        return [self.info(path + "/" + name) for name in sorted(os.listdir(path))]

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": os.path.getsize(path), "type": kind, **self.times(os.path.getmtime(path))}

    def times(self, when):
        moment = datetime.fromtimestamp(when, timezone.utc)
        return {
            "LastModified": {"LastModified": moment, "created": moment.replace(year=2000)},
            "mtime": {"mtime": when},
            "naive": {"last_modified": moment.replace(tzinfo=None)},
            "updated": {"mtime": None, "updated": moment.strftime("%Y-%m-%dT%H:%M:%S.") + "%03dZ" % (when % 1 * 1000)},
            "created": {"created": moment.isoformat()},
            "modified": {},
        }[os.environ["TIME"]]

    def modified(self, path):
        return datetime.fromtimestamp(os.path.getmtime(self._strip_protocol(path)), timezone.utc)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "store_pauses", (0.01, 0.02))


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Python whose fsspec knows ``fake``."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/fakefs.py").write_text(FAKE)
    (tmp_path / "lib/sitecustomize.py").write_text(
        "import fsspec\nfsspec.register_implementation('fake', 'fakefs.Fake')\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "TIME": "LastModified"}


def checkpoint(folder: Path, saved: float | None, **shards: float) -> None:
    """Write ``.metadata`` with the time ``saved``, and shards with their own times."""
    folder.mkdir(parents=True)
    files = {f"{name}.distcp": when for name, when in shards.items()}
    for name, when in {**files, **({".metadata": saved} if saved is not None else {})}.items():
        (folder / name).write_text("x")
        os.utime(folder / name, (when, when))


def ask(
    url: str, environ: dict[str, str] | None = None, python: str = sys.executable
) -> tuple[Checkpoint | None, list[str]]:
    messages: list[str] = []
    return find_newest(url, python=python, environ=environ or dict(os.environ), say=messages.append), messages


SCHEMES = pytest.mark.parametrize("scheme", ["file", "fake"])


@SCHEMES
def test_the_newest_with_metadata_that_is_the_last_of_its_files(
    tmp_path: Path, fake: dict[str, str], scheme: str
) -> None:
    root = tmp_path / "store"
    checkpoint(root / "step-1", 1000.0, a=998.0, **{"+b": 1000.0})  # the same moment is fine
    checkpoint(root / "step-2", 2000.0, a=1990.5, b=1999.0)
    checkpoint(root / "step-3", 3000.0, a=3001.0, b=2999.0)
    checkpoint(root / "step-4", None, a=4000.0)
    (root / "a-file").write_text("x")
    (root / "step-5").mkdir()
    found, lines = ask(f"{scheme}://{root}", fake)
    assert found is not None
    assert (found.key, found.saved) == (f"{scheme}://{root}/step-2", 2000.0)
    assert lines == [
        f"checkpoint {scheme}://{root}/step-3 is not complete (a.distcp is newer than its .metadata); skipped"
    ]


@SCHEMES
def test_a_shard_deeper_down_counts_too(tmp_path: Path, fake: dict[str, str], scheme: str) -> None:
    checkpoint(tmp_path / "store/step-1", 1000.0, a=998.0)
    checkpoint(tmp_path / "store/step-1/sub", None, b=1001.0)
    found, lines = ask(f"{scheme}://{tmp_path}/store", fake)
    assert found is None
    assert "sub/b.distcp" in lines[0]


@SCHEMES
def test_of_the_same_moment_the_higher_step_is_newer(tmp_path: Path, fake: dict[str, str], scheme: str) -> None:
    for name in ("step-9", "step-10", "last"):
        checkpoint(tmp_path / "store" / name, 1000.0, a=998.0)
    found, _ = ask(f"{scheme}://{tmp_path}/store", fake)
    assert found is not None
    assert found.key == f"{scheme}://{tmp_path}/store/step-10"


@SCHEMES
def test_nothing_there_is_none_without_a_word(tmp_path: Path, fake: dict[str, str], scheme: str) -> None:
    assert ask(f"{scheme}://{tmp_path}/none", fake) == (None, [])
    (tmp_path / "empty").mkdir()
    assert ask(f"{scheme}://{tmp_path}/empty", fake) == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize("field", ["LastModified", "mtime", "naive", "updated", "created", "modified"])
def test_times_as_file_systems_tell_them(tmp_path: Path, fake: dict[str, str], field: str) -> None:
    checkpoint(tmp_path / "store/step-1", 1700000000.25, a=1700000000.25)
    checkpoint(tmp_path / "store/step-2", 1700000001.0, a=1700000001.5)
    found, lines = ask(f"fake://{tmp_path}/store", {**fake, "TIME": field, "TZ": "Asia/Tokyo"})
    assert found is not None
    assert (found.key, found.saved) == (f"fake://{tmp_path}/store/step-1", 1700000000.25)
    assert "step-2" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["store", "step-2"])
@pytest.mark.parametrize("often", [2, 1000])
def test_a_listing_that_fails_is_tried_three_times(
    tmp_path: Path, fake: dict[str, str], fails: str, often: int
) -> None:
    """Check also the listing of a single entry, whose failure fsspec would hide."""
    checkpoint(tmp_path / "store/step-1", 1000.0, a=998.0)
    checkpoint(tmp_path / "store/step-2", 2000.0, a=1998.0)
    (tmp_path / "fail").write_text(str(often))
    environ = {**fake, "FAIL": str(tmp_path / "fail"), "FAILS": fails}
    if often == 2:
        found, lines = ask(f"fake://{tmp_path}/store", environ)
        assert found is not None
        assert (found.key, lines) == (f"fake://{tmp_path}/store/step-2", [])
    else:
        with pytest.raises(StorageError, match="cannot be listed: PermissionError: AccessDenied: no listing"):
            ask(f"fake://{tmp_path}/store", environ)
        tries = 1000 - int((tmp_path / "fail").read_text())
        assert tries == (3 if fails == "store" else 6)  # of an entry, by find and then by itself


def test_a_mount_that_fails_is_tried_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "store/step-1", 1000.0, a=998.0)
    scandir, tries = os.scandir, []

    def stale(path: Any) -> Any:
        tries.append(path)
        if len(tries) < 3:
            raise OSError(116, "Stale file handle", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", stale)
    found, lines = ask(f"file://{tmp_path}/store")
    assert found is not None
    assert lines == []
    tries[:] = []
    monkeypatch.setattr(TIMINGS, "store_pauses", (0.0,))
    with pytest.raises(StorageError, match="Stale file handle"):
        ask(f"file://{tmp_path}/store")


def test_a_python_that_does_not_answer_is_tried_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho x >>{tmp_path}/tries\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(StorageError, match="exit code 3"):
        ask("s3://bucket/x", python=str(python))
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    python.write_text("#!/bin/sh\necho '[]'\n")
    with pytest.raises(StorageError, match="cannot be listed"):
        ask("s3://bucket/x", python=str(python))
    with pytest.raises(StorageError, match="No such file"):
        ask("s3://bucket/x", python=str(tmp_path / "none"))
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(TIMINGS, "store_list", 0.1)
    with pytest.raises(StorageError, match=r"^s3://bucket/x cannot be listed: no answer in 0 s$"):
        ask("s3://bucket/x", python=str(python))


@pytest.mark.parametrize(
    ("url", "module", "why"),
    [
        ("nosuch://bucket/x", "", "nosuch"),
        ("s3://bucket/x", "s3fs.py", "s3fs"),
        ("s3://bucket/x", "fsspec.py", "no fsspec here"),
    ],
)
def test_without_a_back_end_there_is_nothing_to_find(tmp_path: Path, url: str, module: str, why: str) -> None:
    environ = dict(os.environ)
    if module:
        (tmp_path / module).write_text("raise ImportError('no fsspec here')\n")
        environ["PYTHONPATH"] = str(tmp_path)
    found, lines = ask(url, environ)
    assert found is None
    (line,) = lines
    assert line.startswith(f"{url} is not looked at for checkpoints: ")
    assert why in line


#: Writes files, as a script does: ``argv`` is a URL, then names and texts in turn.
WRITES = """
import sys, fsspec
fs, root = fsspec.url_to_fs(sys.argv[1])
for name, text in zip(sys.argv[2::2], sys.argv[3::2]):
    fs.pipe_file(f"{root}/{name}", text.encode())
"""


@pytest.mark.remote
@pytest.mark.parametrize("store", ["s3", *(pytest.param(name, marks=pytest.mark.proof) for name in ("azure", "gcs"))])
def test_on_object_stores(request: pytest.FixtureRequest, store: str) -> None:
    url = f"{request.getfixturevalue(f'{store}_url')}/checkpoints"
    environ = dict(os.environ)
    if store == "s3":
        environ["PYTHONPATH"] = request.getfixturevalue("s3fs")

    def write(*words: str) -> None:
        subprocess.run([sys.executable, "-c", WRITES, url, *words], env=environ, check=True)

    assert ask(url, environ) == (None, [])
    write("step-1/__0_0.distcp", "weights", "step-1/.metadata", "last", "step-2/__0_0.distcp", "weights")
    before = time.time()
    found, lines = ask(url, environ)
    assert found is not None
    assert (found.key, lines) == (f"{url}/step-1", [])
    assert abs(found.saved - before) < 60
    write("step-2/.metadata", "last")
    time.sleep(1.1)  # these stores keep whole seconds
    write("step-1/__0_0.distcp", "written over")
    found, lines = ask(url, environ)
    assert found is not None
    assert found.key == f"{url}/step-2"
    assert lines == [f"checkpoint {url}/step-1 is not complete (__0_0.distcp is newer than its .metadata); skipped"]
    bucket = f"{url.partition('://')[0]}://no-such-bucket/x"
    assert ask(bucket, environ) == (None, [])


# ----------------------------------------------------------------------------------------------------- of a workspace


def workspace(tmp_path: Path, *, url: str = "", shown: str = "direct", **site: Any) -> Workspace:
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    context = {"run_id": "r", "env": {}, "secrets": {"TOKEN": "env:TOKEN"}, "checkpoint_url": url, "provider": "p"}
    paths = {shown: str(tmp_path / "store")}
    place = NodeEnvironment(topology=topology, paths=paths, scratch=[str(tmp_path)], **site)
    return Workspace(context=context, site=place, log=LogWriter(node=0), wait=print)


def test_a_workspace_looks_where_its_store_is_mounted(tmp_path: Path) -> None:
    space = workspace(tmp_path, secrets=lambda reference: "secret")
    assert space.direct() is None
    checkpoint(tmp_path / "store/step-1", 1000.0, a=998.0)
    assert (found := space.direct()) is not None
    assert (found.key, found.saved) == (f"file://{tmp_path.resolve()}/store/step-1", 1000.0)


def test_a_workspace_looks_at_the_mount_of_its_bucket(tmp_path: Path) -> None:
    """The script writes to the bucket by its URL and resumes from it. The check needs no credentials."""
    space = workspace(tmp_path, url="s3://no-such-bucket/x", shown="mounted", secrets=lambda reference: "secret")
    assert space.direct() is None
    checkpoint(tmp_path / "store/step-1", 1000.0, a=998.0)
    assert (found := space.direct()) is not None
    assert (found.key, found.saved) == ("s3://no-such-bucket/x/step-1", 1000.0)


@pytest.mark.parametrize("trouble", [KeyError("TOKEN"), OSError(5, "no answer"), RuntimeError("client")])
def test_a_secret_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path, trouble: Exception) -> None:
    def secrets(reference: str) -> str:
        raise trouble

    space = workspace(tmp_path, secrets=secrets)
    with pytest.raises(StorageError, match=f"secret TOKEN cannot be read: {type(trouble).__name__}"):
        space.direct()


def test_an_error_of_ours_about_a_secret_stays_what_it_is(tmp_path: Path) -> None:
    def secrets(reference: str) -> str:
        raise AuthError("not yours")

    with pytest.raises(AuthError, match="not yours"):
        workspace(tmp_path, secrets=secrets).direct()


def test_without_secrets_here_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read here"):
        workspace(tmp_path).direct()


@pytest.mark.parametrize(
    ("past", "tries"),
    [
        ({"attempts/1.0.json": {"direct": True}}, 0),  # it has used it: the attempt fails
        ({}, 3),  # it would begin afresh
        ({"checkpoints/a/0.0-1/commit.json": {}}, 1),
    ],
)
def test_a_store_that_does_not_answer_matters_to_a_run_that_may_have_used_it(
    tmp_path: Path, past: dict[str, dict[str, Any]], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"protocol": 1, "name": "a", "attempt": "0.0", "seq": 1, "time": 1.0, "saved": 1.0, "files": {}}
    for name, record in {"attempts/0.0.json": {"direct": False}, **past}.items():
        (tmp_path / "live" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "live" / name).write_text(json.dumps(record or whole))
    (tmp_path / "store").write_text("a file where the folder should be")
    space = workspace(tmp_path, secrets=lambda reference: "secret")
    messages: list[str] = []
    resume = Resume(live=tmp_path / "live", given=None, url=None, say=messages.append)
    now = [0.0]
    monkeypatch.setattr(TIMINGS, "store_silent", 2.5)
    monkeypatch.setattr(TIMINGS, "store_again", 1.5)
    monkeypatch.setattr(resume_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(resume_module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(TIMINGS, "store_pauses", ())
    if not tries:
        with pytest.raises(StorageError, match=r"cannot be listed: .*Not a directory"):
            resume.direct(space)
        return
    assert resume.direct(space) is None
    assert len(messages) == tries
    assert all("cannot be listed" in line for line in messages)
    assert messages[-1].endswith("nothing there is resumed from")


def test_a_store_that_answers_in_time_is_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "store/step-1", 1000.0)
    silent = [StorageError("no route"), StorageError("no route")]

    class Late:
        def direct(self) -> Checkpoint | None:
            if silent:
                raise silent.pop()
            return find_newest(f"file://{tmp_path}/store", python=sys.executable, environ={}, say=print)

    monkeypatch.setattr(TIMINGS, "store_again", 0.01)
    resume = Resume(live=tmp_path / "live", given=None, url=None, say=print)
    found = resume.direct(Late())  # type: ignore[arg-type]
    assert found is not None
    assert found.key.endswith("/store/step-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("raise PermissionError('AccessDenied')", RefusedError),
        ("raise PermissionError('ExpiredToken: the token has expired')", StorageError),
        ("raise OSError('Forbidden: gs://b/x\\nyou do not have storage.objects.list')", RefusedError),
        ("e = ValueError('no'); e.status_code = 403; raise e", RefusedError),
        ("raise type('NoCredentialsError', (Exception,), {})('Unable to locate credentials')", RefusedError),
        ("raise type('CredentialRetrievalError', (Exception,), {})('metadata: Read timeout')", StorageError),
        ("raise TimeoutError('no answer')", StorageError),
        ("fs.no_such_method()", StorageError),
        ("return None + path", StorageError),
        ("raise NotImplementedError", None),
        ("import no_such_library", None),
    ],
)
def test_what_a_listing_that_fails_means(
    tmp_path: Path, fake: dict[str, str], code: str, kind: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal differs from no answer. A library's error does not prove that the store is empty; a missing library
    does."""
    monkeypatch.setattr(TIMINGS, "store_pauses", ())
    (tmp_path / "lib/fakefs.py").write_text(
        f"{FAKE}\n    def ls(self, path, detail=True, **kwargs):\n        fs = self\n        {code}\n"
    )
    if kind is None:
        found, lines = ask(f"fake://{tmp_path}/store", fake)
        assert found is None
        assert "is not looked at for checkpoints: " in lines[0]
        assert "NotImplementedError" in lines[0] or "ModuleNotFoundError" in lines[0]
        return
    with pytest.raises(StorageError, match="cannot be listed") as caught:
        ask(f"fake://{tmp_path}/store", fake)
    assert type(caught.value) is kind


@pytest.mark.slow
def test_a_store_that_refuses_holds_nothing_of_the_script(tmp_path: Path, fake: dict[str, str]) -> None:
    checkpoint(tmp_path / "store/step-1", 1000.0)
    (tmp_path / "fail").write_text("1000")
    environ = {**fake, "FAIL": str(tmp_path / "fail"), "FAILS": "store"}
    url = f"fake://{tmp_path}/store"
    with pytest.raises(RefusedError):
        ask(url, environ)

    class Refusing:
        def direct(self) -> Checkpoint | None:
            return find_newest(url, python=sys.executable, environ=environ, say=print)

    messages: list[str] = []
    resume = Resume(live=tmp_path / "live", given=None, url=None, say=messages.append)
    assert resume.direct(Refusing()) is None  # type: ignore[arg-type]
    assert "AccessDenied" in messages[0]
