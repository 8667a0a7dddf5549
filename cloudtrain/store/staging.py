"""Put data into a store once, for the many runs that read it: ``cloudtrain stage URL``.

The data gets a content address, as a local input of a run does: equal content has one address, whatever its source.
Remote data is copied to ``data/<address of its listing>`` first, because its digest is known only at the end. From
there the store copies it to its own address. ``data/sources/<address of its listing>.json`` then leads to the digest,
so that the same source is not read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError, StorageError
from ..settings.settings import Settings
from ..storage.digest_cache import TreeFile, tree_digest
from ..storage.files import Entry, Progress, parallel
from ..storage.lease import FOLDER
from ..storage.local_disk import local_path, normalize
from ..validate import check_listable, file_of_url, url_scheme, without_secrets
from .copies import Copy, OverwrittenError, RemoteInput, list_source, version_of
from .store import RELAYED, SOURCES, Store, existing_path, in_store, manifest_key, to_json

FIELD = "url"
TRIES = 3
"""Tries, if another client that stages the same data removes the first copy meanwhile."""


@dataclass(frozen=True, kw_only=True)
class StagedInput:
    """Data in a store: ``url`` is for ``--input``, ``source`` its origin. ``copied`` are the bytes that moved now."""

    url: str
    source: str
    store: str
    digest: str
    files: int
    bytes: int
    copied: int


def stage_at(
    url: str,
    *,
    settings: Settings,
    cwd: Path,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> StagedInput:
    """Run `stage_input` for the store of ``settings``, opened with them."""
    found = normalize(settings.resolved(), cwd=cwd)
    opened, _ = in_store(found, settings, lambda store: (store, store.files.names(FOLDER)))
    return stage_input(opened, url, cwd=cwd, progress=progress, say=say)


def stage_input(
    store: Store,
    url: str,
    *,
    cwd: Path,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> StagedInput:
    """Put the file or folder at ``url`` (a path, or a URL) into the store unless it is there.

    Any number of clients may do so at once, and a client that is killed is continued by the next. Raises `SpecError`
    for a source without files or one that cannot be listed, `StorageError` if it changes meanwhile, and `AuthError`.
    """
    path = local_path(normalize(url, cwd=cwd)) if url else None
    if not url:
        raise SpecError("is empty", field=FIELD, hint="give the URL or the path of a file or folder")
    if path is not None:
        path = existing_path(path, FIELD)
        tree = store.local_tree(path, FIELD)
        with _announced(store, say, tree.digest):
            copied = store.stage_tree(tree, progress)
        if tree.known is not None:
            tree.known.keep()
        return _staged(store, str(path), tree.digest, tree.files, path.name if path.is_file() else None, copied)
    if url_scheme(url) not in RELAYED:
        why = f"{without_secrets(url)}: cloudtrain cannot copy from this scheme"
        raise SpecError(why, field=FIELD, hint="download the data, and give the path of the file or folder")
    check_listable(url, FIELD)
    file = file_of_url(url)
    source = RemoteInput(url, file, name="data", field=FIELD)
    for number in range(TRIES):
        try:
            digest, listed, copied = _stage_remote(store, source, progress, say)
            return _staged(store, source.shown, digest, listed, file, copied)
        except (FileNotFoundError, OverwrittenError):
            if number + 1 == TRIES:
                why = f"other clients keep removing the copy of {source.shown}"
                raise StorageError(why, hint="run the same command again") from None
    raise AssertionError


def _stage_remote(
    store: Store, source: RemoteInput, progress: Progress | None, say: Callable[[str], None] | None
) -> tuple[str, Sequence[TreeFile], int]:
    """Return the digest of the source's content, its files, and the bytes that moved. Raises FileNotFoundError or
    `OverwrittenError` if another client has removed the first copy."""
    found = list_source(source)
    address = _address(source.shown, found)
    record = f"{SOURCES}/{address}.json"
    with _announced(store, say, address):
        known = (store.record(record) or {}).get("digest")
        if isinstance(known, str):
            with _announced(store, say, known):
                if (listed := _complete(store, known)) is not None:
                    store.files.write(record, _source_record(source, known))  # young again: its run comes later
                    _clear(store, address)
                    return known, listed, 0
        first, journal = f"data/{address}", manifest_key(address)
        copy = Copy(store, first, source, found, journal=journal, progress=progress, say=say)
        copied = copy.run()
        files = [
            TreeFile(path=path, size=entry.size, sha256=copy.digests[path]) for path, entry in sorted(found.items())
        ]
        digest = tree_digest(files)
        with _announced(store, say, digest):
            if _complete(store, digest) is None:
                _place(store, first, f"data/{digest}", files)
                store.write_manifest(digest, files)
            store.files.write(record, _source_record(source, digest))
        _clear(store, address)
        return digest, files, copied


def _clear(store: Store, address: str) -> None:
    """Remove the first copy; a client that is still writing it finds the content."""
    store.files.discard([manifest_key(address)])
    store.files.discard([*store.files.list(f"data/{address}")])
    store.files.prune(f"data/{address}")


def _source_record(source: RemoteInput, digest: str) -> bytes:
    return to_json({"protocol": 1, "source": source.shown, "digest": digest})


def _address(shown: str, found: Mapping[str, Entry]) -> str:
    """Return an address of these versions of the files; of a new one each time if the server has no versions."""
    listing = [[path, entry.size, version_of(entry)] for path, entry in sorted(found.items())]
    token = "" if all(entry.version for entry in found.values()) else secrets.token_hex(16)
    return hashlib.sha256(f"staged from {shown} {json.dumps(listing)}{token}".encode()).hexdigest()


def _complete(store: Store, digest: str) -> list[TreeFile] | None:
    """Return the files of the tree with this digest if it is complete in the store, each with its size; else None."""
    listed = (store.record(manifest_key(digest)) or {}).get("files")
    if not isinstance(listed, dict):
        return None
    files = [TreeFile(path=path, size=item["size"], sha256=item["sha256"]) for path, item in listed.items()]
    there = store.files.list(f"data/{digest}")
    return files if all(there.get(f"data/{digest}/{item.path}") == item.size for item in files) else None


def _place(store: Store, first: str, folder: str, files: Sequence[TreeFile]) -> None:
    """Copy the files that ``folder`` lacks within the store, without this machine where the store can do that."""
    there = store.files.list(folder)

    lacking = [item for item in files if there.get(f"{folder}/{item.path}") != item.size]
    copy = store.files.copy
    parallel(lambda item: copy(f"{first}/{item.path}", f"{folder}/{item.path}"), lacking, jobs=store.moving.concurrency)


@contextlib.contextmanager
def _announced(store: Store, say: Callable[[str], None] | None, digest: str) -> Iterator[None]:
    """Keep `gc` from removing what is at this address within the block."""
    name = f"stage-{digest[:12]}"
    store.announce(name, [digest], say=say)
    try:
        yield
    finally:
        store.withdraw(name)


def _staged(
    store: Store, source: str, digest: str, files: Sequence[TreeFile], file: str | None, copied: int
) -> StagedInput:
    # A URL names a file only by a suffix; another file is the one file of its folder.
    url = store.data_url(digest, file if file is not None and file_of_url(f"s3://b/{file}") else None)
    size = sum(item.size for item in files)
    return StagedInput(
        url=url, source=source, store=store.url, digest=digest, files=len(files), bytes=size, copied=copied
    )
