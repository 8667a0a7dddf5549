"""Call AWS in a container, with its job's role: credentials, signatures, and S3's objects.

Standard library alone: images have no SDK.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from xml.sax.saxutils import escape, unescape

from ...errors import DigestError, StorageError
from ...runtime.http_json import ask

DNS = {
    "aws": "amazonaws.com",
    "aws-cn": "amazonaws.com.cn",
    "aws-us-gov": "amazonaws.com",
    "aws-eusc": "amazonaws.eu",
    "aws-iso": "c2s.ic.gov",
    "aws-iso-b": "sc2s.sgov.gov",
    "aws-iso-e": "cloud.adc-e.uk",
    "aws-iso-f": "csp.hci.ic.gov",
}
"""End of the services' host names by partition, which is the second part of an ARN: botocore's partitions.json."""
CONTAINER_HOST = "http://169.254.170.2"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Keys that sign a call."""

    access_key: str
    secret_key: str
    token: str = ""


def credentials(environ: Mapping[str, str]) -> Credentials:
    """Return the container's credentials: its environment's keys, else its role's from the platform's endpoint."""
    if environ.get("AWS_ACCESS_KEY_ID"):
        return Credentials(
            access_key=environ["AWS_ACCESS_KEY_ID"],
            secret_key=environ["AWS_SECRET_ACCESS_KEY"],
            token=environ.get("AWS_SESSION_TOKEN", ""),
        )
    relative, full = (environ.get(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI") for kind in ("RELATIVE", "FULL"))
    if not relative and not full:
        raise StorageError("this container has no credentials: AWS_CONTAINER_CREDENTIALS_RELATIVE_URI is not set")
    url = f"{CONTAINER_HOST}{relative}" if relative else str(full)
    headers = {}
    if token_file := environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        with open(token_file, encoding="utf-8") as stream:
            headers["Authorization"] = stream.read().strip()
    elif token := environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN"):
        headers["Authorization"] = token
    request = urllib.request.Request(url, headers=headers)
    what, how = "reading the credentials of the job's role", "the job needs a role"
    answer = ask(lambda: request, what=what, how=how, direct=True)
    return Credentials(
        access_key=answer["AccessKeyId"], secret_key=answer["SecretAccessKey"], token=answer.get("Token") or ""
    )


def signed_headers(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    keys: Credentials,
    *,
    region: str,
    service: str,
    method: str = "POST",
    now: datetime.datetime | None = None,
) -> dict[str, str]:
    """Return ``headers`` of a request with AWS's Signature Version 4. The query of ``url`` is in canonical order."""
    moment = now or datetime.datetime.now(datetime.timezone.utc)
    stamp, day = moment.strftime("%Y%m%dT%H%M%SZ"), moment.strftime("%Y%m%d")
    parsed = urllib.parse.urlsplit(url)
    signed = {**headers, "Host": parsed.netloc, "X-Amz-Date": stamp}
    if keys.token:
        signed["X-Amz-Security-Token"] = keys.token
    canonical = sorted((name.lower(), " ".join(value.split())) for name, value in signed.items())
    names = ";".join(name for name, _ in canonical)
    lines = [method, parsed.path or "/", parsed.query, *(f"{name}:{value}" for name, value in canonical), "", names]
    request = "\n".join([*lines, hashlib.sha256(body).hexdigest()])
    scope = f"{day}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{keys.secret_key}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{keys.access_key}/{scope}"
    signed["Authorization"] = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return signed


# ------------------------------------------------------------------------------------------------------- objects of S3


PART_BYTES = 64 << 20
"""Size of the parts in which a larger file goes up. Parts grow if there would be more than `PARTS`."""
PARTS = 10_000
COPY_BYTES = 1 << 30
"""Size of the parts in which a larger object is copied. S3 copies at most 5 GiB at once."""
SAFE = "/-_.~"
"""Characters of a key that stay as they are in a URL."""
PAUSES = (0.5, 2.0, 5.0)
TIMEOUT = 60.0
KEYS_SECONDS = 600.0
"""Seconds between reads of the role's keys; they last for an hour or more."""
_Part = TypeVar("_Part")


class _RefusedError(StorageError):
    """S3's own refusal, with its ``code``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Objects:
    """Objects below ``url`` (``s3://bucket/prefix``), in a bucket of ``region``."""

    def __init__(self, url: str, environ: Mapping[str, str], *, region: str) -> None:
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._environ, self._region = environ, region
        self._keys: tuple[float, Credentials] | None = None

    def put(self, name: str, path: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Write the object ``name`` from a file, calling ``moved`` after each part. Raises `StorageError` and
        `OSError`."""
        address, size = self._address(name), path.stat().st_size

        def send(part_address: str, data: bytes) -> str:
            tag = self._ask("PUT", part_address, data)[1]["ETag"]
            moved()
            return tag

        with open(path, "rb") as stream:
            if size <= PART_BYTES:
                self._ask("PUT", address, stream.read())
                return
            part_bytes = max(PART_BYTES, -(-size // PARTS))
            self._in_parts(address, iter(lambda: stream.read(part_bytes), b""), send)

    def write(self, name: str, data: bytes) -> None:
        """Write the object ``name``. Raises `StorageError`."""
        self._ask("PUT", self._address(name), data)

    def copy(self, name: str, target: str, size: int) -> None:
        """Copy an object of ``size`` bytes within the bucket; S3 moves the bytes. Raises `StorageError`."""
        address = self._address(target)
        source = {"x-amz-copy-source": urllib.parse.quote(f"/{self._bucket}/{self._prefix}/{name}", safe=SAFE)}
        if size <= COPY_BYTES:
            self._ask("PUT", address, more=source)
            return

        def send(part_address: str, first: int) -> str:
            span = {"x-amz-copy-source-range": f"bytes={first}-{min(first + COPY_BYTES, size) - 1}"}
            answer, _ = self._ask("PUT", part_address, more={**source, **span})
            return unescape(_element("ETag", answer), {"&quot;": '"'})

        self._in_parts(address, range(0, size, COPY_BYTES), send)

    def read(self, name: str, path: Path) -> None:
        """Download the object ``name``. Raises `DigestError` if there is none, `StorageError` and `OSError`."""
        address = self._address(name)
        with open(path, "wb") as stream:
            while True:
                span = f"bytes={stream.tell()}-{stream.tell() + PART_BYTES - 1}"
                try:
                    data, headers = self._ask("GET", address, more={"Range": span})
                except _RefusedError as exc:
                    if exc.code == "InvalidRange" and stream.tell() == 0:
                        return  # an empty object
                    if exc.code in ("NoSuchKey", "404"):
                        raise DigestError(f"there is no {name} in S3") from None
                    raise
                stream.write(data)
                if stream.tell() >= int(headers.get("Content-Range", "0").rpartition("/")[2]):
                    return

    def remove(self, name: str) -> None:
        """Remove the object ``name``, if there is one. Raises `StorageError`."""
        self._ask("DELETE", self._address(name))

    def _in_parts(self, address: str, parts: Iterable[_Part], send: Callable[[str, _Part], str]) -> None:
        """Write an object in ``parts``; ``send`` writes one at its address and returns its tag."""
        upload = urllib.parse.quote(_element("UploadId", self._ask("POST", f"{address}?uploads=")[0]), safe="")
        query = f"uploadId={upload}"
        try:
            tags = [send(f"{address}?partNumber={number}&{query}", part) for number, part in enumerate(parts, 1)]
            rows = [
                f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
                for number, tag in enumerate(tags, 1)
            ]
            body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>"
            self._ask("POST", f"{address}?{query}", body.encode())
        except BaseException:
            with contextlib.suppress(StorageError):
                self._ask("DELETE", f"{address}?{query}")
            raise

    def _address(self, name: str) -> str:
        """Return the URL of an object: at the environment's endpoint, else at S3's own of the region."""
        path = urllib.parse.quote(f"{self._prefix}/{name}", safe=SAFE)
        endpoint = self._environ.get("AWS_ENDPOINT_URL_S3") or self._environ.get("AWS_ENDPOINT_URL")
        partition = self._environ.get("TRAINING_JOB_ARN", "arn:aws").split(":")[1]
        host = (endpoint or f"https://s3.{self._region}.{DNS.get(partition, DNS['aws'])}").rstrip("/")
        return f"{host}/{self._bucket}/{path}"

    def _ask(
        self, method: str, url: str, body: bytes = b"", *, more: Mapping[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the body and headers of the answer. Raises `StorageError` after a few failed tries."""
        for pause in (*PAUSES, None):
            keys, digest = self._credentials(), hashlib.sha256(body).hexdigest()
            headers = {"Content-Type": "application/octet-stream", "x-amz-content-sha256": digest, **(more or {})}
            signed = signed_headers(url, headers, body, keys, region=self._region, service="s3", method=method)
            request = urllib.request.Request(url, data=body, headers=signed, method=method)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                    data = answer.read()
                    if method != "GET" and b"<Error>" in data:  # S3 answers 200 before it knows
                        raise StorageError(f"S3 did not complete {method} of {url}: {_element('Code', data)}")
                    return data, answer.headers
            except urllib.error.HTTPError as exc:
                code = _element("Code", exc.read()) or str(exc.code)
                passing = exc.code >= 500 or exc.code == 429 or code in ("SlowDown", "RequestTimeout", "ExpiredToken")
                why = f"S3 refused {method} of {urllib.parse.urlsplit(url).path} ({code})"
                self._keys = None
                refusal: StorageError = _RefusedError(why, code)
            except (OSError, http.client.HTTPException) as exc:
                passing, why = True, f"{urllib.parse.urlsplit(url).netloc} does not answer: {exc}"
                refusal = StorageError(why)
            if not passing or pause is None:
                raise refusal
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _credentials(self) -> Credentials:
        now, known = time.monotonic(), self._keys
        if known is None or now - known[0] > KEYS_SECONDS:
            self._keys = known = now, credentials(self._environ)
        return known[1]  # another thread may clear `_keys` meanwhile


def _element(name: str, answer: bytes) -> str:
    """Return the text of the first element called ``name``."""
    match = re.search(f"<{name}>([^<]*)</{name}>", answer.decode("utf-8", "replace"))
    return match[1] if match else ""
