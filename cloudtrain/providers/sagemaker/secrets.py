"""Read AWS's secrets in a container with the job's own role. Standard library alone: images need have no SDK."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import StorageError
from ...runtime.http_json import ask
from .names import DNS

__all__ = ["Credentials", "credentials", "secret", "signed_headers"]

CONTAINER_HOST = "http://169.254.170.2"
SERVICES = {
    "secretsmanager": ("secretsmanager.GetSecretValue", "AWS_ENDPOINT_URL_SECRETS_MANAGER"),
    "ssm": ("AmazonSSM.GetParameter", "AWS_ENDPOINT_URL_SSM"),
}
"""Operation of each service, and the variable with another endpoint of it."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Keys that sign a call."""

    access_key: str
    secret_key: str
    token: str = ""


def secret(arn: str, environ: Mapping[str, str], *, region: str) -> str:
    """Return a secret (Secrets Manager) or parameter (SSM). Raises `StorageError`, never with the value."""
    _, partition, service, there, _ = arn.split(":", 4)
    region, (target, endpoint) = there or region, SERVICES[service]
    host = f"https://{service}.{region}.{DNS.get(partition, DNS['aws'])}"
    url = (environ.get(endpoint) or environ.get("AWS_ENDPOINT_URL") or host).rstrip("/") + "/"
    body = {"Name": arn, "WithDecryption": True} if service == "ssm" else {"SecretId": arn}
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": target}

    def request() -> urllib.request.Request:
        signed = signed_headers(url, headers, data, credentials(environ), region=region, service=service)
        return urllib.request.Request(url, data=data, headers=signed, method="POST")

    silent = f"; a container in a VPC needs an endpoint of {service}"
    answer = ask(request, what=target.rpartition(".")[2], how="allow the job's role to call it", silent=silent)
    if service == "ssm":
        return str(answer["Parameter"]["Value"])
    if "SecretString" in answer:
        return str(answer["SecretString"])
    return base64.b64decode(answer["SecretBinary"]).decode()


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
    told = ask(lambda: request, what=what, how=how, direct=True)
    return Credentials(
        access_key=told["AccessKeyId"], secret_key=told["SecretAccessKey"], token=told.get("Token") or ""
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
