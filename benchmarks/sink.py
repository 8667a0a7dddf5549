"""An S3 on loopback that keeps nothing: it checks the digest of each part, and answers with zeros.

It takes files of any size. It has one bucket, ``bucket``; a key ``zeros-N`` is N bytes.
"""

from __future__ import annotations

import hashlib
import http.server
import re

__all__ = ["serve"]

CHUNK = b"\0" * (1 << 20)
TAG = '"zeros"'


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_PUT(self) -> None:
        remaining, digest = int(self.headers.get("Content-Length") or 0), hashlib.sha256()
        while remaining:
            piece = self.rfile.read(min(remaining, len(CHUNK)))
            if not piece:
                self.close_connection = True
                return
            digest.update(piece)
            remaining -= len(piece)
        promised = self.headers.get("x-amz-content-sha256")
        whole = promised in (digest.hexdigest(), "UNSIGNED-PAYLOAD")
        self._answer(200 if whole else 400, b"", {"ETag": TAG})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        begun = self.path.partition("?")[2].startswith("uploads")
        name = "InitiateMultipartUploadResult" if begun else "CompleteMultipartUploadResult"
        self._answer(200, f"<{name}><UploadId>1</UploadId><ETag>{TAG}</ETag></{name}>".encode(), {})

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>", {})
            return
        found = re.search(r"zeros-(\d+)$", self.path.partition("?")[0])
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        total, headers = int(found[1]), {"ETag": TAG, "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
        first, last = 0, total - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        remaining = last - first + 1
        self._head(206 if asked else 200, remaining, headers)
        while remaining and self.command == "GET":
            self.wfile.write(CHUNK[:remaining])
            remaining -= min(remaining, len(CHUNK))

    do_HEAD = do_GET

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, len(body), {"Content-Type": "application/xml", **headers})
        self.wfile.write(body)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that goes away."""


def serve() -> None:
    """Serve until killed. Print the endpoint first."""
    server = _Server(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
