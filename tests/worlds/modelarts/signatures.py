"""Check three signatures, written from Huawei's and AWS's pages and by no signer of ours."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from urllib.parse import quote

from ..vertex.wire import Call

__all__ = ["Keys", "check_obs", "check_sdk", "check_v4"]

Keys = Mapping[str, tuple[str, str]]
"""Secret and security token by access key."""
SKEW = 15 * 60.0
SUBRESOURCES = frozenset(
    ("acl", "cors", "delete", "lifecycle", "location", "partNumber", "policy", "uploadId", "uploads", "versioning")
)


def _query(call: Call, safe: str = "-_.~") -> str:
    return "&".join(f"{quote(k, safe=safe)}={quote(v, safe=safe)}" for k, v in sorted(call.query.items()))


def _known(keys: Keys, ak: str, token: str | None) -> str:
    """The secret; "" for another key or security token."""
    secret, own = keys.get(ak, ("", ""))
    return secret if (token or "") == own else ""


def check_sdk(call: Call, keys: Keys) -> str:
    """What is wrong with SDK-HMAC-SHA256: "" for nothing."""
    head = call.headers.get("authorization", "")
    kind, _, rest = head.partition(" ")
    if kind != "SDK-HMAC-SHA256":
        return "no signature"
    parts = dict(item.strip().split("=", 1) for item in rest.split(","))
    secret = _known(keys, parts["Access"], call.headers.get("x-security-token"))
    names = parts["SignedHeaders"].split(";")
    moment = call.headers.get("x-sdk-date", "")
    try:
        if abs(time.mktime(time.strptime(moment, "%Y%m%dT%H%M%SZ")) - time.timezone - time.time()) > SKEW:
            return "the date is off"
    except ValueError:
        return "no date"
    path = call.path if call.path.endswith("/") else f"{call.path}/"
    canonical = f"{call.method}\n{path}\n{_query(call)}\n"
    canonical += "".join(f"{name}:{call.headers.get(name, '').strip()}\n" for name in names)
    canonical += f"\n{';'.join(names)}\n{hashlib.sha256(call.body).hexdigest()}"
    text = f"SDK-HMAC-SHA256\n{moment}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    good = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
    if not {"host", "x-sdk-date"} <= set(names):
        return "host and date are not signed"
    return "" if secret and hmac.compare_digest(good, parts["Signature"]) else "the signature does not match"


def check_obs(call: Call, keys: Keys, bucket: str, key: str) -> str:
    """The same of OBS's own signature; ``key`` is as it came, quoted."""
    kind, _, rest = call.headers.get("authorization", "").partition(" ")
    if kind != "OBS":
        return "no signature"
    ak, _, signature = rest.partition(":")
    secret = _known(keys, ak, call.headers.get("x-obs-security-token"))
    own = call.headers
    date = "" if "x-obs-date" in own else own.get("date", "")
    text = f"{call.method}\n{own.get('content-md5', '')}\n{own.get('content-type', '')}\n{date}\n"
    text += "".join(f"{name}:{own[name]}\n" for name in sorted(own) if name.startswith("x-obs-"))
    query = [
        name if not value else f"{name}={value}" for name, value in sorted(call.query.items()) if name in SUBRESOURCES
    ]
    text += f"/{bucket}/{key}" + (f"?{'&'.join(query)}" if query else "")
    good = base64.b64encode(hmac.new(secret.encode(), text.encode(), hashlib.sha1).digest()).decode()
    return "" if secret and hmac.compare_digest(good, signature) else f"the signature does not match: {text!r}"


def check_v4(call: Call, keys: Keys) -> str:
    """The same of AWS's Signature Version 4."""
    kind, _, rest = call.headers.get("authorization", "").partition(" ")
    if kind != "AWS4-HMAC-SHA256":
        return "no signature"
    parts = dict(item.strip().split("=", 1) for item in rest.split(","))
    ak, day, region, service, end = parts["Credential"].split("/")
    secret = _known(keys, ak, call.headers.get("x-amz-security-token"))
    names = parts["SignedHeaders"].split(";")
    canonical = f"{call.method}\n{call.path}\n{_query(call)}\n"
    canonical += "".join(f"{name}:{' '.join(call.headers.get(name, '').split())}\n" for name in names)
    canonical += f"\n{';'.join(names)}\n{call.headers.get('x-amz-content-sha256', '')}"
    text = f"AWS4-HMAC-SHA256\n{call.headers['x-amz-date']}\n{day}/{region}/{service}/{end}\n"
    text += hashlib.sha256(canonical.encode()).hexdigest()
    known = f"AWS4{secret}".encode()
    for word in (day, region, service, end):
        known = hmac.new(known, word.encode(), hashlib.sha256).digest()
    good = hmac.new(known, text.encode(), hashlib.sha256).hexdigest()
    return "" if secret and hmac.compare_digest(good, parts["Signature"]) else "the signature does not match"
