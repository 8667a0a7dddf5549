"""A small S3 on loopback with planned faults: the errors of a network and a busy service."""

from __future__ import annotations

import hashlib
import http.server
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

#: The fault of a request: refused (503); connection cut before or after the request has its effect; half an answer;
#: another range than requested; a pause in the answer; a wrong byte; the object replaced just before, by one of the
#: same size, a smaller or a larger one.
FAULTS = ("refuse", "reset", "lost", "truncate", "shift", "slow", "corrupt", "replace", "shrink", "grow")


@dataclass
class Stored:
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    made: float = field(default_factory=time.time)

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class FaultyS3(http.server.ThreadingHTTPServer):
    """An S3 server with one bucket, ``bucket``, in ``region`` if that is set.

    - ``faults``: one is taken a request; None is no fault.
    - ``requests``: (method, path, headers) of each; ``objects``: by key.
    - ``ignores``: the conditions of a write that this server does not know.
    - ``versions``: every content that was ever complete at a key.
    - ``only_below``: lists above it are refused.
    - ``denies(method, path, headers)``: returns the reason if a policy denies the request.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        self.faults: list[str | None] = []
        self.objects: dict[str, Stored] = {}
        self.versions: dict[str, list[bytes]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.only_below = self.region = self.ignores = ""
        self.denies: Callable[[str, str, Mapping[str, str]], str] = lambda method, path, headers: ""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.RLock()
        self.under_way = 0
        self.still = threading.Condition(self.lock)
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, key: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        with self.lock:
            self.objects[key] = Stored(data, headers or {})
            self.versions.setdefault(key, []).append(data)

    def settle(self) -> None:
        """Wait until pending requests are done, also those whose client has left."""
        with self.still:
            assert self.still.wait_for(lambda: not self.under_way, timeout=30)

    def clear(self) -> None:
        """Reset the server after all pending requests: a test must not write into the next one."""
        with self.lock:
            self.settle()
            self.faults, self.requests, self.ignores = [], [], ""
            self.objects, self.versions, self.parts, self.region = {}, {}, {}, ""

    def fault(self) -> str | None:
        """Take the next fault."""
        with self.lock:
            return self.faults.pop(0) if self.faults else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnected: the tests break connections on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def handle_one(self) -> None:
        with self.server.lock:
            self.server.under_way += 1
        try:
            self._handle()
        finally:
            with self.server.still:
                self.server.under_way -= 1
                self.server.still.notify_all()

    def _handle(self) -> None:
        body = self._body()
        path, _, query = self.path.partition("?")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.key = urllib.parse.unquote(path).removeprefix("/bucket").lstrip("/")
        self.fault = self.server.fault()
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.server.lock:
            self.server.requests.append((self.command, self.path, headers))
        if self.fault == "late":
            time.sleep(1)
        if self.fault == "reset":
            self._cut()
        elif word := self.server.denies(self.command, self.path, headers):
            self._error(403, "AccessDenied", word)
        elif self.fault == "refuse":
            self._error(503, "SlowDown")
        elif self.server.region and f"/{self.server.region}/s3/" not in self.headers.get("Authorization", ""):
            self._error(301, "PermanentRedirect")
        elif self.fault and self.fault[:1].isdigit():
            status, _, code = self.fault.partition(" ")
            self._error(int(status), code)
        else:
            with self.server.lock:
                answer = getattr(self, f"_{self.command.lower()}")(body)
            self._answer(*answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            raise AssertionError("not spoken here")
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in (self.headers.get("Content-Encoding") or ""):
            plain = b""
            while data:
                length, _, rest = data.partition(b"\r\n")
                size = int(length.partition(b";")[0], 16)
                if not size:
                    break
                plain, data = plain + rest[:size], rest[size + 2 :]
            data = plain
        return data

    # ------------------------------------------------------------------------------------------------------ operations

    def _get(self, _: bytes) -> tuple[int, dict[str, str], bytes]:
        if not self.key or "list-type" in self.query:
            return self._list()
        if self.fault in ("replace", "shrink", "grow") and self.key in self.server.objects:
            old = self.server.objects[self.key].data
            new = bytes([old[-1] ^ 1]) + old[-2::-1] if len(old) > 1 else b"!"
            larger = new * 9 if len(new) < 1 << 18 else new + b"!"  # a client may grow it more than once
            self.server.put(self.key, {"replace": new, "shrink": new[: len(new) // 9], "grow": larger}[self.fault])
        found = self.server.objects.get(self.key)
        if found is None:
            return self._refusal(404, "NoSuchKey")
        if (wanted := self.headers.get("If-Match")) and wanted != found.tag:
            return self._refusal(412, "PreconditionFailed")
        moment = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(found.made))
        headers = {"ETag": found.tag, "Last-Modified": moment, "Accept-Ranges": "bytes", **found.headers}
        if self.fault == "whole":
            headers["Content-Range"] = f"bytes 0-{len(found.data) - 1}/{len(found.data)}"
            return 200, headers, found.data
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first = int(asked[1]) + (1 if self.fault == "shift" else 0)
            last = min(int(asked[2] or len(found.data)), len(found.data) - 1)
            if first > last:
                return self._refusal(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
            return 206, headers, found.data[first : last + 1]
        return 200, headers, found.data

    _head = _get

    def _put(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if not self.key:
            return self._refusal(403, "AccessDenied")  # no client may create buckets
        if "partNumber" in self.query:
            self.server.parts[self.query["uploadId"]][int(self.query["partNumber"])] = body
            return 200, {"ETag": Stored(body).tag}, b""
        if source := self.headers.get("x-amz-copy-source"):
            found = self.server.objects.get(urllib.parse.unquote(source).lstrip("/").removeprefix("bucket/"))
            if found is None:
                return self._refusal(404, "NoSuchKey")
            self.server.put(self.key, found.data)
            text = f"<CopyObjectResult><ETag>{escape(found.tag)}</ETag></CopyObjectResult>"
            return 200, {"Content-Type": "application/xml"}, text.encode()
        there, ignores = self.server.objects.get(self.key), self.server.ignores
        if self.headers.get("If-None-Match") == "*" and there is not None and "If-None-Match" not in ignores:
            return self._refusal(412, "PreconditionFailed")
        if (wanted := self.headers.get("If-Match")) and "If-Match" not in ignores:
            if there is None:
                return self._refusal(404, "NoSuchKey")
            if wanted != there.tag:
                return self._refusal(412, "PreconditionFailed")
        meta = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
        self.server.put(self.key, body, meta)
        return 200, {"ETag": Stored(body).tag}, b""

    def _post(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        kind = {"Content-Type": "application/xml"}
        if "uploads" in self.query:
            number = str(len(self.server.parts))
            self.server.parts[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            return 200, kind, text.encode()
        if "uploadId" in self.query:
            parts = self.server.parts.get(self.query["uploadId"])
            named = [int(number) for number in re.findall(rb"<PartNumber>(\d+)<", body)]
            if not parts or set(named) - set(parts):
                return self._refusal(404, "NoSuchUpload")
            del self.server.parts[self.query["uploadId"]]
            self.server.put(self.key, b"".join(parts[number] for number in named))
            tag = escape(self.server.objects[self.key].tag)
            text = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
            return 200, kind, text.encode()
        gone = [key.decode() for key in re.findall(rb"<Key>(.*?)</Key>", body)]
        for key in gone:
            self.server.objects.pop(key, None)
        text = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in gone)
        return 200, kind, f"<DeleteResult>{text}</DeleteResult>".encode()

    def _delete(self, _: bytes) -> tuple[int, dict[str, str], bytes]:
        if "uploadId" in self.query:
            self.server.parts.pop(self.query["uploadId"], None)
        else:
            self.server.objects.pop(self.key, None)
        return 204, {}, b""

    def _list(self) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        if not prefix.startswith(self.server.only_below):
            return self._refusal(403, "AccessDenied")
        files, folders = [], set()
        for key, found in sorted(self.server.objects.items()):
            if key.startswith(prefix):
                head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                if cut:
                    folders.add(prefix + head + cut)
                else:
                    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.made))
                    files.append(
                        f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                        f"<ETag>{escape(found.tag)}</ETag><Size>{len(found.data)}</Size></Contents>"
                    )
        inside = "".join(files) + "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{inside}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, text.encode()

    # --------------------------------------------------------------------------------------------------------- answers

    def _refusal(self, status: int, code: str, word: str = "") -> tuple[int, dict[str, str], bytes]:
        text = f"<Error><Code>{code}</Code><Message>{escape(word) or f'{code} it is'}</Message></Error>"
        told = {"x-amz-bucket-region": self.server.region} if self.server.region else {}
        return status, {"Content-Type": "application/xml", **told}, text.encode()

    def _error(self, status: int, code: str, word: str = "") -> None:
        self.fault = None
        self._answer(*self._refusal(status, code, word))

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        if self.fault == "lost":
            self._cut()
            return
        if self.fault == "corrupt" and self.command == "GET" and status in (200, 206) and "ETag" in headers and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD" or status == 204:
            return
        half = len(data) // 2
        self.wfile.write(data[:half])
        if self.fault == "truncate" and data:
            self.wfile.flush()
            self._cut()
            return
        if self.fault == "slow":
            time.sleep(0.05)
        self.wfile.write(data[half:])

    def _cut(self) -> None:
        """Reset the connection instead of closing it in order."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
