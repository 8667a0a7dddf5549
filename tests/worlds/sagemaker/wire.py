"""The server: JSON 1.1 and the query protocol of AWS's SDKs, with checked signatures and faults on demand."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import json
import re
import socket
import socketserver
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from .. import base

__all__ = ["Caller", "Fault", "Refusal", "Wire"]

ACCOUNT = "123456789012"
_CREDENTIAL = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, *"
    r"SignedHeaders=([^,]+), *Signature=(\w+)"
)


class Refusal(Exception):
    """An error of the service, with its HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        self.code, self.message, self.status = code, message, status
        super().__init__(f"{code}: {message}")


@dataclass(frozen=True)
class Caller:
    """The caller, by the request's signature."""

    key: str
    region: str
    service: str


class Fault(base.Fault):
    """A fault of the service."""

    @classmethod
    def throttled(cls, operation: str = "*", times: int = 1) -> Fault:
        return cls(operation, Refusal("ThrottlingException", "Rate exceeded"), times)

    @classmethod
    def broken(cls, operation: str = "*", times: int = 1, *, done: bool = False) -> Fault:
        """Return a failure of the service itself."""
        return cls(operation, Refusal("InternalFailure", "We encountered an internal error.", 500), times, done)

    @classmethod
    def denied(cls, operation: str, action: str, resource: str, times: int = 1) -> Fault:
        """Return the refusal of a caller whose policies do not allow the action."""
        text = (
            f"User: arn:aws:iam::{ACCOUNT}:user/tester is not authorized to perform: {action} on resource: {resource}"
        )
        why = f"because no identity-based policy allows the {action} action"
        return cls(operation, Refusal("AccessDeniedException", f"{text} {why}"), times)


Service = Callable[[str, Mapping[str, Any], Caller], Mapping[str, Any]]


class _Way(socketserver.ThreadingTCPServer):
    """A server that forwards each connection to ``target``."""

    target: tuple[str, int]


class _Copier(socketserver.BaseRequestHandler):
    """One connection, copied in both directions until either side ends."""

    def handle(self) -> None:
        way = self.server
        assert isinstance(way, _Way)
        with contextlib.suppress(OSError), socket.create_connection(way.target) as there:
            back = threading.Thread(target=_copy, args=(there, self.request), daemon=True)
            back.start()
            _copy(self.request, there)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Wire:
    """A server on loopback. ``services`` maps a prefix of X-Amz-Target (``Query``: no target) to its service, ``pages``
    a path to a GET.

    ``keys`` maps the callers' access keys to their secrets; those in ``expired`` are invalid. ``faults`` apply before
    everything else. ``calls`` lists every call in order, ``callers`` the access key of every accepted one. ``crashes``
    are errors of the fake itself.
    """

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.pages: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self.keys: dict[str, str] = {}
        self.expired: set[str] = set()
        self.faults: list[base.Fault] = []
        self.calls: list[str] = []
        self.callers: set[str] = set()
        self.crashes: list[str] = []
        self.latency = 0.0
        self._lock = threading.Lock()
        self._servers: dict[str, http.server.ThreadingHTTPServer] = {}
        self._ways: dict[tuple[str, str], _Way] = {}

    def listen(self, address: str = "127.0.0.1") -> str:
        """Serve at ``address`` too. Return the URL."""
        with self._lock:
            if address not in self._servers:
                server = http.server.ThreadingHTTPServer((address, 0), type("Handler", (_Handler,), {"wire": self}))
                server.daemon_threads = True
                threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
                self._servers[address] = server
            return f"http://{address}:{self._servers[address].server_port}"

    def lead(self, address: str, target: str) -> str:
        """Forward connections at ``address`` to the local server ``target`` (``http://host:port``). Return the URL."""
        with self._lock:
            if (address, target) not in self._ways:
                way = _Way((address, 0), _Copier)
                host, _, port = target.rpartition("/")[2].partition(":")
                way.target, way.daemon_threads = (host, int(port)), True
                threading.Thread(target=way.serve_forever, args=(0.05,), daemon=True).start()
                self._ways[address, target] = way
            return f"http://{address}:{self._ways[address, target].server_address[1]}"

    def forget(self, address: str) -> None:
        """Stop serving at an address."""
        with self._lock:
            server = self._servers.pop(address, None)
        if server is not None:
            server.shutdown()
            server.server_close()

    def close(self) -> None:
        """Stop all servers."""
        for address in list(self._servers):
            self.forget(address)
        for way in self._ways.values():
            way.shutdown()
            way.server_close()

    def count(self, operation: str) -> int:
        """Count the calls of an operation, including those that failed."""
        return self.calls.count(operation)

    def answer(self, target: str, body: bytes, headers: Mapping[str, str], path: str) -> Mapping[str, Any] | None:
        """Return the result of one call, or None to send no answer. Raises `Refusal`."""
        service, _, operation = target.partition(".")
        with self._lock:
            self.calls.append(operation)
            fault = base.due(self.faults, operation, "*")
        if self.latency:
            time.sleep(self.latency)
        if fault is not None and not fault.done:
            if fault.error is None:
                return None
            raise fault.error
        caller = self._caller(headers, body, path)
        if service not in self.services:
            raise Refusal("UnknownOperationException", target)
        request = dict(urllib.parse.parse_qsl(body.decode())) if service == "Query" else json.loads(body or b"{}")
        result = self.services[service](operation, request, caller)
        if fault is None:
            return result
        if fault.error is None:
            return None
        raise fault.error

    def _caller(self, headers: Mapping[str, str], body: bytes, path: str) -> Caller:
        """Return the signer. Raises `Refusal` as the service does for an invalid signature."""
        found = _CREDENTIAL.fullmatch(headers.get("authorization", ""))
        if found is None:
            raise Refusal("MissingAuthenticationTokenException", "Missing Authentication Token", 403)
        key, _, region, service, signed, signature = found.groups()
        if key in self.expired:
            raise Refusal("ExpiredTokenException", "The security token included in the request is expired")
        if key not in self.keys:
            raise Refusal("UnrecognizedClientException", "The security token included in the request is invalid.")
        signer = (key, self.keys[key], service, region)
        if _signature(signer, headers, signed.split(";"), body, path) != signature:
            text = "The request signature we calculated does not match the signature you provided."
            raise Refusal("InvalidSignatureException", text)
        self.callers.add(key)
        return Caller(key, region, service)


def _signature(
    signer: tuple[str, str, str, str], headers: Mapping[str, str], names: list[str], body: bytes, path: str
) -> str:
    """Return botocore's signature of the request; ``signer`` is (key, secret, service, region)."""
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest(
        method="POST",
        url=f"http://{headers['host']}{path}",
        data=body,
        headers={name: headers.get(name, "") for name in names},
    )
    request.context["timestamp"] = headers["x-amz-date"]
    key, secret, service, region = signer
    auth = SigV4Auth(Credentials(key, secret), service, region)
    text = auth.string_to_sign(request, auth.canonical_request(request))
    return str(auth.signature(text, request))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet for head and body: two cost 40 ms each (Nagle against the delayed ACK)
    wire: Wire

    def do_GET(self) -> None:
        page = self.wire.pages.get(self.path)
        self._send(200, page()) if page else self._send(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        target = self.headers.get("X-Amz-Target") or ""
        action = "" if target else dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace"))).get("Action", "")
        try:
            result = self.wire.answer(target or f"Query.{action}", body, headers, self.path)
        except Refusal as exc:
            error = {"Type": "Sender", "Code": exc.code, "Message": exc.message}
            refused: Mapping[str, Any] = {"__type": exc.code, "message": exc.message}
            self._send(exc.status, {"ErrorResponse": {"Error": error}} if action else refused, xml=bool(action))
            return
        except Exception:  # noqa: BLE001  an error of the fake: `Platform.close` raises it
            self.wire.crashes.append(traceback.format_exc())
            self._send(500, {"__type": "InternalFailure", "message": "the fake itself failed"})
            return
        if result is None:
            self.close_connection = True
            return
        wrapped = {f"{action}Response": {f"{action}Result": result}}
        self._send(200, wrapped if action else result, xml=bool(action))

    def _send(self, status: int, value: Mapping[str, Any], *, xml: bool = False) -> None:
        data = _xml(value).encode() if xml else json.dumps(value, default=_plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/xml" if xml else "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _xml(value: Any) -> str:
    """Return a value in the query protocol: names as elements, lists of members."""
    if isinstance(value, Mapping):
        return "".join(f"<{name}>{_xml(item)}</{name}>" for name, item in value.items())
    if isinstance(value, list):
        return "".join(f"<member>{_xml(item)}</member>" for item in value)
    return escape(str(value).lower() if isinstance(value, bool) else str(value))


def _plain(value: Any) -> float:
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    raise TypeError(f"not JSON: {value!r}")
