"""Configure obstore with the endpoint, region and credentials that fsspec would use.

Each library reads its own environment variables and configuration. If only one library knows a word, or no test has
compared a credential, this raises `Unproven`: fsspec then moves the bytes. Only credentials are asked of the network.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import AuthError
from ..validate import url_scheme
from .credential import Credential
from .files import TransferOptions

__all__ = ["ObstoreConfig", "Unproven", "authorities", "find_access"]

#: Variables that change nothing, or the same for both libraries. With any other AWS variable, fsspec moves the bytes.
_AWS_WORDS = re.compile(
    "AWS_("
    "ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|(DEFAULT_)?(REGION|PROFILE|OUTPUT)|CONFIG_FILE"
    "|SHARED_CREDENTIALS_FILE|ENDPOINT_URL(_.*)?|ROLE_ARN|ROLE_SESSION_NAME|WEB_IDENTITY_TOKEN_FILE"
    "|CONTAINER_CREDENTIALS_(RELATIVE|FULL)_URI|CONTAINER_AUTHORIZATION_TOKEN(_FILE)?|EC2_METADATA_DISABLED"
    "|METADATA_SERVICE_(TIMEOUT|NUM_ATTEMPTS)|MAX_ATTEMPTS|RETRY_MODE|EXECUTION_ENV|PAGER|STS_REGIONAL_ENDPOINTS"
    "|ALLOW_HTTP|SDK_LOAD_CONFIG|CA_BUNDLE)"
)
#: Keys of an AWS profile that change requests to S3, and that only botocore reads.
_AWS_CONFIGURED = re.compile(r"s3|s3_.*|services|ca_bundle|use_.*|ignore_configured_endpoint_urls|sigv4a.*|request_.*")
_AZURE_WORDS = frozenset(
    f"AZURE_STORAGE_{word}" for word in ("CONNECTION_STRING", "ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN")
)
_AZURE_OTHERS = frozenset({"AZURE_SKIP_SIGNATURE", "AZURE_USE_FABRIC_ENDPOINT", "AZURE_ENCRYPTION_KEY"})
_AZURE_HOST = re.compile(r"(?P<account>[^.]+)\.(dfs|blob)\.core\.windows\.net")
_AZURE_SCOPE = "https://storage.azure.com/.default"
#: Names of one and the same fsspec file system, which reads the configuration of each of them.
_ALIASES = ({"s3", "s3a"}, {"abfs", "abfss", "az"}, {"gs", "gcs"})
#: Variables with the path of a CA file, in order of precedence. obstore trusts that file and the system's authorities.
_CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


class Unproven(Exception):
    """The reason why fsspec moves a URL's bytes. ``demanded``: a user who chose obstore gets it as an error."""

    def __init__(self, why: str, *, demanded: bool = True) -> None:
        self.demanded = demanded
        super().__init__(why)


@dataclass(frozen=True, kw_only=True)
class ObstoreConfig:
    """An access to a bucket: ``kind`` is s3, azure or gcs; ``config`` has obstore's names.

    ``keys`` returns the credentials for the next request. It raises the errors of the vendor's SDK.
    """

    kind: str
    bucket: str
    root: str
    config: Mapping[str, str]
    keys: Callable[[], Mapping[str, Any]] = field(repr=False)


def find_access(
    url: str, options: Mapping[str, Any], environ: Mapping[str, str], *, moving: TransferOptions
) -> ObstoreConfig:
    """Return the access that fsspec has with ``options``. Raises `Unproven`, or `AuthError` without credentials."""
    scheme = url_scheme(url)
    find = {"s3": _s3, "abfs": _azure, "abfss": _azure, "az": _azure, "gs": _gcs}.get(scheme)
    if find is None:
        raise Unproven(f"it does not know {scheme}: URLs", demanded=False)
    _check_fsspec_is_bare(scheme, environ)
    return find(url, options, environ, moving)


def authorities(environ: Mapping[str, str]) -> bytes | None:
    """Return the configured CA certificates (PEM). Raises `Unproven` if they are not in one readable file."""
    path = next((environ[name] for name in _CERTIFICATES if environ.get(name)), None)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as exc:
        raise Unproven(f"{path}: {exc.strerror}") from None


def _check_fsspec_is_bare(scheme: str, environ: Mapping[str, str]) -> None:
    """Raise `Unproven` if fsspec is configured for ``scheme``. fsspec is imported only if it may be: that is slow."""
    folder = Path(environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec"))
    somewhere = folder.is_dir() or any(name.startswith("FSSPEC_") for name in environ)
    if not somewhere and "fsspec.config" not in sys.modules:
        return
    from fsspec.config import conf

    if any(conf.get(name) for names in _ALIASES if scheme in names for name in names):
        raise Unproven(f"fsspec is configured for {scheme}: URLs")


def _only(options: Mapping[str, Any], known: str, what: str = "") -> None:
    for name, value in options.items():
        if name not in known.split() and value is not None:
            raise Unproven(f"{what}{name} is fsspec's own option")


def _parts(url: str) -> tuple[str, str]:
    bucket, _, root = url.partition("://")[2].partition("/")
    root = root.rstrip("/")
    if root and not {"", ".", ".."}.isdisjoint(root.split("/")):
        raise Unproven("its path is not a plain one")
    return bucket, root


# ------------------------------------------------------------------------------------------------------------------- S3


def _s3(url: str, options: Mapping[str, Any], environ: Mapping[str, str], moving: TransferOptions) -> ObstoreConfig:
    _only(options, "client_kwargs session endpoint_url key secret token profile")
    client = options.get("client_kwargs") or {}
    _only(client, "endpoint_url region_name", "client_kwargs.")
    if other := sorted(name for name in environ if name.startswith("AWS_") and not _AWS_WORDS.fullmatch(name)):
        raise Unproven(f"{other[0]} is set")
    bucket, root = _parts(url)
    if bucket.startswith("arn:") or bucket.endswith("--x-s3"):
        raise Unproven("access points and directory buckets are not tested")
    keys, configured = _aws_keys(url, options, environ)
    endpoint = (
        options.get("endpoint_url")
        or client.get("endpoint_url")
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or configured.get("endpoint_url")
    )
    region = client.get("region_name") or environ.get("AWS_DEFAULT_REGION") or configured.get("region") or "us-east-1"
    if not endpoint and not re.match(r"(af|ap|ca|eu|il|me|mx|sa|us)-(?!iso)", region):
        raise Unproven(f"the endpoint of {region} is not tested")
    config = {"region": region}
    if endpoint:
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    if moving.sse:
        config["server_side_encryption"] = moving.sse
    if moving.sse_kms_key_id:
        config["sse_kms_key_id"] = moving.sse_kms_key_id
    return ObstoreConfig(kind="s3", bucket=bucket, root=root, config=config, keys=keys)


def _aws_keys(
    url: str, options: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Callable[[], Mapping[str, Any]], Mapping[str, str]]:
    """Return the function that gives credentials, and the region and endpoint_url of AWS's configuration."""
    session, profile = options.get("session"), options.get("profile")
    if session is not None and not isinstance(session, Credential):
        raise Unproven("session is fsspec's own option")
    if session is None and profile is None and not _configured(environ):
        key, secret, token = (options.get(name) for name in ("key", "secret", "token"))
        if not (key or secret or token):
            words = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
            key, secret, token = (environ.get(name) for name in words)
        if key and secret:
            plain = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
            return lambda: plain, {}
    if any(options.get(name) for name in ("key", "secret", "token")):
        raise Unproven("keys among the options, and a configuration beside them, are not tested")
    return _botocore_keys(url, session.own if isinstance(session, Credential) else None, profile)


def _configured(environ: Mapping[str, str]) -> bool:
    """Return whether this machine has an AWS configuration."""
    if environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE"):
        return True
    files = (("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    return any(os.path.exists(os.path.expanduser(environ.get(name) or usual)) for name, usual in files)


def _botocore_keys(
    url: str, session: Any, profile: str | None
) -> tuple[Callable[[], Mapping[str, Any]], Mapping[str, str]]:
    """Use botocore's chain: files, SSO, roles, web identity, containers, machines. It renews expired credentials."""
    if session is None:
        try:
            import botocore.session
        except ImportError:
            raise Unproven("botocore is not installed") from None
        session = botocore.session.Session(profile=profile)
    scoped = session.get_scoped_config()
    if word := next((name for name in scoped if _AWS_CONFIGURED.fullmatch(name)), None):
        raise Unproven(f"AWS's configuration has {word}")
    credentials = session.get_credentials()
    if credentials is None:
        raise AuthError(f"{url}: no access: Unable to locate credentials", hint="run: aws configure, or: aws sso login")

    def keys() -> Mapping[str, Any]:
        found = credentials.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc),  # botocore knows the expiry, so it is asked each time
        }

    region = session.get_config_variable("region")
    return keys, {name: str(v) for name, v in (("region", region), ("endpoint_url", scoped.get("endpoint_url"))) if v}


# ---------------------------------------------------------------------------------------------------------- Azure, GCS


def _azure(url: str, options: Mapping[str, Any], environ: Mapping[str, str], moving: TransferOptions) -> ObstoreConfig:
    known = (
        "anon account_name account_host account_key sas_token connection_string authority disable_instance_discovery"
    )
    _only(options, known)
    if options.get("anon"):
        raise Unproven("anonymous access is not tested")
    for name in sorted(environ):
        if (name.startswith("AZURE_STORAGE_") and name not in _AZURE_WORDS) or name in _AZURE_OTHERS:
            raise Unproven(f"{name} is set")

    def given(name: str) -> str:
        return str(options.get(name) or environ.get(f"AZURE_STORAGE_{name.upper()}") or "")

    place, root = _parts(url)
    container, _, host = place.partition("@")
    named = _AZURE_HOST.fullmatch(host)
    if host and not named and not options.get("account_name"):
        raise Unproven("the account of another cloud is not named")
    if not host and _AZURE_HOST.fullmatch(place):
        raise Unproven("a URL without its container is adlfs's own")
    if string := given("connection_string"):
        words = dict(part.split("=", 1) for part in string.strip().strip(";").split(";") if "=" in part)
        account, endpoint = _azure_account(words)
        key, sas = words.get("AccountKey", ""), words.get("SharedAccessSignature", "")
    else:
        account = str(options.get("account_name") or (named["account"] if named else given("account_name")))
        endpoint = f"https://{options.get('account_host') or f'{account}.blob.core.windows.net'}"
        key, sas = given("account_key"), given("sas_token")
    if not account:
        raise Unproven("the account is not named")
    config = {"account_name": account, "endpoint": endpoint.rstrip("/")}
    keys = _azure_keys(key, sas, {k: options[k] for k in ("authority", "disable_instance_discovery") if k in options})
    return ObstoreConfig(kind="azure", bucket=container, root=root, config=config, keys=keys)


def _azure_account(words: Mapping[str, str]) -> tuple[str, str]:
    """Return the account name and endpoint of a connection string."""
    if not (words.get("AccountKey") or words.get("SharedAccessSignature")):
        raise Unproven("a connection string without a key and signature is not tested")
    endpoint = words.get("BlobEndpoint", "")
    account = words.get("AccountName") or re.sub(r"^https?://([^./:]+)\..*", r"\1", endpoint)
    protocol, suffix = words.get("DefaultEndpointsProtocol", "https"), words.get("EndpointSuffix", "core.windows.net")
    return account, endpoint or f"{protocol}://{account}.blob.{suffix}"


def _azure_keys(key: str, sas: str, identity: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    if key:
        try:
            base64.b64decode(key, validate=True)
        except ValueError:
            raise Unproven("the account key is not base64") from None
        return lambda: {"access_key": key, "expires_at": None}
    if sas:
        raise Unproven("what it removes by a shared access signature is not tested")
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise Unproven("azure-identity is not installed") from None
    credential = DefaultAzureCredential(**identity)

    def token() -> Mapping[str, Any]:
        found = credential.get_token(_AZURE_SCOPE)
        return {"token": found.token, "expires_at": datetime.fromtimestamp(found.expires_on, timezone.utc)}

    return token


def _gcs(url: str, options: Mapping[str, Any], environ: Mapping[str, str], moving: TransferOptions) -> ObstoreConfig:
    """Configure GCS only if the user chose obstore: it uses the XML API, and no faithful test server has that."""
    _only(options, "token")
    credentials: Any = options.get("token")
    if moving.mover != "obstore":
        raise Unproven("Cloud Storage is not tested through it")
    if environ.get("STORAGE_EMULATOR_HOST"):
        raise Unproven("an emulator of Cloud Storage speaks another API")
    if not hasattr(credentials, "refresh"):
        raise Unproven("it needs the credentials of google-auth, as a provider gives them")

    def token() -> Mapping[str, Any]:
        from google.auth.transport.requests import Request

        credentials.refresh(Request())
        return {"token": credentials.token, "expires_at": credentials.expiry.replace(tzinfo=timezone.utc)}

    bucket, root = _parts(url)
    return ObstoreConfig(kind="gcs", bucket=bucket, root=root, config={}, keys=token)
