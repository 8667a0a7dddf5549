"""Sign a call to Huawei Cloud with an access key, by SDK-HMAC-SHA256, or send an IAM token. Standard library alone.

The tests compare it with the signer of huaweicloudsdkcore, in both directions.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from ...storage.obs import HuaweiKeys

ALGORITHM = "SDK-HMAC-SHA256"
_EMPTY = hashlib.sha256(b"").hexdigest()


def signed_headers(
    keys: HuaweiKeys,
    method: str,
    path: str,
    query: Sequence[tuple[str, str]],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float | None = None,
) -> dict[str, str]:
    """Return ``headers``, which name the Host, with the date and the signature of a call to ``path``.

    The key signs every header without an underscore. The service refuses a date that is 15 minutes off.
    """
    found = {**headers}
    names = {name.lower() for name in found}
    if "x-sdk-date" not in names:
        found["X-Sdk-Date"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    if keys.token:
        found["X-Security-Token"] = keys.token
    lower = {name.lower(): value.strip() for name, value in found.items() if "_" not in name}
    kind = lower.get("content-type", "")
    if kind and not kind.startswith(("application/json", "application/bson")):
        found["X-Sdk-Content-Sha256"] = lower["x-sdk-content-sha256"] = "UNSIGNED-PAYLOAD"
    signed = ";".join(sorted(lower))
    canonical = "\n".join(
        (
            method.upper(),
            _path(path),
            query_string(query),
            *(f"{name}:{lower[name]}" for name in sorted(lower)),
            "",
            signed,
            lower.get("x-sdk-content-sha256") or hashlib.sha256(body).hexdigest() if body else _EMPTY,
        )
    )
    text = "\n".join((ALGORITHM, lower["x-sdk-date"], hashlib.sha256(canonical.encode()).hexdigest()))
    signature = hmac.new(keys.sk.encode(), text.encode(), hashlib.sha256).hexdigest()
    found["Authorization"] = f"{ALGORITHM} Access={keys.ak}, SignedHeaders={signed}, Signature={signature}"
    return found


def query_string(query: Sequence[tuple[str, str]]) -> str:
    """Return the query of a URL as it is signed: sorted, and quoted but for ``~``, ``-``, ``.`` and ``_``."""
    return "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(query))


def _path(path: str) -> str:
    """Return the path as it is signed: quoted once, with a slash at its end that the call itself lacks."""
    found = "/".join(quote(part, safe="~") for part in unquote(path).split("/"))
    return found if found.endswith("/") else f"{found}/"
