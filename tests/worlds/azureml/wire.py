"""The server: ARM over TLS with checked tokens and faults on demand, and the identity that issues the tokens."""

from __future__ import annotations

import base64
import datetime
import http.server
import ipaddress
import json
import re
import secrets
import ssl
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import base

__all__ = ["Answer", "Call", "Fault", "Refusal", "Wire", "certificate"]

TENANT = "72f988bf-0000-4000-8000-000000000000"
TOKEN_SECONDS = 3600
BAD_TOKEN = (
    'Bearer authorization_uri="https://login.microsoftonline.com/", error="invalid_token", '
    'error_description="The access token is expired or not known."'
)


class Refusal(Exception):
    """An error of the service: HTTP status, code and message, and the inner codes, outermost first."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        inner: Sequence[str] = (),
    ) -> None:
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})
        self.inner: dict[str, Any] = {}
        for word in reversed(inner):
            self.inner = {"innererror": {"code": word, **self.inner}}
        super().__init__(f"{status} {code}: {message}")


@dataclass(frozen=True)
class Answer:
    """An answer: ``value`` as JSON, or as it is when it is bytes or chunks of them (then with ``length``)."""

    value: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True)
class Call:
    """One request. ``token`` is its bearer token, or None. ``at`` is its time in monotonic seconds."""

    operation: str
    method: str
    url: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any
    token: str | None
    words: Sequence[str]
    at: float = field(default_factory=time.monotonic)


class Fault(base.Fault):
    """A fault of the service; ``*`` is any call that needs a token."""

    @classmethod
    def throttled(cls, operation: str = "*", times: int = 1, seconds: int = 1) -> Fault:
        headers = {"Retry-After": str(seconds)}
        return cls(operation, Refusal(429, "TooManyRequests", "The request is being throttled.", headers), times)

    @classmethod
    def broken(cls, operation: str = "*", times: int = 1, *, status: int = 500, done: bool = False) -> Fault:
        """Return a failure of the service itself."""
        return cls(operation, Refusal(status, "InternalServerError", "An internal error occurred."), times, done)

    @classmethod
    def denied(cls, operation: str, action: str, scope: str, times: int = 1) -> Fault:
        """Return the refusal of a caller whose roles do not allow the action."""
        text = (
            f"The client 'tester' with object id '{TENANT}' does not have authorization to perform action '{action}' "
            f"over scope '{scope}' or the scope is invalid. If access was recently granted, please refresh your "
            "credentials."
        )
        return cls(operation, Refusal(403, "AuthorizationFailed", text), times)


Handler = Callable[[Call], Answer]


@dataclass(frozen=True)
class _Route:
    method: str
    path: re.Pattern[str]
    operation: str
    handler: Handler
    open: bool


class Wire:
    """A server on loopback, on one port for each host. ``faults`` apply before everything else.

    ``calls`` lists every call in order, and ``leaks`` those with a token that should have none. ``crashes`` are errors
    of the fake itself. ``signed_in`` False is a machine without an identity. A token is valid for ``token_seconds``.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.pem = folder / "server.pem"
        self.pem.write_bytes(certificate())
        self.faults: list[base.Fault] = []
        self.calls: list[Call] = []
        self.leaks: list[Call] = []
        self.crashes: list[str] = []
        #: Answer for a path without a route.
        self.missing: Callable[[str], Refusal] = lambda path: Refusal(404, "NotFound", f"{path}: nothing is here")
        self.signed_in, self.token_seconds = True, float(TOKEN_SECONDS)
        self.secret = secrets.token_hex(8)
        self._tokens: dict[str, tuple[str, float]] = {}
        self._routes: list[_Route] = []
        self._lock = threading.RLock()
        self._servers: dict[str, http.server.ThreadingHTTPServer] = {}
        self.route("GET", r"/identity", "GET token", self._identity, open=True)
        self.route("GET", r"/msi", "GET node token", self._identity, open=True)

    def route(self, method: str, path: str, operation: str, handler: Handler, *, open: bool = False) -> None:
        """Answer a path: a pattern, whose groups are the call's ``words``. ``open`` paths take no token."""
        self._routes.append(_Route(method, re.compile(path, re.IGNORECASE), operation, handler, open))

    def listen(self, address: str = "127.0.0.1", *, port: int = 0, tls: bool = True) -> str:
        """Serve at ``address`` too. Return the URL."""
        server = http.server.ThreadingHTTPServer((address, port), type("Handler", (_Handler,), {"wire": self}))
        server.daemon_threads = True
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.pem)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"{'https' if tls else 'http'}://{address}:{server.server_port}"
        with self._lock:
            self._servers[url] = server
        return url

    def forget(self, url: str) -> None:
        """Stop serving at a URL."""
        with self._lock:
            server = self._servers.pop(url)
        server.shutdown()
        server.server_close()

    def close(self) -> None:
        """Stop all servers."""
        for url in list(self._servers):
            self.forget(url)

    def count(self, operation: str) -> int:
        """Count the calls of an operation, including those that failed."""
        return sum(call.operation == operation for call in self.calls)

    def expire(self) -> None:
        """Make all present tokens invalid."""
        with self._lock:
            self._tokens.clear()

    def issue(self, resource: str) -> tuple[str, float]:
        """Return a token for a resource, and its end in Unix seconds."""
        until = time.time() + self.token_seconds
        claims = {
            "aud": resource.rstrip("/"),
            "tid": TENANT,
            "oid": TENANT,
            "exp": int(until),
            "jti": secrets.token_hex(8),
        }
        parts = [json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims)]
        token = ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), ""])
        with self._lock:
            self._tokens[token] = (resource.rstrip("/"), until)
        return token, until

    def _identity(self, call: Call) -> Answer:
        """Serve a managed identity, as App Service and the nodes of Azure ML do."""
        given = call.headers.get("x-identity-header") or call.headers.get("secret")
        if not self.signed_in or given != self.secret:
            raise Refusal(400, "invalid_request", "No managed identity is assigned to this machine.")
        resource = call.query.get("resource", "")
        token, until = self.issue(resource)
        return Answer(
            {"access_token": token, "expires_on": str(int(until)), "resource": resource, "token_type": "Bearer"}
        )

    # -------------------------------------------------------------------------------------------------------- the wire

    def answer(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Answer | None:
        """Return the answer to a request, or None to send none. Raises `Refusal`."""
        path, _, query = target.partition("?")
        path = urllib.parse.unquote(path)
        found = ((route, match) for route in self._routes if (match := route.path.fullmatch(path)))
        route, match = next((pair for pair in found if pair[0].method == method), (None, None))
        kind, _, token = headers.get("authorization", "").partition(" ")
        call = Call(
            operation=route.operation if route else f"{method} {path}",
            method=method,
            url=target,
            query=dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
            headers=headers,
            body=_parsed(body),
            token=token if kind == "Bearer" else None,
            words=match.groups() if match else (),
        )
        with self._lock:
            self.calls.append(call)
            wanted = (call.operation, "*") if route is None or not route.open else (call.operation,)
            fault = base.due(self.faults, *wanted)
        if fault is not None and not fault.done:
            if fault.error is None:
                return None
            raise fault.error
        if route is None:
            raise self.missing(path)
        if route.open and call.token is not None:
            self.leaks.append(call)
        elif not route.open:
            self._check(call.token)
        answer = route.handler(call)
        if fault is None:
            return answer
        if fault.error is None:
            return None
        raise fault.error

    def _check(self, token: str | None) -> None:
        with self._lock:
            _, until = self._tokens.get(token or "", ("", 0.0))
        if until < time.time():
            headers = {"WWW-Authenticate": BAD_TOKEN}
            code = "AuthenticationFailed" if token is None else "ExpiredAuthenticationToken"
            raise Refusal(401, code, "The access token is missing, unknown or expired.", headers)

    def audience(self, token: str | None) -> str:
        """Return the resource that a token was issued for."""
        return self._tokens.get(token or "", ("", 0.0))[0]


def certificate() -> bytes:
    """Return a key and a self-signed certificate for this machine and the tests' vaults, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cloudtrain loopback")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [
        x509.DNSName("localhost"),
        x509.DNSName("*.vault.azure.net"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet for head and body: two cost 40 ms each (Nagle against the delayed ACK)
    wire: Wire

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            answer = self.wire.answer(self.command, self.path, body, headers)
        except Refusal as exc:
            error = {"error": {"code": exc.code, "message": exc.message, "details": [], **exc.inner}}
            answer = Answer(error, exc.status, exc.headers)
        except Exception:  # noqa: BLE001  an error of the fake: `Platform.close` raises it
            self.wire.crashes.append(traceback.format_exc())
            answer = Answer({"error": {"code": "InternalServerError", "message": "the fake itself failed"}}, 500)
        if answer is None:
            self.close_connection = True
            return
        self._send(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = do_HEAD = _serve

    def _send(self, answer: Answer) -> None:
        value = answer.value
        chunks: Iterator[bytes] | Sequence[bytes]
        if isinstance(value, Iterator):
            chunks, length = value, answer.length
        else:
            data = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
            chunks, length = [data], len(data)
        self.send_response(answer.status)
        if not any(name.lower() == "content-type" for name in answer.headers) and length:
            self.send_header("Content-Type", "application/json")
        for name, text in answer.headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        for chunk in chunks if self.command != "HEAD" else ():
            self.wfile.write(chunk)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
