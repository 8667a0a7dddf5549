"""The server: Google's REST front ends on loopback, with checked tokens and faults on demand."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import socket
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase
from re import Pattern
from re import compile as pattern
from typing import Any

from .. import base

__all__ = ["STATUS", "Answer", "Call", "Fault", "Refusal", "Wire", "no_consumer", "off", "unchunked"]

STATUS = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "ABORTED": 409, "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500,
    "UNIMPLEMENTED": 501, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""HTTP status by canonical code (google/rpc/code.proto)."""
CONSOLE = "https://console.developers.google.com/apis/api"


class Refusal(Exception):
    """An error of a service: canonical code, message, and ``google.rpc`` details."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        details: Sequence[Mapping[str, Any]] = (),
        status: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.code, self.message, self.details = code, message, list(details)
        self.status, self.headers = status or STATUS[code], dict(headers or {})
        super().__init__(f"{self.status} {code}: {message}")

    @classmethod
    def denied(cls, permission: str, resource: str) -> Refusal:
        """Return the refusal for a missing permission or resource: the front end does not distinguish them."""
        text = f"Permission '{permission}' denied on resource '{resource}' (or it may not exist)."
        info = _info("IAM_PERMISSION_DENIED", resource=resource, permission=permission)
        return cls("PERMISSION_DENIED", text, details=[info])

    def body(self) -> dict[str, Any]:
        """Return the error as the front end writes it."""
        error: dict[str, Any] = {"code": self.status, "message": self.message, "status": self.code}
        return {"error": {**error, "details": self.details} if self.details else error}


def _info(reason: str, **metadata: str) -> dict[str, Any]:
    domain = "googleapis.com" if reason == "SERVICE_DISABLED" else "aiplatform.googleapis.com"
    kind = "type.googleapis.com/google.rpc.ErrorInfo"
    return {"@type": kind, "reason": reason, "domain": domain, "metadata": metadata}


class Fault(base.Fault):
    """A fault of the services; ``*`` is any call that needs a token."""

    @classmethod
    def throttled(cls, operation: str = "*", times: int = 1, *, seconds: int | None = None) -> Fault:
        """Return a rate limit; ``seconds`` is its Retry-After, which the services rarely send."""
        text = "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of service."
        headers = {} if seconds is None else {"Retry-After": str(seconds)}
        return cls(operation, Refusal("RESOURCE_EXHAUSTED", text, headers=headers), times)

    @classmethod
    def broken(cls, operation: str = "*", times: int = 1, *, code: str = "UNAVAILABLE", done: bool = False) -> Fault:
        """Return a failure of the service itself."""
        return cls(operation, Refusal(code, "The service is currently unavailable."), times, done)

    @classmethod
    def disabled(cls, operation: str, project: str, times: int = 1) -> Fault:
        """Return the refusal of an API that the project has not enabled."""
        return cls(operation, off("Vertex AI API", "aiplatform.googleapis.com", project), times)


def off(api: str, service: str, project: str) -> Refusal:
    """Return the refusal of an API that is not enabled in the billed project."""
    text = (
        f"{api} has not been used in project {project} before or it is disabled. Enable it by visiting "
        f"{CONSOLE}/{service}/overview?project={project} then retry. If you enabled this API recently, wait a few "
        "minutes for the action to propagate to our systems and retry."
    )
    info = _info("SERVICE_DISABLED", service=service, consumer=f"projects/{project}")
    return Refusal("PERMISSION_DENIED", text, details=[info])


def no_consumer(project: str, *, storage: bool = False) -> Refusal:
    """Return the refusal of a caller that may not bill its calls to a project. Cloud Storage has its own message."""
    if storage:
        text = "caller does not have serviceusage.services.use access to the Google Cloud project. Permission"
        return Refusal("PERMISSION_DENIED", f"{text} 'serviceusage.services.use' denied on resource.")
    text = (
        f"Caller does not have required permission to use project {project}. Grant the caller the "
        "roles/serviceusage.serviceUsageConsumer role, or a custom role with the serviceusage.services.use permission."
    )
    info = _info("USER_PROJECT_DENIED", service="aiplatform.googleapis.com", consumer=f"projects/{project}")
    return Refusal("PERMISSION_DENIED", text, details=[info])


@dataclass(frozen=True)
class Answer:
    """An answer: ``value`` as JSON, or as it is when it is bytes."""

    value: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One request. ``token`` is its bearer token, or None, and ``account`` the token's account.
    ``at`` is its time in monotonic seconds; ``words`` are the unquoted groups of the route's path.
    """

    operation: str
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    words: Sequence[str]
    token: str | None = None
    account: str = ""
    at: float = field(default_factory=time.monotonic)

    def json(self) -> Any:
        """Return the parsed body. Raises `Refusal`."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError as exc:
            raise Refusal("INVALID_ARGUMENT", f"Invalid JSON payload received. {exc}") from None


Handler = Callable[[Call], Answer]


@dataclass(frozen=True)
class _Route:
    method: str
    path: Pattern[str]
    operation: str
    handler: Handler
    open: bool


class Wire:
    """A server on loopback, at any number of addresses. ``faults`` apply before everything else.

    ``accounts`` returns the account of a token, and raises `Refusal` for an invalid one. ``calls`` lists every call in
    order; ``crashes`` are errors of the fake itself.
    """

    def __init__(self, accounts: Callable[[str | None], str] = lambda token: "") -> None:
        self.faults: list[base.Fault] = []
        self.calls: list[Call] = []
        self.crashes: list[str] = []
        self._accounts = accounts
        self.charged: Callable[[str, bool], None] = lambda project, storage: None
        """Check the project that a call is billed to (x-goog-user-project). Raises `Refusal`."""
        self._routes: list[_Route] = []
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}

    def route(self, method: str, path: str, operation: str, handler: Handler, *, open: bool = False) -> None:
        """Answer a path: a pattern of the quoted path. ``open`` paths take no token."""
        self._routes.append(_Route(method, pattern(path), operation, handler, open))

    def listen(self, address: str = "127.0.0.1") -> str:
        """Serve at ``address`` too. Return the URL."""
        with self._lock:
            if address not in self._servers:
                self._servers[address] = _Server(address, self)
            return f"http://{address}:{self._servers[address].server_port}"

    def forget(self, address: str) -> None:
        """Stop serving at an address."""
        with self._lock:
            server = self._servers.pop(address, None)
        if server is not None:
            server.end()

    def close(self) -> None:
        """Stop all servers."""
        for address in list(self._servers):
            self.forget(address)

    def count(self, operation: str) -> int:
        """Count the calls of an operation, including those that failed."""
        return sum(call.operation == operation for call in self.calls)

    def answer(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Answer | None:
        """Return the answer to a request, or None to send none. Raises `Refusal`."""
        path, _, query = target.partition("?")
        found = ((route, match) for route in self._routes if (match := route.path.fullmatch(path)))
        route, match = next((pair for pair in found if pair[0].method == method), (None, None))
        kind, _, token = headers.get("authorization", "").partition(" ")
        call = Call(
            operation=route.operation if route else f"{method} {path}",
            method=method,
            path=path,
            query=dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
            headers=headers,
            body=body,
            words=tuple(urllib.parse.unquote(word or "") for word in match.groups()) if match else (),
            token=token if kind == "Bearer" else None,
        )
        with self._lock:
            self.calls.append(call)
            fault = base.due(self.faults, call.operation, *(() if route is None or route.open else ("*",)))
        if fault is not None and not fault.done:
            if fault.error is None:
                return None
            raise fault.error
        if route is None:
            raise Refusal("NOT_FOUND", f"The requested URL {path} was not found on this server.")
        if not route.open:
            call = dataclasses.replace(call, account=self._accounts(call.token))
            if project := headers.get("x-goog-user-project"):
                self.charged(project, "/storage/" in call.path)
        answer = route.handler(call)
        if fault is None:
            return answer
        if fault.error is None:
            return None
        raise fault.error


def unchunked(stream: BufferedIOBase) -> bytes:
    """Join a body that comes in chunks (RFC 9112, 7.1)."""
    parts = []
    while size := int(stream.readline().split(b";")[0], 16):
        parts.append(stream.read(size))
        stream.readline()
    stream.readline()
    return b"".join(parts)


class _Server(http.server.ThreadingHTTPServer):
    """A server that ends with all its connections. Clients keep them open, each with a thread here."""

    request_queue_size = 256  # a client of fsspec opens a hundred connections at once

    def __init__(self, address: str, wire: Wire) -> None:
        super().__init__((address, 0), type("Handler", (_Handler,), {"wire": wire}))
        self._wire = wire
        self._open: dict[Any, threading.Thread] = {}
        self._loop = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._loop.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a request in a thread that `end` can join."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._open[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            self._wire.crashes.append(traceback.format_exc())

    def end(self) -> None:
        """Close every connection and join its thread."""
        self.shutdown()
        for connection, thread in list(self._open.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._loop.join()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet for head and body: two cost 40 ms each (Nagle against the delayed ACK)
    wire: Wire

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            answer = self.wire.answer(self.command, self.path, self._body(), headers)
        except Refusal as exc:
            answer = Answer(exc.body(), exc.status, exc.headers)
        except ConnectionError:  # the client has gone
            answer = None
        except Exception:  # noqa: BLE001  an error of the fake: `Platform.close` raises it
            self.wire.crashes.append(traceback.format_exc())
            answer = Answer(Refusal("INTERNAL", "the fake itself failed").body(), 500)
        if answer is None:
            self.close_connection = True
            return
        self._send(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _body(self) -> bytes:
        """Return the body, with a length or in chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                raise ConnectionError("the client has gone midway")  # drop the incomplete body, as the service does
            return body
        return unchunked(self.rfile)

    def _send(self, answer: Answer) -> None:
        raw = isinstance(answer.value, bytes)
        data = answer.value if raw else b"" if answer.value is None else json.dumps(answer.value).encode()
        headers = {"Content-Type": "application/octet-stream" if raw else "application/json", **answer.headers}
        self.send_response(answer.status)
        for name, text in headers.items():
            self.send_header(name, text)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD" and answer.status != 204:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
