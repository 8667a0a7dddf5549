"""Check three signatures by the pages of Huawei and AWS, without our own signer: "" if nothing is wrong."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from calendar import timegm
from collections.abc import Mapping
from urllib.parse import quote

from worlds.vertex.wire import Call

__all__ = ["Keys", "check_obs", "check_sdk", "check_v4"]

Keys = Mapping[str, tuple[str, str]]
"""Secret and security token by access key."""
SUBRESOURCES = ("acl", "delete", "location", "partNumber", "policy", "uploadId", "uploads", "versioning")
WRONG = "the signature does not match"


def _secret(keys: Keys, ak: str, token: str) -> str:
    """Return the secret; "" for another key or security token."""
    secret, own = keys.get(ak, ("", ""))
    return secret if token == own else ""


def _parts(call: Call) -> tuple[str, dict[str, str], list[str]]:
    kind, _, rest = call.headers.get("authorization", "").partition(" ")
    parts = dict(item.strip().split("=", 1) for item in rest.split(",") if "=" in item)
    return kind, parts, parts.get("SignedHeaders", "").split(";")


def _digest(call: Call, path: str, names: list[str], body: str) -> str:
    """Return the digest of the canonical request, which both newer signatures share."""
    query = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(call.query.items()))
    head = "".join(f"{name}:{' '.join(call.headers.get(name, '').split())}\n" for name in names)
    return hashlib.sha256(f"{call.method}\n{path}\n{query}\n{head}\n{';'.join(names)}\n{body}".encode()).hexdigest()


def check_sdk(call: Call, keys: Keys) -> str:
    """Check SDK-HMAC-SHA256."""
    kind, parts, names = _parts(call)
    if kind != "SDK-HMAC-SHA256" or not {"host", "x-sdk-date"} <= set(names):
        return "no signature of host and date"
    moment = call.headers["x-sdk-date"]
    if abs(timegm(time.strptime(moment, "%Y%m%dT%H%M%SZ")) - time.time()) > 15 * 60:
        return "the date is off"
    path = call.path if call.path.endswith("/") else f"{call.path}/"
    text = f"{kind}\n{moment}\n{_digest(call, path, names, hashlib.sha256(call.body).hexdigest())}"
    secret = _secret(keys, parts["Access"], call.headers.get("x-security-token", ""))
    good = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
    return "" if secret and good == parts["Signature"] else WRONG


def check_obs(call: Call, keys: Keys, bucket: str, key: str) -> str:
    """Check OBS's own signature; ``key`` is quoted, as in the request."""
    ak, _, signature = call.headers["authorization"].removeprefix("OBS ").partition(":")
    own = call.headers
    lines = [call.method, own.get("content-md5", ""), own.get("content-type", "")]
    lines.append("" if "x-obs-date" in own else own.get("date", ""))
    lines += [f"{name}:{own[name]}" for name in sorted(own) if name.startswith("x-obs-")]
    query = "&".join(k if not v else f"{k}={v}" for k, v in sorted(call.query.items()) if k in SUBRESOURCES)
    text = "\n".join([*lines, f"/{bucket}/{key}" + (f"?{query}" if query else "")])
    secret = _secret(keys, ak, own.get("x-obs-security-token", ""))
    good = base64.b64encode(hmac.new(secret.encode(), text.encode(), hashlib.sha1).digest()).decode()
    return "" if secret and good == signature else WRONG


def check_v4(call: Call, keys: Keys) -> str:
    """Check AWS's Signature Version 4."""
    kind, parts, names = _parts(call)
    if kind != "AWS4-HMAC-SHA256":
        return "no signature"
    ak, *scope = parts["Credential"].split("/")
    secret = _secret(keys, ak, call.headers.get("x-amz-security-token", ""))
    digest = _digest(call, call.path, names, call.headers.get("x-amz-content-sha256", ""))
    text = f"{kind}\n{call.headers['x-amz-date']}\n{'/'.join(scope)}\n{digest}"
    known = f"AWS4{secret}".encode()
    for word in (*scope, text):
        known = hmac.new(known, word.encode(), hashlib.sha256).digest()
    return "" if secret and known.hex() == parts["Signature"] else WRONG
