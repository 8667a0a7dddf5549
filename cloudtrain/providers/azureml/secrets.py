"""Read Key Vault's secrets in a job with its own identity. Standard library alone: images need have no SDK."""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Mapping

from ...errors import StorageError
from ...runtime.http_json import ask

__all__ = ["place", "secret", "token"]

VAULTS = ("vault.azure.net", "vault.azure.cn", "vault.usgovcloudapi.net")
"""Domains of Key Vault. A token is for the vault's domain, by default the first."""
VAULT_VERSION = "7.4"
IMDS = "http://169.254.169.254/metadata/identity/oauth2/token"


def secret(reference: str, environ: Mapping[str, str]) -> str:
    """Return ``VAULT/NAME[/VERSION]``; a vault with a dot is its host name. Raises `StorageError`, never with the
    value."""
    url, resource = place(reference)
    what, how = f"Key Vault {reference.partition('/')[0]}", "give it 'Key Vault Secrets User'"
    headers = {"Authorization": f"Bearer {token(resource, environ)}"}
    return _text("value", url, headers, what=what, how=how, direct=False)


def place(reference: str) -> tuple[str, str]:
    """Return the URL of a secret, and the resource of its token."""
    vault, _, name = reference.partition("/")
    host = vault if "." in vault else f"{vault}.{VAULTS[0]}"
    domain = next((d for d in VAULTS if host.partition(":")[0].endswith(f".{d}")), VAULTS[0])
    return f"https://{host}/secrets/{name}?api-version={VAULT_VERSION}", f"https://{domain}"


def token(resource: str, environ: Mapping[str, str]) -> str:
    """Return a token of the job's managed identity for ``resource``, from this machine's endpoint.

    The order is azure-identity 1.27's: App Service's endpoint, the one of Azure ML's clusters, else the machine's.
    """
    version, word = "2018-02-01", "client_id"
    if environ.get("IDENTITY_ENDPOINT") and environ.get("IDENTITY_HEADER"):
        url, headers = environ["IDENTITY_ENDPOINT"], {"X-IDENTITY-HEADER": environ["IDENTITY_HEADER"]}
        version = "2019-08-01"
    elif environ.get("MSI_ENDPOINT") and environ.get("MSI_SECRET"):
        url, headers = environ["MSI_ENDPOINT"], {"secret": environ["MSI_SECRET"]}
        version, word = "2017-09-01", "clientid"
    else:
        url, headers = IMDS, {"Metadata": "true"}
    client = environ.get("AZURE_CLIENT_ID") or environ.get("DEFAULT_IDENTITY_CLIENT_ID")
    query = urllib.parse.urlencode({"api-version": version, "resource": resource, **({word: client} if client else {})})
    what, how = "the token of the job's identity", "give the job an identity (azureml.identity)"
    return _text("access_token", f"{url}?{query}", headers, what=what, how=how, direct=True)


def _text(key: str, url: str, headers: Mapping[str, str], *, what: str, how: str, direct: bool) -> str:
    """Return the text at ``key`` of the JSON answer. Raises `StorageError`."""
    told = ask(lambda: urllib.request.Request(url, headers=dict(headers)), what=what, how=how, direct=direct)
    try:
        return str(told[key])
    except (KeyError, TypeError):
        raise StorageError(f"{what}: an answer without a {key.removeprefix('access_')}") from None
