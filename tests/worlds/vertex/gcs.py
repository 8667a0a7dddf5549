"""The JSON API of Cloud Storage on a folder, with generations and their preconditions.

A node has the folder of a bucket at ``/gcs/<bucket>``. As through gcsfuse, a new folder there is an object ``name/``.
Unlike there, a file appears before it is closed, and names that are not paths (``a//b``, ``a/../b``) are refused. The
emulators on PyPI ignore ``ifGenerationMatch``, so on them every exclusive creation succeeds.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .wire import Answer, Call, Refusal, Wire

__all__ = ["Gcs"]

PAGE = 1000
"""Most objects of one page of a listing."""
UNMET = "At least one of the pre-conditions you specified did not hold."
API = "/storage/v1/b"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_CHUNK = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass
class _Session:
    """A resumable upload."""

    bucket: str
    name: str
    when: Mapping[str, str]
    data: bytearray


class Gcs:
    """Buckets below ``folder``, served by ``wire``; with ``open``, to callers without a token.

    ``before`` gets the bucket and name of every upload before its precondition is checked.
    """

    def __init__(self, folder: Path, wire: Wire, *, open: bool = False) -> None:
        self.wire, self.folder = wire, folder / "buckets"
        self.before: Callable[[str, str], object] = lambda bucket, name: None
        self.places: dict[str, tuple[str, str]] = {}
        self._aside = folder / "uploads"
        self._aside.mkdir(parents=True)
        self._implied: set[Path] = set()
        self._digests: dict[Path, tuple[tuple[int, int], tuple[str, str]]] = {}
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.RLock()
        one = rf"{API}/([^/]+)/o/([^/]+)"
        for method, path, operation, handler in (
            ("GET", API, "GET buckets", self._buckets),
            ("GET", rf"{API}/([^/]+)", "GET bucket", self._bucket),
            ("GET", rf"{API}/([^/]+)/o", "GET objects", self._list),
            ("GET", rf"(?:/download)?{one}", "GET object", self._get),
            ("DELETE", one, "DELETE object", self._delete),
            ("POST", rf"{one}/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", "POST rewrite", self._rewrite),
            ("POST", rf"/upload{API}/([^/]+)/o", "POST object", self._upload),
            ("PUT", rf"/upload{API}/([^/]+)/o", "POST object", self._upload),
            ("DELETE", rf"/upload{API}/([^/]+)/o", "DELETE upload", self._give_up),
        ):
            wire.route(method, path, operation, handler, open=open)

    def make(self, bucket: str, location: str = "EUROPE-WEST4", kind: str = "region") -> Path:
        """Create an empty bucket and return its folder. ``kind`` is region, dual-region or multi-region."""
        self.places[bucket] = (location, kind)
        (self.folder / bucket).mkdir(parents=True)
        return self.folder / bucket

    def put(self, bucket: str, name: str, data: bytes, when: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Write one object if the preconditions of ``when`` hold, and return it. Raises `Refusal`."""
        path = self._path(bucket, name)
        with self._lock:
            before = self._generation(path)
            _judge(before, when or {})
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                self._implied.discard(path)
            else:
                aside = self._aside / secrets.token_hex(8)
                aside.write_bytes(data)
                moment = max(time.time_ns() // 1000, before + 1) * 1000  # always a new generation
                os.utime(aside, ns=(moment, moment))
                self._place(aside, path)
            return self._object(bucket, name)

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the names of all objects that begin with ``prefix``, in the order of a listing."""
        root, found = self.folder / bucket, []
        if ".." in prefix.split("/"):
            return []
        for at, _, files in os.walk(root / prefix.rpartition("/")[0]):
            below = Path(at).relative_to(root).as_posix()
            below = "" if below == "." else f"{below}/"
            found += [below + name for name in files]
            if below and Path(at) not in self._implied:
                found.append(below)
        return sorted({name for name in found if name.startswith(prefix)}, key=str.encode)

    def read(self, bucket: str, name: str) -> bytes:
        """Return the content of one object. Raises `Refusal`."""
        try:
            return self._path(bucket, name).read_bytes()
        except OSError:
            raise Refusal("NOT_FOUND", f"No such object: {bucket}/{name}") from None

    # ---------------------------------------------------------------------------------------------------- files on disk

    def _path(self, bucket: str, name: str) -> Path:
        if bucket not in self.places:
            raise Refusal("NOT_FOUND", "The specified bucket does not exist.")
        parts = name.removesuffix("/").split("/")
        if any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
            raise Refusal("INVALID_ARGUMENT", f"The name {name!r} is no path, and so nothing that this fake can keep.")
        return self.folder.joinpath(bucket, *parts)

    def _place(self, aside: Path, path: Path) -> None:
        """Move a file to its path. Make its folders again if a node removes one meanwhile."""
        while True:
            missing = [path.parent, *path.parent.parents]
            self._implied.update(folder for folder in missing[: missing.index(self.folder)] if not folder.exists())
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(aside, path)
            except FileNotFoundError:
                continue
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                why = f"{path.name!r} is a folder, or below a file: nothing that this fake can keep."
                raise Refusal("INVALID_ARGUMENT", why) from None
            return

    def _generation(self, path: Path) -> int:
        """Return the generation of a file; 0 if there is none."""
        with contextlib.suppress(OSError):
            return path.stat().st_mtime_ns // 1000
        return 0

    def _object(self, bucket: str, name: str) -> dict[str, Any]:
        """Return an Object resource. Raises `Refusal`."""
        path = self._path(bucket, name)
        try:
            stat = path.stat()
            if path.is_dir() != name.endswith("/") or path in self._implied:
                raise FileNotFoundError
            md5, crc32c = _digests(b"") if path.is_dir() else self._known_digests(path)
        except OSError:
            raise Refusal("NOT_FOUND", f"No such object: {bucket}/{name}") from None
        generation, moment = stat.st_mtime_ns // 1000, _iso(stat.st_mtime)
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "name": name,
            "bucket": bucket,
            "generation": str(generation),
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "size": "0" if path.is_dir() else str(stat.st_size),
            "md5Hash": md5,
            "crc32c": crc32c,
            "etag": str(generation),
            "timeCreated": moment,
            "updated": moment,
        }

    def _known_digests(self, path: Path) -> tuple[str, str]:
        stat = path.stat()
        known = self._digests.get(path)
        if known is None or known[0] != (stat.st_mtime_ns, stat.st_size):
            known = self._digests[path] = ((stat.st_mtime_ns, stat.st_size), _digests(path.read_bytes()))
        return known[1]

    # ----------------------------------------------------------------------------------------------------- reading it

    def _buckets(self, call: Call) -> Answer:
        return Answer({"kind": "storage#buckets", "items": [self._place_of(name) for name in sorted(self.places)]})

    def _place_of(self, bucket: str) -> dict[str, Any]:
        if bucket not in self.places:
            raise Refusal("NOT_FOUND", "The specified bucket does not exist.")
        location, kind = self.places[bucket]
        return {
            "kind": "storage#bucket",
            "id": bucket,
            "name": bucket,
            "location": location,
            "locationType": kind,
            "storageClass": "STANDARD",
        }

    def _bucket(self, call: Call) -> Answer:
        return Answer(self._place_of(call.words[0]))

    def _list(self, call: Call) -> Answer:
        """List one page of objects and, with a delimiter, of prefixes that hold more, in the order of their bytes."""
        (bucket,), query = call.words, call.query
        self._place_of(bucket)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        begin, end = query.get("startOffset", ""), query.get("endOffset")
        rows: dict[str, bool] = {}
        for name in self.names(bucket, prefix):
            if name >= begin and (end is None or name < end):
                rest = name[len(prefix) :]
                folded = bool(delimiter) and delimiter in rest
                rows[prefix + rest.partition(delimiter)[0] + delimiter if folded else name] = folded
        after = base64.urlsafe_b64decode(query.get("pageToken", ""))
        remaining = [item for item in sorted(rows.items(), key=lambda row: row[0].encode()) if item[0].encode() > after]
        page = remaining[: min(int(query.get("maxResults") or PAGE), PAGE)]
        answer: dict[str, Any] = {"kind": "storage#objects", "prefixes": [name for name, folded in page if folded]}
        answer["items"] = list(self._items(bucket, [name for name, folded in page if not folded]))
        if len(page) < len(remaining):
            answer["nextPageToken"] = base64.urlsafe_b64encode(page[-1][0].encode()).decode()
        return Answer({key: value for key, value in answer.items() if value})

    def _items(self, bucket: str, names: list[str]) -> Iterator[dict[str, Any]]:
        for name in names:
            with contextlib.suppress(Refusal):  # deleted since the listing
                yield self._object(bucket, name)

    def _get(self, call: Call) -> Answer:
        bucket, name = call.words
        described = self._object(bucket, name)
        generation = int(described["generation"])
        if call.query.get("generation", str(generation)) != str(generation):
            raise Refusal("NOT_FOUND", f"No such object: {bucket}/{name}#{call.query['generation']}")
        _judge(generation, call.query)
        if not call.path.startswith("/download") and call.query.get("alt") != "media":
            return Answer(described)
        data = b"" if name.endswith("/") else self.read(bucket, name)
        hashes = f"crc32c={described['crc32c']},md5={described['md5Hash']}"
        headers = {"X-Goog-Generation": str(generation), "X-Goog-Hash": hashes}
        return _ranged(data, call.headers.get("range", ""), headers)

    # ----------------------------------------------------------------------------------------------------- changing it

    def _delete(self, call: Call) -> Answer:
        bucket, name = call.words
        path = self._path(bucket, name)
        with self._lock:
            self._object(bucket, name)
            _judge(self._generation(path), call.query)
            with contextlib.suppress(FileNotFoundError):
                path.rmdir() if name.endswith("/") else path.unlink()
            for folder in path.parents:
                if folder not in self._implied or any(folder.iterdir()):
                    break
                folder.rmdir()
                self._implied.discard(folder)
        return Answer(None, 204)

    def _rewrite(self, call: Call) -> Answer:
        source, name, target, to = call.words
        made = self.put(target, to, self.read(source, name), call.query)
        size = made["size"]
        rewritten = {"kind": "storage#rewriteResponse", "done": True, "totalBytesRewritten": size, "objectSize": size}
        return Answer(made if "/copyTo/" in call.path else {**rewritten, "resource": made})

    def _upload(self, call: Call) -> Answer:
        (bucket,), query = call.words, call.query
        if "upload_id" in query:
            return self._chunk(call)
        self._place_of(bucket)
        kind, name, data = query.get("uploadType"), query.get("name", ""), call.body
        if kind == "multipart":
            metadata, data = _parts(call.headers.get("content-type", ""), call.body)
            name = str(metadata.get("name", name))
        elif kind == "resumable":
            name = str(call.json().get("name", name))
        elif kind != "media":
            raise Refusal("INVALID_ARGUMENT", f"Invalid upload type {kind!r}.")
        if not name:
            raise Refusal("INVALID_ARGUMENT", "Required object name")
        if kind == "resumable":
            number = secrets.token_hex(16)
            self._sessions[number] = _Session(bucket, name, dict(query), bytearray())
            host = call.headers.get("host", "")
            where = f"http://{host}{call.path}?uploadType=resumable&upload_id={number}"
            return Answer(None, headers={"Location": where})
        self.before(bucket, name)
        return Answer(self.put(bucket, name, data, query))

    def _chunk(self, call: Call) -> Answer:
        """Take a chunk of a resumable upload. Answer with the range so far, or with the object."""
        session = self._sessions.get(call.query["upload_id"])
        found = _CHUNK.fullmatch(call.headers.get("content-range", f"bytes 0-{len(call.body) - 1}/{len(call.body)}"))
        if session is None or found is None:
            raise Refusal("NOT_FOUND", "No such upload.")
        first, _, total = found.groups()
        if first is not None and call.body:
            if int(first) > len(session.data):
                raise Refusal("FAILED_PRECONDITION", "A part of the upload is missing.", status=503)
            del session.data[int(first) :]
            session.data += call.body
        if total != "*" and len(session.data) == int(total):
            del self._sessions[call.query["upload_id"]]
            self.before(session.bucket, session.name)
            return Answer(self.put(session.bucket, session.name, bytes(session.data), session.when))
        headers = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        return Answer(None, 308, headers)

    def _give_up(self, call: Call) -> Answer:
        self._sessions.pop(call.query.get("upload_id", ""), None)
        return Answer(None, 499)


def _judge(generation: int, when: Mapping[str, str]) -> None:
    """Raise `Refusal` unless the preconditions hold for an object of that generation (0: no object)."""
    wanted, other = when.get("ifGenerationMatch"), when.get("ifGenerationNotMatch")
    if (wanted is not None and int(wanted) != generation) or (other is not None and int(other) == generation):
        raise Refusal("FAILED_PRECONDITION", UNMET, status=412)


def _ranged(data: bytes, wanted: str, headers: Mapping[str, str]) -> Answer:
    found = _RANGE.fullmatch(wanted)
    if found is None or not any(found.groups()):
        return Answer(data, headers=headers)
    first, last = found.groups()
    begin = int(first) if first else max(0, len(data) - int(last))
    end = min(int(last) + 1 if first and last else len(data), len(data))
    if begin >= len(data):
        raise Refusal("INVALID_ARGUMENT", "The requested range cannot be satisfied.", status=416)
    return Answer(data[begin:end], 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})


def _parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return (metadata, content) of a multipart upload.

    gcsfs ends its lines with a newline alone.
    """
    mark = b"--" + content_type.partition("boundary=")[2].partition(";")[0].strip("\"' ").encode()
    end = b"\r\n" if body.startswith(mark + b"\r\n") else b"\n"
    try:
        head, rest = body[len(mark + end) :].split(end + mark + end, 1)
        content = rest[: rest.rindex(end + mark + b"--")]
        metadata = json.loads(head.split(2 * end, 1)[1])
        return dict(metadata), content.split(2 * end, 1)[1]
    except (ValueError, IndexError, TypeError):
        raise Refusal("INVALID_ARGUMENT", "Malformed multipart body.") from None


def _digests(data: bytes) -> tuple[str, str]:
    """Return (MD5, CRC32C) as an Object resource has them."""
    from google_crc32c import value

    found = (hashlib.md5(data).digest(), int(value(data)).to_bytes(4, "big"))
    return base64.b64encode(found[0]).decode(), base64.b64encode(found[1]).decode()


def _iso(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
