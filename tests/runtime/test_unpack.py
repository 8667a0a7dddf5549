"""Unpacking: an archive of `Bundle.write_archive` arrives complete; any other leaves nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiles import examples

from cloudtrain.errors import DigestError, StorageError
from cloudtrain.job.bundle import MANIFEST, Bundle, build_bundle
from cloudtrain.job.job import Source
from cloudtrain.runtime import unpack as module
from cloudtrain.runtime.unpack import unpack

Row = dict[str, Any]


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def row(path: str, content: bytes = b"abc", **changes: Any) -> Row:
    return {"path": path, "mode": "0644", "size": len(content), "sha256": sha(content), **changes}


def link_row(path: str, target: str) -> Row:
    return row(path, b"", sha256=sha(target.encode()), link=target)


def member(name: str, content: bytes = b"abc", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def link_member(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, b"", type=kind, linkname=target)


class Forged:
    """An archive of arbitrary rows and members with a correct digest."""

    def __init__(self, rows: Any, *members: tuple[tarfile.TarInfo, bytes], manifest: str = MANIFEST) -> None:
        data = json.dumps(rows).encode()
        self.digest = sha(data)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for info, content in (member(manifest, data), *members):
                tar.addfile(info, io.BytesIO(content))
        self.tar = buffer.getvalue()
        self.bytes = gzip.compress(self.tar, mtime=0)


def refuse(tmp_path: Path, packed: bytes, digest: str, kind: type[StorageError] = DigestError) -> str:
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "out").mkdir(exist_ok=True)
    archive = tmp_path / "in/code.tar.gz"
    archive.write_bytes(packed)
    with pytest.raises(kind) as caught:
        unpack(archive, tmp_path / "out/code", digest=digest)
    assert type(caught.value) is kind
    assert list((tmp_path / "out").iterdir()) == []
    assert "\n" not in str(caught.value)
    assert str(archive) in str(caught.value)
    return str(caught.value)


def bundle(root: Path) -> Bundle:
    return build_bundle(Source(path=str(root)), cwd=root, git=False)


def packed(folder: Path) -> tuple[Path, Bundle]:
    made = bundle(folder)
    archive = folder.parent / "code.tar.gz"
    with open(archive, "wb") as file:
        made.write_archive(file)
    return archive, made


# ---------------------------------------------------------------------------------------------------------- round trip

NAME = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="/\0\\:"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..", MANIFEST)
)
TREE = st.dictionaries(st.lists(NAME, min_size=1, max_size=3).map("/".join), st.binary(max_size=40), max_size=6)


@given(tree=TREE)
@example(
    tree={
        "a b": b"1",
        "line\nbreak/ü/\u202e": b"2",
        "\udbff".encode("utf-8", "replace").decode(): b"",
        "x" * 120 + "/y": b"3",
    }
)
@settings(max_examples=examples(60), deadline=None)
def test_any_names_and_contents_arrive(tree: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "in")
        root.mkdir()
        for name, content in tree.items():
            try:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
            except OSError:
                continue
        archive, made = packed(root)
        target = Path(folder, "out/code")
        unpack(archive, target, digest=made.digest)
        assert bundle(target).manifest() == made.manifest()
        assert os.listdir(target.parent) == ["code"]


def test_modes_links_and_folders_arrive_whatever_the_umask(tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/run.sh").write_text("x")
    (root / "a/b/run.sh").chmod(0o750)
    (root / "a/up").symlink_to("../a/b")
    (root / "top").symlink_to("a/up/run.sh")
    (root / "dangling").symlink_to("a/none")
    archive, made = packed(root)
    old = os.umask(0o077)
    try:
        unpack(archive, tmp_path / "out", digest=made.digest)
    finally:
        os.umask(old)
    out = tmp_path / "out"
    assert (out / "top").read_text() == "x"
    assert os.readlink(out / "dangling") == "a/none"
    assert [oct((out / name).stat().st_mode & 0o777) for name in ("", "a", "a/b", "a/b/run.sh")] == ["0o755"] * 4
    assert bundle(out).digest == made.digest


def test_a_python_without_packages_unpacks(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.py").write_text("x")
    archive, made = packed(tmp_path / "in")
    code = (
        "import sys; from pathlib import Path; from cloudtrain.runtime.unpack import unpack\n"
        "del sys.modules['tarfile'].data_filter\n"
        "unpack(Path(sys.argv[1]), Path(sys.argv[2]), digest=sys.argv[3])"
    )
    top = Path(module.__file__).parents[2]
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(top)!r})\n{code}"]
    subprocess.run([*command, str(archive), str(tmp_path / "out"), made.digest], check=True)
    assert (tmp_path / "out/x.py").read_text() == "x"


# ------------------------------------------------------------------------------------------------------------- attacks

GOOD = Forged([row("a"), link_row("l", "a")], member("a"), link_member("l", "a"))


def test_the_forger_itself_makes_good_archives(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOOD.bytes)
    unpack(tmp_path / "x", tmp_path / "out", digest=GOOD.digest)
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "l"]


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (Forged([row("a")], member("a"), member("a")), "'a' twice"),
        (Forged([row("a")], member("a"), member("b")), "'b' but its manifest does not list it"),
        (Forged([row("a")], member("a"), member("../b")), "does not list it"),
        (Forged([row("a")], member("a"), member("/b")), "does not list it"),
        (Forged([row("a"), row("b")], member("a")), "lacks 'b'"),
        (Forged([row("a")], member("a", b"abd")), "other content"),
        (Forged([row("a")], member("a", b"abcd")), "another type, size"),
        (Forged([row("a")], member("a", b"ab")), "another type, size"),
        (Forged([row("a")], member("a", mode=0o755)), "mode"),
        (Forged([row("a")], member("a", mode=0o4644)), "mode"),
        (Forged([row("a", b"")], link_member("a", "/etc/passwd")), "another type"),
        (Forged([row("a", b"")], link_member("a", "b", tarfile.LNKTYPE)), "another type"),
        (Forged([row("a", b"")], member("a", b"", type=tarfile.CHRTYPE)), "another type"),
        (Forged([row("a", b"")], member("a", b"", type=tarfile.FIFOTYPE)), "another type"),
        (Forged([row("a", b"")], member("a", b"", type=tarfile.DIRTYPE)), "another type"),
        (Forged([row("a", b"\0" * 512)], member("a", b"\0" * 512, type=tarfile.GNUTYPE_SPARSE)), ""),
        (Forged([link_row("l", "a")], link_member("l", "/etc")), "target"),
        (Forged([link_row("l", "a")], link_member("l", "a", tarfile.LNKTYPE)), "another type"),
        (Forged([{**link_row("l", "a"), "sha256": sha(b"b")}], link_member("l", "a")), "other content"),
        (Forged([row("a")], member("a"), manifest="other"), "does not start with"),
    ],
)
def test_archives_that_are_not_what_their_manifest_says(tmp_path: Path, forged: Forged, why: str) -> None:
    assert why in refuse(tmp_path, forged.bytes, forged.digest)


def test_another_digest_is_named(tmp_path: Path) -> None:
    text = refuse(tmp_path, GOOD.bytes, "0" * 64)
    assert GOOD.digest in text
    assert "0" * 64 in text


@pytest.mark.parametrize(
    "junk",
    [b"", b"junk", b"PK\3\4" * 300, gzip.compress(b""), gzip.compress(b"x" * 2000)],
    ids=["nothing", "text", "zip", "empty gzip", "gzip"],  # as bytes they hold the time, and two workers disagree
)
def test_what_is_no_archive(tmp_path: Path, junk: bytes) -> None:
    refuse(tmp_path, junk, GOOD.digest)


@pytest.mark.parametrize("end", [5, 20, 100, -200, -9, -8, -4, -1])
def test_a_cut_archive(tmp_path: Path, end: int) -> None:
    refuse(tmp_path, GOOD.bytes[:end], GOOD.digest)


@given(at=st.integers(0, len(GOOD.tar) - 1), bit=st.integers(0, 7))
@settings(max_examples=examples(150), deadline=None)
def test_a_flipped_bit_is_refused_or_harmless(at: int, bit: int) -> None:
    flipped = bytearray(GOOD.tar)
    flipped[at] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        archive, target = Path(folder, "x"), Path(folder, "out")
        archive.write_bytes(gzip.compress(bytes(flipped), 1))
        try:
            unpack(archive, target, digest=GOOD.digest)
        except DigestError:
            assert os.listdir(folder) == ["x"]
        else:  # a bit of an owner, date or padding
            assert (target / "a").read_bytes() == b"abc"
            assert os.readlink(target / "l") == "a"


@given(at=st.integers(0, len(GOOD.bytes) - 1), bit=st.integers(0, 7))
@settings(max_examples=examples(100), deadline=None)
def test_a_bit_flipped_in_transit_is_refused_or_harmless(at: int, bit: int) -> None:
    flipped = bytearray(GOOD.bytes)
    flipped[at] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        archive, target = Path(folder, "x"), Path(folder, "out")
        archive.write_bytes(flipped)
        try:
            unpack(archive, target, digest=GOOD.digest)
        except DigestError:
            assert os.listdir(folder) == ["x"]
        else:
            assert (target / "a").read_bytes() == b"abc"


# ---------------------------------------------------------------------------------------------------------------- disk


def test_an_archive_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as caught:
        unpack(tmp_path / "none", tmp_path / "out", digest="0" * 64)
    assert type(caught.value) is StorageError
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_taken_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOOD.bytes)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(StorageError, match="not empty"):
        unpack(tmp_path / "x", tmp_path / "out", digest=GOOD.digest)
    assert sorted(os.listdir(tmp_path)) == ["out", "x"]
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_a_target_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOOD.bytes)
    (tmp_path / "file").touch()
    for target in (tmp_path / "file/out", Path("/proc/none/out")):
        with pytest.raises(StorageError, match="cannot unpack") as caught:
            unpack(tmp_path / "x", target, digest=GOOD.digest)
        assert type(caught.value) is StorageError
        assert str(target) in str(caught.value)


def test_a_full_disk(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    content = b"x" * 2**20
    forged = Forged([row("a", content)], member("a", content))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        text = refuse(tmp_path, forged.bytes, forged.digest, StorageError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert "File too large" in text
