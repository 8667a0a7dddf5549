"""OBS on a folder, with its S3 protocol and its own. Nodes mount the folder of a bucket.

Like OBS, it ignores ``If-None-Match``, answers ``x-obs-forbid-overwrite`` with 409, and refuses a bucket in the path
below a host name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import threading
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

from signatures import Keys, check_obs, check_v4

from ..vertex.wire import Answer, Call, Refusal, Wire

__all__ = ["Obs"]

PAGE = 1000
_ADDRESS = re.compile(r"[\d.]+(:\d+)?|localhost(:\d+)?")


class ObsRefusal(Refusal):
    """An error of OBS, as XML."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code, message, status=status, headers={"Content-Type": "application/xml"})

    def body(self) -> bytes:  # type: ignore[override]
        return f"<Error><Code>{self.code}</Code><Message>{escape(self.message)}</Message></Error>".encode()


class Obs:
    """Buckets below ``folder``, served by ``wire`` to callers with ``keys``.

    Faults: ``overwrites``: buckets that ignore ``x-obs-forbid-overwrite``; ``parallel``: parallel file systems.
    """

    def __init__(self, folder: Path, wire: Wire, keys: Keys) -> None:
        self.folder, self.keys = folder / "buckets", keys
        self.overwrites: set[str] = set()
        self.parallel: set[str] = set()
        self._aside = folder / "uploads"
        self._aside.mkdir(parents=True)
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._lock = threading.Lock()
        for method in ("GET", "PUT", "HEAD", "POST", "DELETE"):
            wire.route(method, r"(?:http://[^/]+)?/.*", f"{method} object", self._serve, open=True)

    def make(self, bucket: str) -> Path:
        """Create an empty bucket that every user of this machine may write. Return its folder."""
        self._writable(self.folder / bucket)
        return self.folder / bucket

    def put(self, bucket: str, key: str, data: bytes, *, create: bool = False) -> str:
        """Write an object and return its ETag. Raises `ObsRefusal` if it exists and ``create`` forbids that."""
        path = self._path(bucket, key)
        aside = self._aside / secrets.token_hex(8)
        aside.write_bytes(data)
        aside.chmod(0o666)
        with self._lock:
            if create and path.exists() and bucket not in self.overwrites:
                raise ObsRefusal(409, "ObjectAlreadyExists", "the object exists already")
            while True:
                self._writable(path.parent)
                with contextlib.suppress(FileNotFoundError):  # a node may remove a folder at any time
                    os.replace(aside, path)
                    break
        return hashlib.md5(data).hexdigest()

    def keys_of(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys of a bucket in order."""
        root, found = self.folder / bucket, []
        for at, _, names in os.walk(root):
            below = Path(at).relative_to(root).as_posix()
            found += [name if below == "." else f"{below}/{name}" for name in names]
        return sorted(key for key in found if key.startswith(prefix))

    def _writable(self, folder: Path) -> None:
        missing = [folder, *folder.parents]
        missing = [path for path in missing[: missing.index(self._aside.parent)] if not path.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                path.chmod(0o777)

    def _path(self, bucket: str, key: str) -> Path:
        if not (self.folder / bucket).is_dir():
            raise ObsRefusal(404, "NoSuchBucket", "The specified bucket does not exist")
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise ObsRefusal(400, "InvalidRequest", "nothing that this fake can keep")
        return self.folder / bucket / key

    # ------------------------------------------------------------------------------------------------------- the wire

    def _serve(self, call: Call) -> Answer:
        call = dataclasses.replace(call, path=re.sub("^http://[^/]+", "", call.path))  # a request through a proxy
        host, path = call.headers.get("host", ""), call.path.lstrip("/")
        if _ADDRESS.fullmatch(host):
            bucket, _, quoted = path.partition("/")
        else:
            bucket, quoted = host.partition(".obs.")[0], path
        if "apiversion" in call.query:  # Huawei's client asks for the signatures that it may use
            return Answer(None, headers={"x-obs-api": "3.0"})
        own = call.headers.get("authorization", "").startswith("OBS ")
        if why := check_obs(call, self.keys, bucket, quoted) if own else check_v4(call, self.keys):
            raise ObsRefusal(403, "SignatureDoesNotMatch", why)
        key, query, method = unquote(quoted), call.query, call.method
        if not (self.folder / bucket).is_dir():
            raise ObsRefusal(404, "NoSuchBucket", "The specified bucket does not exist")
        if not key:
            return self._of_bucket(call, bucket)
        if "uploads" in query:
            number = secrets.token_hex(8)
            self._uploads[number] = {}
            return _xml("InitiateMultipartUploadResult", _tags(Bucket=bucket, Key=key, UploadId=number))
        if "uploadId" in query:
            return self._part(call, bucket, key)
        if method == "PUT":
            return self._put(call, bucket, key)
        if method == "DELETE":
            with contextlib.suppress(OSError):
                self._path(bucket, key).unlink()
            return Answer(None, 204)
        return self._get(call, bucket, key)

    def _of_bucket(self, call: Call, bucket: str) -> Answer:
        if call.method == "HEAD":
            headers = {"x-obs-fs-file-interface": "Enabled"} if bucket in self.parallel else {}
            return Answer(None, headers={"x-obs-bucket-location": "cn-north-4", **headers})
        if call.method == "POST" and "delete" in call.query:
            keys = [unescape(key) for key in re.findall(r"<Key>([^<]*)</Key>", call.body.decode())]
            for key in keys:
                with contextlib.suppress(OSError):
                    self._path(bucket, key).unlink()
            return _xml("DeleteResult", "".join(f"<Deleted>{_tags(Key=key)}</Deleted>" for key in keys))
        return self._list(call, bucket)

    def _put(self, call: Call, bucket: str, key: str) -> Answer:
        if source := call.headers.get("x-amz-copy-source") or call.headers.get("x-obs-copy-source"):
            origin, _, name = unquote(source).lstrip("/").partition("/")
            tag = self.put(bucket, key, self._read(origin, name))
            return _xml("CopyObjectResult", _tags(ETag=f'"{tag}"', LastModified=_moment(time.time())))
        create = call.headers.get("x-obs-forbid-overwrite", "").lower() == "true"
        return Answer(None, headers={"ETag": f'"{self.put(bucket, key, call.body, create=create)}"'})

    def _part(self, call: Call, bucket: str, key: str) -> Answer:
        number = call.query["uploadId"]
        if number not in self._uploads:
            raise ObsRefusal(404, "NoSuchUpload")
        if call.method == "PUT":
            self._uploads[number][int(call.query["partNumber"])] = call.body
            return Answer(None, headers={"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})
        parts = self._uploads.pop(number)
        if call.method == "DELETE":
            return Answer(None, 204)
        tag = self.put(bucket, key, b"".join(parts[part] for part in sorted(parts)))
        return _xml("CompleteMultipartUploadResult", _tags(Bucket=bucket, Key=key, ETag=f'"{tag}"'))

    def _read(self, bucket: str, key: str) -> bytes:
        try:
            return self._path(bucket, key).read_bytes()
        except (OSError, ObsRefusal):
            raise ObsRefusal(404, "NoSuchKey", "The specified key does not exist") from None

    def _get(self, call: Call, bucket: str, key: str) -> Answer:
        data = self._read(bucket, key)
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if call.headers.get("if-match", tag) != tag:
            raise ObsRefusal(412, "PreconditionFailed")
        with contextlib.suppress(OSError):
            moment = self._path(bucket, key).stat().st_mtime
            headers = {"ETag": tag, "Last-Modified": formatdate(moment, usegmt=True), "Accept-Ranges": "bytes"}
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("range", ""))
            if wanted is None:
                return Answer(data, headers=headers)
            first = int(wanted[1]) if wanted[1] else max(0, len(data) - int(wanted[2]))
            last = min(int(wanted[2]) if wanted[1] and wanted[2] else len(data) - 1, len(data) - 1)
            if first >= len(data):
                raise ObsRefusal(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return Answer(data[first : last + 1], 206, headers)
        raise ObsRefusal(404, "NoSuchKey", "The specified key does not exist")

    def _list(self, call: Call, bucket: str) -> Answer:
        query = call.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("marker") or query.get("start-after") or ""
        rows: dict[str, bool] = {}
        for key in self.keys_of(bucket, prefix):
            rest = key[len(prefix) :]
            folded = bool(delimiter) and delimiter in rest
            rows[prefix + rest.partition(delimiter)[0] + delimiter if folded else key] = folded
        remaining = [row for row in sorted(rows.items()) if row[0] > after]
        page = remaining[: min(int(query.get("max-keys") or PAGE), PAGE)]
        more = len(page) < len(remaining)
        text = _tags(Name=bucket, Prefix=prefix, MaxKeys=str(PAGE), KeyCount=str(len(page)))
        text += _tags(Delimiter=delimiter) if delimiter else ""
        text += _tags(IsTruncated=str(more).lower())
        text += _tags(NextContinuationToken=page[-1][0], NextMarker=page[-1][0]) if more else ""
        for key, folded in page:
            if folded:
                text += f"<CommonPrefixes>{_tags(Prefix=key)}</CommonPrefixes>"
                continue
            with contextlib.suppress(OSError):  # deleted since the listing
                path = self.folder / bucket / key
                stat, tag = path.stat(), hashlib.md5(path.read_bytes()).hexdigest()
                own = {"LastModified": _moment(stat.st_mtime), "ETag": f'"{tag}"', "Size": str(stat.st_size)}
                text += f"<Contents>{_tags(Key=key, **own, StorageClass='STANDARD')}</Contents>"
        return _xml("ListBucketResult", text)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(seconds)) + f"{int(seconds % 1 * 1000):03}Z"


def _tags(**texts: str) -> str:
    return "".join(f"<{name}>{escape(text)}</{name}>" for name, text in texts.items())


def _xml(root: str, text: str) -> Answer:
    document = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{text}</{root}>'
    return Answer(document.encode(), headers={"Content-Type": "application/xml"})
