"""Callers: a service account on the client's machine, the metadata server on a node; and the secrets of a project."""

from __future__ import annotations

import base64
import functools
import json
import secrets
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from .wire import Answer, Call, Refusal, Wire

__all__ = ["Identity"]

TOKEN_SECONDS = 3600.0
GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
AUDIENCE = "https://oauth2.googleapis.com/token"
"""Audience of an assertion, for any endpoint in the file (google-auth, ``service_account.py``)."""
ACCOUNTS = r"/computeMetadata/v1/instance/service-accounts"
INVALID = (
    "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
    "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
SECRET = r"/v1/(projects/[^/]+/(?:locations/[^/]+/)?secrets/[^/]+)/versions/([^/:]+):access"


class Identity:
    """Tokens of a project, by account. ``email`` is the service account of the client's file ``adc``.

    ``signed_in`` False means that the account's key is revoked. ``nodes`` maps each address (``host:port``) of the
    metadata server to the account of its job. ``values`` are secrets by resource name; ``readers`` may read them.
    """

    def __init__(self, wire: Wire, folder: Path, *, project: str, token_seconds: float = TOKEN_SECONDS) -> None:
        self.email = f"tester@{project}.iam.gserviceaccount.com"
        self.project, self.token_seconds, self.signed_in = project, token_seconds, True
        self.nodes: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.readers: set[str] = set()
        self.adc = folder / "service-account.json"
        self._tokens: dict[str, tuple[str, float]] = {}
        self._since, self._lock = 0.0, threading.Lock()
        private, self._public = _key()
        credentials = {
            "type": "service_account",
            "project_id": project,
            "private_key_id": "1",
            "private_key": private,
            "client_email": self.email,
            "client_id": "1",
            "token_uri": f"{wire.listen()}/token",
        }
        self.adc.parent.mkdir(parents=True, exist_ok=True)
        self.adc.write_text(json.dumps(credentials))
        wire.route("POST", "/token", "POST token", self._exchange, open=True)
        wire.route("GET", f"{ACCOUNTS}/([^/]+)/(token|email|scopes)", "GET metadata", self._metadata, open=True)
        wire.route("GET", SECRET, "GET secret", self._secret)

    def expire(self) -> None:
        """Make all present tokens invalid, and those that the account has signed itself."""
        with self._lock:
            self._tokens.clear()
            self._since = time.time()

    def issue(self, account: str) -> str:
        """Return a new token."""
        token = f"ya29.{secrets.token_urlsafe(24)}"
        with self._lock:
            self._tokens[token] = (account, time.time() + self.token_seconds)
        return token

    def account(self, token: str | None) -> str:
        """Return the account of an issued token, or of a JWT that the account signed. Raises `Refusal`."""
        with self._lock:
            account, until = self._tokens.get(token or "", ("", 0.0))
        if until > time.time():
            return account
        if token and token.count(".") == 2 and self.signed_in:
            claims = self._claims(token)
            if claims is not None and claims["iat"] >= int(self._since):
                return str(claims["iss"])
        raise Refusal("UNAUTHENTICATED", INVALID)

    def _claims(self, assertion: str, audience: str | None = None) -> Any:
        """Return the claims of a JWT that the account signed; None for any other."""
        from google.auth import exceptions, jwt

        decode: Any = jwt.decode
        try:
            claims = decode(assertion, certs=self._public, audience=audience)
        except (ValueError, exceptions.GoogleAuthError):
            return None
        return claims if claims.get("iss") == self.email else None

    def _exchange(self, call: Call) -> Answer:
        """Exchange an assertion for a token (RFC 7523), as google-auth asks for a service account."""
        form = dict(urllib.parse.parse_qsl(call.body.decode()))
        claims = self._claims(form.get("assertion", ""), AUDIENCE) if form.get("grant_type") == GRANT else None
        if claims is None or not self.signed_in or not claims.get("scope"):
            return Answer({"error": "invalid_grant", "error_description": "Invalid JWT Signature."}, 400)
        return Answer(self._token_answer(self.email))

    def _token_answer(self, account: str) -> dict[str, Any]:
        token = self.issue(account)
        return {"access_token": token, "expires_in": int(self.token_seconds), "token_type": "Bearer"}

    def _metadata(self, call: Call) -> Answer:
        if call.headers.get("metadata-flavor") != "Google":
            raise Refusal("PERMISSION_DENIED", "Missing Metadata-Flavor:Google header.")
        account, what = self.nodes.get(call.headers.get("host", "")), call.words[1]
        if account is None or call.words[0] not in ("default", account):
            raise Refusal("NOT_FOUND", "No such service account on this machine.")
        headers = {"Metadata-Flavor": "Google"}
        if what == "token":
            return Answer(self._token_answer(account), headers=headers)
        text = account if what == "email" else "https://www.googleapis.com/auth/cloud-platform"
        return Answer(text.encode(), headers={**headers, "Content-Type": "application/text"})

    def _secret(self, call: Call) -> Answer:
        name, version = call.words
        resource = f"{name}/versions/{version}"
        if call.account not in self.readers:
            raise Refusal.denied("secretmanager.versions.access", resource)
        if resource not in self.values:
            raise Refusal("NOT_FOUND", f"Secret [{name}] not found or has no versions.")
        data = base64.b64encode(self.values[resource].encode()).decode()
        return Answer({"name": resource, "payload": {"data": data}})


@functools.cache
def _key() -> tuple[str, bytes]:
    """Return a private key and its public half as PEM, made once a process because it takes a moment."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # each client parses it: 54 ms for 2048 bits
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return private.decode(), key.public_key().public_bytes(serialization.Encoding.PEM, form)
