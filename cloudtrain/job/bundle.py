"""Bundle the files of a code tree that ship: a manifest with a digest, and a deterministic archive.

The tree is git's view of it (tracked, modified, and untracked but not ignored), less the exclusions of
``.cloudtrainignore`` and ``source.exclude`` (`shipped_files`). Only `Bundle.write_archive` makes an archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from ..errors import SpecError, StorageError
from .entry_point import near, resolve
from .ignore import Rules
from .job import Source
from .shipped_files import IGNORE, ShippedFile, Walk, relative_below, tree_errors

MANIFEST = ".cloudtrain-manifest.json"
"""Name of the archive's first member; no file of the tree may have it."""
MAX_BYTES = 50 * 2**20
"""Default limit of a bundle, in bytes before compression."""

_CHUNK = 2**20
_SAMPLE = 16 * 2**10
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_SECRET_NAME = re.compile(
    r"(?:.*/)?(?:\.env(?:\.(?!(?:example|sample|template)$)[^/]*)?|id_(?:rsa|dsa|ecdsa|ed25519)|[._]netrc|\.boto"
    r"|\.aws/credentials|azureauth\.json|kubeconfig|\.kube/config"
    r"|\.azure/(?:accessTokens\.json|(?:msal_token_cache|service_principal_entries)\.[^/]*))",
    re.DOTALL,
)
_SECRET_CONTENT: dict[str, tuple[int, re.Pattern[bytes]]] = {  # by suffix: largest size in bytes, pattern of a secret
    ".pem": (2**20, re.compile(rb"PRIVATE KEY")),
    ".key": (2**20, re.compile(rb"PRIVATE KEY")),
    ".npmrc": (2**16, re.compile(rb"_auth|_password")),
    ".pypirc": (2**16, re.compile(rb"(?m)^\s*password\s*[=:]")),
    ".json": (
        2**16,
        re.compile(
            rb'(?s)(?=.*"type"\s*:\s*"(?:service_account|authorized_user)").*"(?:private_key|refresh_token)"\s*:'
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class File:
    """One file or symbolic link of a bundle.

    ``path`` is posix and relative to the root, ``size`` in bytes (0 for a link), ``mode`` 0o644 or 0o755. ``sha256`` is
    hex of the content (for a link, of the target's text). ``link`` is the relative target of a symbolic link.
    """

    path: str
    size: int
    mode: int
    sha256: str
    link: str | None = None


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A file, or with a trailing ``/`` a whole folder, that does not ship, and the ``rule`` that excludes it.

    ``rule`` is ``.gitignore:3:*.log`` (file, line, pattern), ``source.exclude[0]:*.bin`` or ``built-in: …``.
    """

    path: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The files that ship. ``files`` and ``excluded`` are sorted by path; ``digest`` is the hex SHA-256 of `manifest`.

    ``entry_point`` is relative to ``root``, posix, or ``-m pkg.mod``. ``git`` is ``{commit, branch, dirty}`` of the
    source, None outside git. Its commit is None before the first one, its branch None when detached; dirty means that
    files differ from the commit. ``parts`` are the folders on disk by the prefix under which they ship.
    """

    root: Path
    entry_point: str
    files: tuple[File, ...]
    excluded: tuple[Excluded, ...] = ()
    git: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    parts: tuple[tuple[str, Path], ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """The size of all files in bytes, before compression."""
        return sum(file.size for file in self.files)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.manifest()).hexdigest()

    def manifest(self) -> bytes:
        """Return canonical JSON: a list of ``{path, mode, size, sha256}`` (and ``link``) in order of path."""
        rows: list[dict[str, Any]] = []
        for file in self.files:
            row = {"mode": f"{file.mode:04o}", "path": file.path, "sha256": file.sha256, "size": file.size}
            rows.append(row if file.link is None else {"link": file.link, **row})
        return json.dumps(rows, separators=(",", ":"), sort_keys=True).encode() + b"\n"

    def archive(self) -> bytes:
        """Return the bytes that `write_archive` writes."""
        buffer = io.BytesIO()
        self.write_archive(buffer)
        return buffer.getvalue()

    def write_archive(self, fileobj: IO[bytes]) -> None:
        """Write the tar.gz: `MANIFEST`, then the files in order, without dates, owners or names of this machine.

        Raises `StorageError` if a file has changed since the bundle was built.
        """
        import tarfile

        manifest = self.manifest()
        with (
            _Packed(fileobj) as packed,
            tarfile.open(fileobj=cast("IO[bytes]", packed), mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            member = tarfile.TarInfo(MANIFEST)
            member.size = len(manifest)
            tar.addfile(member, io.BytesIO(manifest))
            for file in self.files:
                member = tarfile.TarInfo(file.path)
                member.mode = file.mode
                if file.link is not None:
                    member.type, member.linkname = tarfile.SYMTYPE, file.link
                    tar.addfile(member)
                else:
                    member.size = file.size
                    with _Verified(file, self.disk(file.path)) as content:
                        tar.addfile(member, content)  # type: ignore[arg-type]

    def disk(self, path: str) -> Path:
        """Return where the file that ships as ``path`` is on this machine."""
        prefix, folder = _part_of(path, self.parts)
        return Path(folder, path[len(prefix) :])


def _part_of(path: str, parts: Sequence[tuple[str, Path]]) -> tuple[str, Path]:
    """Return the prefix and the folder on disk of the part in which ``path`` ships."""
    return max((part for part in parts if path.startswith(part[0])), key=lambda part: len(part[0]))


class _Packed:
    """A gzip file of several members (RFC 1952), one for each block written.

    A block whose samples hardly shrink (weights, images, archives) is stored: compressing costs more than sending.
    """

    def __init__(self, fileobj: IO[bytes]) -> None:
        self._file, self._block = fileobj, bytearray()

    def __enter__(self) -> _Packed:
        return self

    def write(self, data: bytes) -> int:
        self._block += data
        while len(self._block) >= _CHUNK:
            self._pack(bytes(self._block[:_CHUNK]))
            del self._block[:_CHUNK]
        return len(data)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._pack(bytes(self._block))

    def _pack(self, block: bytes) -> None:
        import gzip
        import zlib

        samples = [block[at : at + _SAMPLE] for at in range(0, len(block), max(1, len(block) // 4))]
        shrinks = any(len(zlib.compress(sample, 1)) < 0.9 * len(sample) for sample in samples)
        self._file.write(gzip.compress(block, 6 if shrinks else 0, mtime=0))


class _Verified:
    """The content of ``file`` as tarfile reads it. Raises `StorageError` if it changed since the bundle was built."""

    def __init__(self, file: File, disk: Path) -> None:
        self._expected, self._hash = file, hashlib.sha256()
        with tree_errors(file.path):
            self._content = open(disk, "rb")  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> _Verified:
        return self

    def read(self, size: int) -> bytes:
        with tree_errors(self._expected.path):
            chunk = self._content.read(size)
        self._hash.update(chunk)
        if len(chunk) < size:
            self._changed()
        return chunk

    def __exit__(self, kind: object, *_: object) -> None:
        self._content.close()
        if kind is None and self._hash.hexdigest() != self._expected.sha256:
            self._changed()

    def _changed(self) -> NoReturn:
        raise StorageError(f"{self._expected.path!r} changed since the bundle was built", hint="build it again")


def changes(bundle: Bundle, archive: bytes) -> list[str]:
    """Return the differences from an earlier bundle's ``archive``: ``+ new.py``, ``- old.py``, ``~ train.py``.

    Raises ValueError if ``archive`` is not the archive of a bundle.
    """
    import tarfile

    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            manifest = tar.extractfile(MANIFEST)
            rows = json.load(manifest) if manifest is not None else []
    except (tarfile.TarError, OSError, EOFError, KeyError) as exc:
        raise ValueError(f"not the archive of a bundle: {exc}") from None
    before = {row["path"]: row for row in rows}
    now = {row["path"]: row for row in json.loads(bundle.manifest())}
    added, removed = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
    changed = sorted(path for path in now.keys() & before.keys() if now[path] != before[path])
    return [f"{mark} {path}" for mark, paths in zip("+-~", (added, removed, changed), strict=True) for path in paths]


# ------------------------------------------------------------------------------------------------------------ building


def build_bundle(
    source: Source,
    *,
    cwd: Path,
    max_bytes: int = MAX_BYTES,
    never: Sequence[Path] = (),
    outputs: Iterable[tuple[int, int]] = (),
    git: bool = True,
    inputs: Iterable[str] = (),
) -> Bundle:
    """Return the bundle of ``source`` as it is on disk now.

    ``never`` are folders that never ship (the store, pull targets). ``outputs`` are files by ``(st_dev, st_ino)`` that
    do not ship either, such as the redirected log of this command. With ``git`` False, git is not called and the ignore
    files alone decide. Raises `SpecError` for a tree that cannot ship: missing or excluded script, above ``max_bytes``
    before compression (one of ``inputs`` may be in it), secrets, links that leave it. Raises `StorageError` for a tree
    that cannot be read.
    """
    root, entry_point = resolve(source, cwd=cwd)
    exclude = {f"source.exclude[{i}]:{line}": line for i, line in enumerate(source.exclude)}
    walk = Walk(
        never=frozenset(map(os.path.realpath, never)),
        exclude=Rules().plus("", exclude),
        git=git,
        outputs=frozenset(outputs),
    )
    walk.add(str(root), "")
    parts = [("", root), *_dependencies(source, Path(cwd), root, walk)]
    entries = sorted(walk.entries)
    excluded = tuple(Excluded(path=path, rule=rule) for path, rule in sorted(walk.excluded))
    _check_ships(source, root, entry_point, entries, excluded)
    _check_links(entries, parts)
    data = (relative_below(os.path.realpath(Path(cwd, url)), str(root)) for url in inputs)
    _check_size(entries, max_bytes, list(filter(None, data)))
    _check_secrets(entries, walk.named)
    return Bundle(
        root=root,
        entry_point=entry_point,
        files=tuple(map(_file, entries)),
        excluded=excluded,
        git=walk.commit,
        warnings=tuple(walk.warnings),
        parts=tuple(parts),
    )


def _dependencies(source: Source, cwd: Path, root: Path, walk: Walk) -> Iterator[tuple[str, Path]]:
    taken = {entry.path.partition("/")[0] for entry in walk.entries}
    for i, given in enumerate(source.dependencies):
        where = f"source.dependencies[{i}]"
        path = os.path.abspath(os.path.join(os.path.realpath(cwd), given))
        folder, name = os.path.realpath(path), os.path.basename(path)
        if not os.path.isdir(folder) or not name:
            raise SpecError(f"{given!r} is not a folder", field=where, hint=near(path))
        if name in taken:
            if folder == os.path.join(root, name):
                continue
            raise SpecError(f"{name!r} is already in the code that ships", field=where, hint="rename one of the two")
        taken.add(name)
        walk.add(folder, name + "/")
        yield name + "/", Path(folder)


# -------------------------------------------------------------------------------------------------- checks and contents


def _file(entry: ShippedFile) -> File:
    if entry.link is not None:
        digest = hashlib.sha256(entry.link.encode()).hexdigest()
        return File(path=entry.path, size=0, mode=0o644, sha256=digest, link=entry.link)
    mode = 0o755 if entry.mode & stat.S_IXUSR else 0o644
    return File(path=entry.path, size=entry.size, mode=mode, sha256=_digest(entry))


def _digest(entry: ShippedFile) -> str:
    content, size = hashlib.sha256(), 0
    try:
        fd = os.open(entry.disk, _READ)
        try:
            while chunk := os.read(fd, min(_CHUNK, entry.size - size)):  # a log may grow meanwhile: not its new end
                content.update(chunk)
                size += len(chunk)
        finally:
            os.close(fd)
    except OSError as exc:
        raise StorageError(f"cannot read {entry.path!r}: {exc.strerror}") from None
    if size != entry.size:
        raise StorageError(f"{entry.path!r} changed while it was read ({entry.size} bytes, then {size})")
    return content.hexdigest()


def _check_ships(
    source: Source, root: Path, entry_point: str, entries: list[ShippedFile], excluded: Iterable[Excluded]
) -> None:
    paths = {entry.path for entry in entries}
    if MANIFEST in paths:
        raise SpecError(f"{MANIFEST} is a name that the archive needs", field="source", hint="rename the file")
    wanted = [("source.requirements", [source.requirements])] if source.requirements else []
    if source.module is not None:
        base = source.module.replace(".", "/")
        wanted.append(("source.entry_point", [f"{base}.py", f"{base}/__main__.py"]))
    elif entry_point:
        wanted.append(("source.entry_point", [entry_point]))
    for where, names in wanted:
        # a script may lie in a folder that is a link: its real place ships
        places = (*names, *(relative_below(os.path.realpath(root / name), str(root)) for name in names))
        if paths.isdisjoint(places):
            rules = [
                e.rule
                for e in excluded
                if e.path in places or (e.path.endswith("/") and any(place.startswith(e.path) for place in places))
            ]
            why = f"is excluded by {rules[0]}" if rules else "does not exist"
            hint = f"to ship it, add this line to {IGNORE}: !/{names[0]}" if rules else ""
            raise SpecError(f"{names[0]!r} does not ship: it {why}", field=where, hint=hint)


def _check_links(entries: list[ShippedFile], parts: list[tuple[str, Path]]) -> None:
    for entry in entries:
        if entry.link is None:
            continue
        prefix, folder = _part_of(entry.path, parts)
        inner = os.path.normpath(os.path.join(os.path.dirname(entry.path[len(prefix) :]), entry.link))
        real = os.path.realpath(entry.disk)
        outside = inner.split(os.sep)[0] == ".." or (real != str(folder) and not relative_below(real, str(folder)))
        if os.path.isabs(entry.link) or outside:
            raise SpecError(
                f"the link {entry.path!r} leads out of the code to {entry.link!r}",
                field="source",
                hint=f"copy the file into the code, or exclude the link in {IGNORE}",
            )


def _check_size(entries: list[ShippedFile], max_bytes: int, inputs: Iterable[str]) -> None:
    total = sum(entry.size for entry in entries)
    if total <= max_bytes:
        return
    folders: dict[str, int] = {}
    for entry in entries:
        folder = entry.path.rpartition("/")[0]
        folders[folder + "/"] = folders.get(folder + "/", 0) + entry.size
    folders.pop("/", None)
    text = f"the code is {_mib(total)}, above the limit of {_mib(max_bytes)}; largest files: "
    text += _largest({entry.path: entry.size for entry in entries}, 5)
    text += f"; largest folders: {_largest(folders, 3)}" if folders else ""
    both = (place for place in inputs if any(f"{entry.path}/".startswith(f"{place}/") for entry in entries))
    if place := next(both, ""):
        text += f"; the input {place} is among them"
    exclude = f"add this line to {IGNORE}: /{place}" if place else f"exclude files in {IGNORE}"
    raise SpecError(text, field="source", hint=f"{exclude}, or raise the setting max_code_mb")


def _largest(sizes: dict[str, int], count: int) -> str:
    return ", ".join(f"{path} ({_mib(sizes[path])})" for path in sorted(sizes, key=lambda p: -sizes[p])[:count])


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _check_secrets(entries: list[ShippedFile], named: set[str]) -> None:
    found = [entry.path for entry in entries if entry.link is None and entry.path not in named and _is_secret(entry)]
    if found:
        listed = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise SpecError(
            f"these files look like secrets: {listed}",
            field="source",
            hint=f"exclude them in {IGNORE}; to ship a file on purpose, add a line: !/{found[0]}",
        )


def _is_secret(entry: ShippedFile) -> bool:
    if _SECRET_NAME.fullmatch(entry.path):
        return True
    name = entry.path.rpartition("/")[2]
    limit, pattern = _SECRET_CONTENT.get(name[name.rfind(".") :], (0, None))
    if pattern is None or entry.size > limit:
        return False
    with tree_errors(entry.path), open(entry.disk, "rb") as file:
        return pattern.search(file.read(limit)) is not None
