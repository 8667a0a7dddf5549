"""A proxy with faults between a client and a store: refused, cut, slow or half requests."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import random
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from worlds.vertex import wire as google_wire

FAULTS = ("refused", "cut before", "answer lost", "slow", "half an answer", "half a write", "stale listing")
"""The faults of a request to a store."""
PLANNED = (*FAULTS[:6], "corrupt", "replaced")
"""The faults that a test may plan: also an answer with a wrong byte, and an object replaced just before a read."""
STALE_SECONDS = 10.0


class Proxy(http.server.ThreadingHTTPServer):
    """A proxy to ``target`` (http://…) that gives one request in ``one_in`` a fault.

    - ``planned``: faults that are taken first, one a request. None, or one that cannot apply to the request, is no
      fault.
    - ``replace``: called for a request that is "replaced".
    - ``slow``: the shortest and the longest delay, in seconds.
    - ``count``: the number of each fault.

    A listing of node files may be `STALE_SECONDS` old. A listing of records is never old, as in real stores.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, target: str, draw: random.Random, one_in: int, *, slow: tuple[float, float] = (0.2, 3.0)
    ) -> None:
        parts = urllib.parse.urlsplit(target)
        self.host, self.port = str(parts.hostname), int(parts.port or 80)
        self.draw, self.one_in, self.slow, self.calm = draw, one_in, slow, False
        self.planned: list[str | None] = []
        self.replace: Callable[[], object] = lambda: None
        self.count: Counter[str] = Counter()
        self.listings: dict[str, tuple[float, tuple[int, list[tuple[str, str]], bytes]]] = {}
        self.lock = threading.Lock()
        self.under_way, self.still = 0, threading.Condition()
        super().__init__(("127.0.0.1", 0), _Passing)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault(self, possible: Sequence[str], planned: Sequence[str] = ()) -> str:
        """Return the fault of a request: one of ``possible``, or of ``planned`` where that is due."""
        with self.lock:
            if self.planned:
                chosen = self.planned.pop(0) or ""
                if chosen not in (*possible, *planned):
                    return ""
            elif self.calm or self.one_in < 1 or self.draw.randrange(self.one_in):
                return ""
            else:
                chosen = self.draw.choice(possible)
            self.count[f"store: {chosen}"] += 1
            return chosen

    def settle(self) -> None:
        """Wait until pending requests are done, also those whose client has left."""
        with self.still:
            assert self.still.wait_for(lambda: not self.under_way, timeout=60)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected: the proxy breaks connections on purpose."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _counted(self) -> None:
        with self.server.still:
            self.server.under_way += 1
        try:
            self._pass()
        finally:
            with self.server.still:
                self.server.under_way -= 1
                self.server.still.notify_all()

    def _pass(self) -> None:
        body = self._body()
        query = urllib.parse.unquote(self.path.partition("?")[2])
        lists = self.command == "GET" and "prefix=" in query and "/live" in query
        possible = [*FAULTS[:4], *(["half an answer"] if self.command == "GET" else [])]
        possible += ["half a write"] if self.command in ("PUT", "POST") and len(body) > 1 else []
        possible += ["stale listing"] if lists else []
        fault = self.server.fault(possible, ["corrupt", "replaced"] if self.command == "GET" else [])
        if fault == "cut before":
            self.close_connection = True
            return
        if fault == "refused":
            self._answer((503, [("Retry-After", "0")], b""))
            return
        if fault == "slow":
            time.sleep(self.server.draw.uniform(*self.server.slow))
        if fault == "replaced":
            self.server.replace()
        if fault == "half a write":
            self._half(body)
            self.close_connection = True
            return
        answer = self._asked(body)
        if lists:
            when, old = self.server.listings.get(self.path, (0.0, answer))
            if fault == "stale listing" and time.monotonic() - when < STALE_SECONDS:
                answer = old
            else:
                self.server.listings[self.path] = (time.monotonic(), answer)
        if fault == "answer lost":
            self.close_connection = True
            return
        if fault == "corrupt" and answer[2]:
            at = self.server.draw.randrange(len(answer[2]))
            answer = (*answer[:2], answer[2][:at] + bytes([answer[2][at] ^ 1]) + answer[2][at + 1 :])
        self._answer(answer, half=fault == "half an answer")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _counted

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            body = self.rfile.read(length := int(self.headers.get("Content-Length") or 0))
            if len(body) < length:
                raise ConnectionError("whoever sent it was killed")
            return body
        return google_wire.unchunked(self.rfile)

    def _sent(self) -> dict[str, str]:
        """Return the headers to pass on, without the length, which the sender sets."""
        ours = ("connection", "transfer-encoding", "expect", "content-length")
        return {name: value for name, value in self.headers.items() if name.lower() not in ours}

    def _asked(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        there = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        try:
            headers = {**self._sent(), "Connection": "close"}
            if body or self.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(body))
            there.request(self.command, self.path, body=body, headers=headers)
            told = there.getresponse()
            drop = ("connection", "transfer-encoding", "keep-alive")
            return told.status, [(k, v) for k, v in told.getheaders() if k.lower() not in drop], told.read()
        finally:
            there.close()

    def _half(self, body: bytes) -> None:
        """Send the service half of the announced body, and then nothing."""
        head = "".join(f"{k}: {v}\r\n" for k, v in self._sent().items())
        text = f"{self.command} {self.path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n"
        with contextlib.suppress(OSError), socket.create_connection((self.server.host, self.server.port), 10) as there:
            there.sendall(text.encode("latin-1") + body[: len(body) // 2])

    def _answer(self, answer: tuple[int, list[tuple[str, str]], bytes], *, half: bool = False) -> None:
        status, headers, data = answer
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD" and status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.close_connection = True
