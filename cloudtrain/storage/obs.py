"""Reach Huawei Cloud's OBS: its keys and endpoints, its own signature, and exclusive creation.

Bytes move over OBS's S3 protocol, as for ``s3:``. OBS ignores S3's condition ``If-None-Match``, so a creation is sent
with OBS's own signature and its header ``x-obs-forbid-overwrite``. Its page on PUT does not document that header, so
each bucket is probed before the first creation.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import ssl
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from ..errors import AuthError, SpecError
from .errors import CannotSwapError
from .local_disk import cache_home
from .obstore_backend import ObstoreMover
from .timings import CLIENT_TIMINGS

FORBID_OVERWRITE = "x-obs-forbid-overwrite"
"""Header of a PUT that OBS answers with 409 (ObjectAlreadyExists) if the object exists. Four public programs use it."""
PARALLEL_FILES = "x-obs-fs-file-interface"
"""Header of a bucket that is a parallel file system. Its listings are not those of a bucket (Apache Paimon #5417)."""
KEYS = ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN")
"""Variables of Huawei Cloud's SDK."""
_FILE = ("HUAWEICLOUD_SDK_CREDENTIALS_FILE", "~/.huaweicloud/credentials")
_MACHINE = "http://169.254.169.254/openstack/latest/securitykey"
"""Address at which a server of Huawei Cloud gets the temporary keys of its agency."""
_HINT = "set HUAWEICLOUD_SDK_AK and HUAWEICLOUD_SDK_SK to an access key: console, My Credentials, Access Keys"
PROBED_SECONDS = 24 * 3600
"""Time for which a bucket that created exclusively is not probed again, by a file in cloudtrain's cache folder."""
#: Buckets that are known to create exclusively, by their address.
_proven: set[str] = set()


class HuaweiKeys(NamedTuple):
    """An access key. ``token`` comes with a temporary one."""

    ak: str
    sk: str
    token: str = ""


def find_keys(environ: Mapping[str, str]) -> HuaweiKeys:
    """Return the keys of the SDK's variables, its file, or this machine's agency. Raises `AuthError`."""
    ak, sk, token = (environ.get(name, "") for name in KEYS)
    if ak and sk:
        return HuaweiKeys(ak, sk, token)
    path = Path(os.path.expanduser(environ.get(_FILE[0]) or _FILE[1]))
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, ValueError):
        raise AuthError(f"{path} is not a file of credentials", hint="its section [basic] has ak and sk") from None
    if parser.has_option("basic", "ak") and parser.has_option("basic", "sk"):
        own = parser["basic"]
        return HuaweiKeys(own["ak"], own["sk"], own.get("security_token", ""))
    try:
        with build_opener(ProxyHandler({})).open(_MACHINE, timeout=1) as answer:
            found = json.loads(answer.read())["credential"]
            return HuaweiKeys(found["access"], found["secret"], found["securitytoken"])
    except (OSError, ValueError, KeyError, TypeError):
        raise AuthError("no keys of Huawei Cloud", hint=_HINT) from None


def virtual(endpoint: str) -> bool:
    """Return whether a bucket is part of the endpoint's host: OBS demands it. At a bare address it cannot be."""
    return re.fullmatch(r"[\d.]+|localhost|.*:.*", urlsplit(endpoint).hostname or "") is None


def bucket_endpoint(endpoint: str, bucket: str) -> str:
    """Return the bucket's own address."""
    scheme, host = endpoint.rstrip("/").split("://", 1)
    return f"{scheme}://{bucket}.{host}" if virtual(endpoint) else f"{scheme}://{host}/{bucket}"


def authorization(
    keys: HuaweiKeys, method: str, bucket: str, key: str, headers: Mapping[str, str], *, query: str = ""
) -> str:
    """Return the header Authorization of OBS's own signature; ``key`` is quoted already. ``headers`` have ``Date``."""
    own = {name.lower(): text.strip() for name, text in headers.items()}
    lines = [method, own.get("content-md5", ""), own.get("content-type", ""), own.get("date", "")]
    lines += [f"{name}:{own[name]}" for name in sorted(own) if name.startswith("x-obs-")]
    lines.append(f"/{bucket}/{key}{query}")
    digest = hmac.new(keys.sk.encode(), "\n".join(lines).encode(), hashlib.sha1).digest()
    return f"OBS {keys.ak}:{base64.b64encode(digest).decode()}"


class NoRedirects(HTTPRedirectHandler):
    """Take a redirect as an error: another host must not get our keys and signatures."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _RefusedError(Exception):
    """An answer of OBS with an error; ``status_code`` is for the table of errors."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status_code, self.code = status, code
        super().__init__(f"{status} {code}: {message}".rstrip(": "))


class ObsMover(ObstoreMover):
    """A mover of OBS. It creates exclusively, and has no other conditional writes."""

    swaps = False

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        if version is not None:
            raise CannotSwapError(f"{self.url}/{key}: OBS cannot replace a file only while it is unchanged")
        self.check_exclusive()
        return str(self._create(self._at(key), data).get("etag"))

    def check_exclusive(self) -> None:
        """Create an object twice, once a day and bucket. Raises `SpecError` if the second one succeeds too."""
        bucket, where = self._access.bucket, self._address
        if where in _proven:
            return
        mark = cache_home(os.environ) / "buckets" / hashlib.sha256(where.encode()).hexdigest()[:32]
        with contextlib.suppress(OSError):
            if 0 <= time.time() - mark.stat().st_mtime < PROBED_SECONDS:
                _proven.add(where)
                return
        if str(self._ask("HEAD", "").get(PARALLEL_FILES, "")).lower() == "enabled":
            hint = "create a bucket of the kind object storage, and use that"
            raise SpecError(f"obs://{bucket} is a parallel file system, not a bucket", field="store", hint=hint)
        probe = self._at(f"probe-{secrets.token_hex(8)}")
        try:
            self._create(probe, b"1")
            with contextlib.suppress(FileExistsError):
                self._create(probe, b"2")
                why = f"obs://{bucket} does not refuse to overwrite an object, so two clients could start one run"
                hint = "use a bucket without versioning, or a store of another kind"
                raise SpecError(why, field="store", hint=hint)
        finally:
            with contextlib.suppress(_RefusedError, OSError):
                self._ask("DELETE", probe)
        _proven.add(where)
        if self._access.config["virtual_hosted_style_request"]:  # a bare address may be another server's tomorrow
            with contextlib.suppress(OSError):  # also if cloudtrain has no cache folder yet
                mark.parent.mkdir(mode=0o700, exist_ok=True)
                mark.touch()

    @cached_property
    def _address(self) -> str:
        config = self._access.config
        return str(config["endpoint"]) + ("" if config["virtual_hosted_style_request"] else f"/{self._access.bucket}")

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._access.certificates is not None:
            context.load_verify_locations(cadata=self._access.certificates.decode())
        return context

    def _create(self, key: str, data: bytes) -> Mapping[str, str]:
        """Create an object and return the answer's headers. Raises `FileExistsError`, or what the table knows."""
        try:
            return self._ask("PUT", key, data, **{FORBID_OVERWRITE: "true"})
        except _RefusedError as exc:
            if exc.status_code in (409, 412):
                raise FileExistsError(key) from exc
            raise

    def _ask(self, method: str, key: str, data: bytes | None = None, **more: str) -> Mapping[str, str]:
        """Return the headers of OBS's answer, in lower case, to a call with its own signature."""
        found: Mapping[str, Any] = self._keys() if self._keys is not None else {}
        keys = HuaweiKeys(
            str(found.get("access_key_id")), str(found.get("secret_access_key")), found.get("token") or ""
        )
        headers = {"Date": formatdate(usegmt=True), "Content-Type": "application/octet-stream", **more}
        if keys.token:
            headers["x-obs-security-token"] = keys.token
        path = quote(key, safe="/-_.~")
        headers["Authorization"] = authorization(keys, method, self._access.bucket, path, headers)
        request = Request(f"{self._address}/{path}", data=data, headers=headers, method=method)
        try:
            opener = build_opener(HTTPSHandler(context=self._trusted), NoRedirects)
            with opener.open(request, timeout=CLIENT_TIMINGS.http_silence) as answer:
                answer.read()
                return {name.lower(): text for name, text in answer.headers.items()}
        except HTTPError as exc:
            text = exc.read().decode("utf-8", "replace")
            code, said = (re.search(f"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
            if exc.code == 404:
                raise FileNotFoundError(key) from None
            raise _RefusedError(exc.code, code[1] if code else "", said[1] if said else "") from None
        except URLError as exc:
            raise ConnectionError(f"{urlsplit(self._address).netloc}: {exc.reason}") from None
