"""Read Secret Manager's secrets in a job as its service account. Standard library alone: images need have no SDK."""

from __future__ import annotations

import base64
import urllib.request
from collections.abc import Mapping

from ...errors import StorageError
from ...runtime.http_json import ask

__all__ = ["secret", "token"]

SERVICE = "https://secretmanager.googleapis.com"
SERVICE_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"
"""gcloud's own variable for another endpoint."""
METADATA = "metadata.google.internal"
METADATA_VARIABLE = "GCE_METADATA_HOST"
"""The variable of Google's own libraries for another metadata server."""


def secret(resource: str, environ: Mapping[str, str]) -> str:
    """Return the value of ``projects/P/secrets/S[/versions/V]`` (default: newest). Raises `StorageError`, never with
    it."""
    version = resource if "/versions/" in resource else f"{resource}/versions/latest"
    service = (environ.get(SERVICE_VARIABLE) or SERVICE).rstrip("/")
    request = urllib.request.Request(
        f"{service}/v1/{version}:access", headers={"Authorization": f"Bearer {token(environ)}"}
    )
    how = "give the job's service account the role Secret Manager Secret Accessor"
    told = ask(lambda: request, what=f"secret {version}", how=how)
    try:
        return base64.b64decode(told["payload"]["data"]).decode()
    except (KeyError, TypeError, ValueError):
        raise StorageError(f"secret {version}: an answer without text") from None


def token(environ: Mapping[str, str]) -> str:
    """Return a token of the job's service account, from the machine's metadata server. Raises `StorageError`."""
    host = environ.get(METADATA_VARIABLE) or METADATA
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    what, how = "the token of the job's service account", "set vertex.service_account"
    told = ask(lambda: request, what=what, how=how, direct=True)
    try:
        return str(told["access_token"])
    except (KeyError, TypeError):
        raise StorageError(f"{what}: an answer without a token") from None
