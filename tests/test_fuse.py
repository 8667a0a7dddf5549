"""A folder behind FUSE behaves as the mount of an object store does; and none of it stays mounted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from jobs import Jobs

from cloudtrain.engine import NodeError, fuse
from cloudtrain.provider_api.launch_spec import Mount, NodeSpec, Rules, Simulation

TWO = "/gcs/bucket"


@pytest.fixture(scope="module")
def usable() -> None:
    if why := fuse.why_not():
        pytest.skip(why)


class Seen:
    """The folders ``a`` (writable, and to read alone) and ``b`` (one file of it) as two nodes see them."""

    def __init__(self, folder: Path) -> None:
        self.real, self.one = folder / "a", folder / "b" / "one.txt"
        for path in (self.real, self.one.parent):
            path.mkdir()
        self.one.write_text("1")
        (self.one.parent / "beside.txt").write_text("2")
        mounts = [
            Mount(url=self.real.as_uri(), path=f"{TWO}/a", kind="sync"),
            Mount(url=self.one.as_uri(), path=f"{TWO}/b/one.txt", kind="mount"),
            Mount(url=self.real.as_uri(), path="/gcsother", kind="sync"),
            Mount(url=self.real.as_uri(), path=f"{TWO}/read", kind="mount"),
        ]
        node = NodeSpec(command=["x"], mounts=mounts)
        local = {self.real.as_uri(): self.real, self.one.as_uri(): self.one}
        self.temporary, store = folder / "it s", folder / "link"
        for path in (self.temporary, folder / "store"):
            path.mkdir()
        store.symlink_to(folder / "store")
        self.mounted = fuse.MountedFolders(store)
        simulation = Simulation(nodes=[node, node], rules=Rules(time_limit=1, objects="/gcs"))
        with mock.patch.object(tempfile, "tempdir", str(self.temporary)):
            wired, local = self.mounted.wired(simulation, local, "/gcs")
        self.nodes = [[local[mount.url] for mount in spec.mounts] for spec in wired.nodes]
        self.node, self.peer = self.nodes[0][0], self.nodes[1][0]


def mounts(folder: Path) -> list[str]:
    return [place for place, _ in fuse._mounts() if place.startswith(f"{folder}/")]


@pytest.fixture(scope="module")
def made(usable: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("seen")
    made = Seen(folder)
    yield made
    made.mounted.finish()
    assert not mounts(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "it s", "link", "store"]
    assert not [*made.temporary.iterdir(), *(folder / "store").iterdir()]


@pytest.fixture
def seen(made: Seen) -> Seen:
    """With nothing in it."""
    shutil.rmtree(made.real)
    made.real.mkdir()
    return made


def test_an_object_is_there_once_it_is_closed_and_whole(seen: Seen) -> None:
    assert seen.nodes[0][1].read_text() == seen.nodes[1][1].read_text() == "1"
    assert seen.nodes[0][2] == seen.real, "what is beside it is a folder as ever"
    with open(seen.node / "object", "w") as stream:
        stream.write("new")
        stream.flush()
        assert not (seen.peer / "object").exists()
        assert not list(seen.peer.iterdir())
        assert [path.name for path in seen.node.iterdir()] == ["object"]
    assert (seen.peer / "object").read_text() == (seen.real / "object").read_text() == "new"
    with open(seen.peer / "object") as reading:
        with open(seen.node / "object", "w") as stream:
            stream.write("newer")
            stream.flush()
            assert (seen.peer / "object").read_text() == "new"
        assert reading.read() == "new", "the one that it has opened"
    assert (seen.peer / "object").read_text() == "newer"
    large = os.urandom(3 << 20)
    (seen.node / "large").write_bytes(large)
    assert (seen.real / "large").read_bytes() == large


def test_what_is_for_reading_alone_cannot_be_changed(seen: Seen) -> None:
    """Not through the mount itself either; and of one file's folder there is that file."""
    (seen.real / "x").write_text("x")
    read, one = seen.nodes[0][3], seen.nodes[0][1]
    assert (read / "x").read_text() == "x"
    assert [path.name for path in read.iterdir()] == ["x"]
    assert [path.name for path in one.parent.iterdir()] == ["one.txt"]
    assert not (one.parent / "beside.txt").exists()
    changes: list[Callable[[], Any]] = [
        lambda: (read / "x").write_text("y"),
        lambda: (read / "new").write_text("y"),
        lambda: os.open(read / "x", os.O_WRONLY | os.O_APPEND),
        lambda: os.open(read / "x", os.O_RDWR),
        lambda: os.truncate(read / "x", 0),
        lambda: (read / "x").unlink(),
        lambda: (read / "x").rename(read / "y"),
        lambda: (read / "x").chmod(0o600),
        lambda: os.utime(read / "x", (0, 0)),
        lambda: (read / "folder").mkdir(),
        lambda: (read / "link").symlink_to("x"),
        lambda: one.write_text("y"),
        lambda: one.unlink(),
    ]
    for change in changes:
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    assert ((seen.real / "x").read_text(), seen.one.read_text()) == ("x", "1")


def test_it_is_mounted_outside_the_store_where_only_its_user_gets_to(seen: Seen) -> None:
    (place,) = mounts(seen.temporary)
    assert Path(place).parent.stat().st_mode & 0o777 == 0o700
    assert not mounts(seen.mounted._folder.resolve())


def test_nothing_is_appended_to_an_object(seen: Seen) -> None:
    with open(seen.node / "log", "a") as stream:  # there is none yet
        stream.write("1\n")
    with pytest.raises(OSError, match="not supported") as caught:
        open(seen.node / "log", "a")  # noqa: SIM115
    assert caught.value.errno == errno.EOPNOTSUPP
    with open(seen.node / "log", "r+") as stream:  # written anew, whole
        stream.write("2")
    assert (seen.real / "log").read_text() == "2\n"


def test_an_object_is_cut_by_its_name_and_while_it_is_open(seen: Seen) -> None:
    (seen.node / "x").write_text("long")
    os.truncate(seen.node / "x", 3)
    assert (seen.real / "x").read_text() == "lon"
    with open(seen.node / "x", "r+b") as stream:
        stream.truncate(2)
        assert (seen.real / "x").read_text() == "lon", "it is not closed yet"
    assert (seen.real / "x").read_text() == "lo"
    with open(seen.node / "new", "wb") as stream:  # as what allocates a file before it fills it
        stream.truncate(3)
    assert (seen.real / "new").read_bytes() == bytes(3)


def test_a_rename_is_a_copy_and_a_removal(seen: Seen) -> None:
    (seen.node / "old").write_text("x")
    number = (seen.real / "old").stat().st_ino
    (seen.node / "new").write_text("there before")
    (seen.node / "old").rename(seen.node / "new")
    assert [path.name for path in seen.real.iterdir()] == ["new"]
    assert (seen.real / "new").read_text() == "x"
    assert (seen.real / "new").stat().st_ino != number
    (seen.node / "folder").mkdir()
    (seen.node / "folder").rename(seen.node / "moved")
    (seen.node / "moved" / "object").write_text("x")
    with pytest.raises(OSError, match="not supported"):
        (seen.node / "moved").rename(seen.node / "again")
    with pytest.raises(OSError, match="not supported"):
        os.link(seen.node / "new", seen.node / "second")
    with pytest.raises(OSError, match="not empty"):
        (seen.node / "moved").rmdir()


def test_what_is_open_may_be_renamed_and_removed(seen: Seen) -> None:
    with open(seen.node / "a.part", "w") as stream:
        stream.write("1")
        stream.flush()
        (seen.node / "a.part").rename(seen.node / "a")
        stream.write("2")
    assert (seen.real / "a").read_text() == "12"
    with open(seen.node / "b", "w") as stream:
        stream.write("1")
        stream.flush()
        (seen.node / "b").unlink()
    assert [path.name for path in seen.real.iterdir()] == ["a"]
    os.utime(seen.node / "a", ns=(10**18, 10**18))
    assert (seen.peer / "a").stat().st_mtime_ns == 10**18
    os.chmod(seen.node / "a", 0o600)
    assert (seen.node / "a").stat().st_mode & 0o777 == 0o777


def test_a_full_disk_is_told_at_the_close_and_what_was_there_stays(usable: None, tmp_path: Path) -> None:
    """The store on another disk than the supervisor's folder."""
    if os.geteuid():
        pytest.skip("only root may mount")
    (tmp_path / "a").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "a"], check=True)
    objects = fuse.Objects([{"0": (str(tmp_path / "a"), True)}], tmp_path)
    try:
        for text, fits in ((b"old", True), (bytes(2 << 20), False)):
            handle = objects.create("/0/0/x", 0o644)
            objects.write("/0/0/x", text, 0, handle)
            if fits:
                objects.flush("/0/0/x", handle)
            else:
                with pytest.raises(OSError, match="No space left"):
                    objects.flush("/0/0/x", handle)
            objects.release("/0/0/x", handle)
        with pytest.raises(OSError, match="No space left"):
            objects.truncate("/0/0/x", 2 << 20)
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]
        assert (tmp_path / "a" / "x").read_bytes() == b"old"
    finally:
        subprocess.run(["umount", tmp_path / "a"], check=True)


def test_nothing_stays_mounted_when_its_supervisor_is_killed(usable: None, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import test_fuse;"
        "seen = test_fuse.Seen(Path(sys.argv[1])); print(seen.mounted._process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, tmp_path, str(Path(__file__).parent)]
    for killed in ("supervisor", "both"):
        folder = tmp_path / killed
        folder.mkdir()
        command[3] = folder
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            server = int(process.stdout.readline())
            assert len(mounts(folder)) == 1
            if killed == "both":
                os.kill(server, signal.SIGKILL)
            process.kill()
        if killed == "both":
            fuse.clear_mounts()  # as the next start does
            assert not mounts(folder)
        Jobs.wait_for(lambda folder=folder: not list((folder / "it s").iterdir()), 20)
        assert not mounts(folder)


def test_mounts_of_a_run_are_found_whatever_links_lead_to_it(usable: None, tmp_path: Path) -> None:
    made = Seen(tmp_path)
    assert len(mounts(tmp_path)) == 1
    fuse.clear_mounts(tmp_path)
    assert len(mounts(tmp_path)) == 1, "another's"
    fuse.clear_mounts(tmp_path / "store")
    assert not mounts(tmp_path)
    made.mounted.finish()


def test_a_root_that_holds_the_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system would wait for itself, for good."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fuse.MountedFolders, "_mount", lambda *args: pytest.fail("it is mounted"))
    node = NodeSpec(command=["x"], mounts=[Mount(url="gs://bucket", path=TWO, kind="mount")])
    simulation = Simulation(nodes=[node], rules=Rules(time_limit=1, objects="/gcs"))
    (tmp_path / "folder").mkdir()
    mounted = fuse.MountedFolders(tmp_path / "folder")
    with pytest.raises(NodeError, match="holds the temporary files too: set TMPDIR"):
        mounted.wired(simulation, {"gs://bucket": tmp_path}, "/gcs")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"], "nothing is left"


@pytest.mark.docker
@pytest.mark.parametrize("user", ["0:0", "4242:4242"])
def test_any_user_of_any_image_works_in_it(seen: Seen, engine: Any, images: Callable[[str], str], user: str) -> None:
    """The mount is of this machine: nothing is installed in the image, and its containers need no rights."""
    code = (
        "import os; from pathlib import Path; at = Path('/gcs/a')\n"
        "(at / 'x').write_text('1'); os.chmod(at / 'x', 0o600)\n"
        "(at / 'x').rename(at / 'y')\n"
        "try: open(at / 'y', 'a')\n"
        "except OSError as exc: print(exc.errno)"
    )
    words = ["docker", "run", "--rm", "--network", "none", "--user", user, "--volume", f"{seen.node}:/gcs/a"]
    done = subprocess.run([*words, images("py313"), "python3", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{errno.EOPNOTSUPP}\n"), done.stderr
    assert (seen.real / "y").read_text() == "1"


@pytest.mark.parametrize(
    ("environ", "words"),
    [({"CLOUDTRAIN_FUSE": "off"}, "is off"), ({"DOCKER_HOST": "tcp://10.0.0.1:2376"}, "not on this machine")],
)
def test_why_it_cannot_be(usable: None, environ: dict[str, str], words: str) -> None:
    assert words in fuse.why_not(environ)
    assert fuse.why_not({"DOCKER_HOST": "unix:///x"}) == ""
