"""Configure obstore for a bucket of S3 or OBS, or a container of Azure Blob Storage, as the vendor's own SDK would.

The provider's options come first, then fsspec's configuration of the scheme, then the SDK's variables and files. Raises
`SpecError` for a word that obstore cannot honour. Only credentials are asked of the network.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import AuthError, SpecError
from ..validate import url_scheme
from .files import TransferOptions

_AWS, _AZURE, _HUAWEI = "boto3", "azure-identity", "obstore"
SDKS = {"s3": _AWS, "s3a": _AWS, "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE, "obs": _HUAWEI}
"""The schemes that obstore serves, each with the package that gives credentials; OBS needs none for them."""
Keys = Callable[[], Mapping[str, Any]]

#: obstore's own variables that it takes whatever it is given; AWS's SDK knows none of them.
_AWS_ENCRYPTION = re.compile(r"AWS_(SERVER_SIDE_ENCRYPTION|SSE_\w+)")
#: Variables and keys of an AWS profile that may change S3's endpoint in ways that only botocore knows.
_AWS_RULES = re.compile(r"AWS_(USE_\w+_ENDPOINT|IGNORE_CONFIGURED_ENDPOINT_URLS|S3_US_EAST_1_REGIONAL_ENDPOINT)")
_PROFILE_RULES = re.compile(r"s3|s3_.*|services|use_.*|ignore_configured_endpoint_urls")
#: Regions whose endpoint is s3.REGION.amazonaws.com.
_PLAIN_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-(?!iso)[\w-]+")
_US = "us-east-1"
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AZURE_HOST = re.compile(
    r"(?P<account>[^.]+)\.(dfs|blob)\.(?P<cloud>core\.(windows\.net|usgovcloudapi\.net|chinacloudapi\.cn))"
)
_AZURE_SCOPE = "https://storage.azure.com/.default"
_PRINCIPAL = ("tenant_id", "client_id", "client_secret")
#: Variables with the path of a CA file, in order of precedence. obstore trusts that file and the system's authorities.
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


@dataclass(frozen=True, kw_only=True)
class ObstoreConfig:
    """An access to a bucket: ``kind`` is s3 or azure; ``config`` has obstore's names.

    ``keys`` returns the credentials for the next request, and raises the errors of the vendor's SDK. It is None for
    anonymous access. ``certificates`` are further CA certificates to trust (PEM).
    """

    kind: str
    bucket: str
    root: str
    config: Mapping[str, Any]
    keys: Keys | None = field(repr=False)
    certificates: bytes | None = field(default=None, repr=False)


def find_access(
    url: str, options: Mapping[str, Any], environ: Mapping[str, str], *, moving: TransferOptions
) -> ObstoreConfig:
    """Return the access to ``url``. Raises `SpecError` for what cannot be honoured, `AuthError` without credentials."""
    find = {_AWS: _s3, _AZURE: _azure, _HUAWEI: _obs}[SDKS[url_scheme(url)]]
    return find(url, _with_configured(url_scheme(url), options, environ), environ, moving)


def _with_configured(scheme: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return ``options`` over fsspec's for the scheme. fsspec is imported only if it may be configured."""
    folder = Path(environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec"))
    somewhere = folder.is_dir() or any(name.startswith("FSSPEC_") for name in environ)
    if not somewhere and "fsspec.config" not in sys.modules:
        return dict(options)
    from fsspec.config import conf

    found: dict[str, Any] = {}
    for name in (name for name, sdk in SDKS.items() if sdk == SDKS[scheme]):
        found |= conf.get(name) or {}
    inner = {**(found.get("client_kwargs") or {}), **(options.get("client_kwargs") or {})}
    return {**found, **options, **({"client_kwargs": inner} if inner else {})}


def _only(options: Mapping[str, Any], known: str, what: str = "") -> None:
    for name, value in options.items():
        if name not in known.split() and value is not None:
            hint = "remove it from fsspec's configuration (~/.config/fsspec, FSSPEC_ variables)"
            raise SpecError(f"fsspec's option {what}{name} is not supported for this URL", field="store", hint=hint)


def _true(value: object) -> bool:
    return str(value or "").lower() not in ("", "false", "0", "f", "no")


def _parts(url: str) -> tuple[str, str]:
    bucket, _, root = url.partition("://")[2].partition("/")
    root = root.rstrip("/")
    if root and not {"", ".", ".."}.isdisjoint(root.split("/")):
        raise SpecError(f"{url}: its path has an empty part, '.' or '..'", field="store")
    return bucket, root


def _certificates(path: str | None) -> bytes | None:
    """Return the configured CA certificates (PEM). Raises `SpecError` if they are not in one readable file."""
    try:
        return Path(path).read_bytes() if path else None
    except OSError as exc:
        hint = "set AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE or SSL_CERT_FILE to one file in PEM format"
        raise SpecError(f"the CA certificates in {path}: {exc.strerror}", field="store", hint=hint) from None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _checked_endpoint(endpoint: str) -> str:
    """Return the URL without a slash at its end. Raises `SpecError` for any other text: obstore would panic."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and len(endpoint.split()) == 1:
            return endpoint.rstrip("/")
    why, hint = f"its endpoint {endpoint!r} is not a URL", "write http://HOST:PORT or https://HOST"
    raise SpecError(why, field="store", hint=hint)


# ------------------------------------------------------------------------------------------------------------------- S3


def _s3(url: str, options: Mapping[str, Any], environ: Mapping[str, str], moving: TransferOptions) -> ObstoreConfig:
    _only(options, "anon client_kwargs endpoint_url key profile requester_pays secret session token")
    client = options.get("client_kwargs") or {}
    _only(client, "endpoint_url region_name", "client_kwargs.")
    if word := next((name for name in sorted(environ) if _AWS_ENCRYPTION.fullmatch(name)), None):
        hint = f"unset {word}, and set sse and sse_kms_key_id in cloudtrain.toml"
        raise SpecError(f"{word} is set, which AWS's SDK does not know", field="sse", hint=hint)
    bucket, root = _parts(url)
    if bucket.startswith("arn:") or bucket.endswith("--x-s3"):
        hint = "use the name of a general-purpose bucket"
        raise SpecError(f"{url}: ARNs and directory buckets are not supported", field="store", hint=hint)
    anonymous, keys = _true(options.get("anon")), _static_keys(options, environ)
    session, profile = options.get("session"), options.get("profile")
    region = client.get("region_name") or environ.get("AWS_DEFAULT_REGION")
    named = options.get("endpoint_url") or client.get("endpoint_url")
    endpoint = named or _first(environ, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    rules = any(map(_AWS_RULES.fullmatch, environ)) or not (endpoint or _PLAIN_REGION.fullmatch(region or _US))
    if session is None and (profile or rules or _configured(environ) or not (anonymous or keys)):
        session = _botocore(url, profile)
    if session is not None:
        region = client.get("region_name") or session.get_config_variable("region")
        scoped = session.get_scoped_config()
        endpoint = endpoint or scoped.get("endpoint_url")
        rules = rules or any(map(_PROFILE_RULES.fullmatch, scoped))
        rules = rules or not (endpoint or _PLAIN_REGION.fullmatch(region or _US))
    region, virtual = region or _US, False
    if rules:
        endpoint, virtual = _ruled_endpoint(session, bucket, region, named)
    endpoint = _checked_endpoint(str(endpoint or f"https://s3.{region}.amazonaws.com"))
    # obstore reads variables of its own for these: each is given, so that none of them counts.
    config: dict[str, Any] = {
        "region": region, "endpoint": endpoint, "aws_endpoint_url_s3": endpoint, "skip_signature": anonymous,
        "virtual_hosted_style_request": virtual, "conditional_put": "etag", "s3_express": False,
        "unsigned_payload": False, "request_payer": _true(options.get("requester_pays")),
    }  # fmt: skip
    if moving.sse:
        config["server_side_encryption"] = moving.sse
    if moving.sse_kms_key_id:
        config["sse_kms_key_id"] = moving.sse_kms_key_id
    bundle = session.get_config_variable("ca_bundle") if session is not None else environ.get("AWS_CA_BUNDLE")
    return ObstoreConfig(
        kind="s3",
        bucket=bucket,
        root=root,
        config=config,
        keys=None if anonymous else _aws_keys(url, options, keys, session),
        certificates=_certificates(bundle or _first(environ, _CERTIFICATES)),
    )


def _static_keys(options: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str, str | None] | None:
    """Return the keys among the options, else those of the environment; None for no complete pair."""
    key, secret, token = (options.get(name) for name in ("key", "secret", "token"))
    if key or secret or token:
        if not (key and secret):
            why = "fsspec has only one of the options key and secret"
            raise SpecError(why, field="store", hint="set both of them, or neither")
    else:
        key, secret, token = (environ.get(name) for name in _AWS_KEYS)
    return (str(key), str(secret), token) if key and secret else None


def _configured(environ: Mapping[str, str]) -> bool:
    """Return whether this machine has an AWS configuration."""
    if environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE"):
        return True
    files = (("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    return any(os.path.exists(os.path.expanduser(environ.get(name) or usual)) for name, usual in files)


def _botocore(url: str, profile: str | None) -> Any:
    """Return botocore's session: files, SSO, roles, web identity, containers, machines."""
    try:
        import botocore.session
    except ImportError:
        from .extras import extra_of, not_installed

        raise not_installed(f"{url_scheme(url)}://", extra_of(_AWS), field="store", named=[_AWS]) from None
    return botocore.session.Session(profile=profile)


def _ruled_endpoint(session: Any, bucket: str, region: str, endpoint: str | None) -> tuple[str, bool]:
    """Return the endpoint that botocore chooses, and whether the bucket is part of its host. Nothing is sent."""
    from botocore import UNSIGNED
    from botocore.awsrequest import AWSResponse
    from botocore.config import Config

    client = session.create_client(
        "s3", region_name=region, endpoint_url=endpoint, config=Config(signature_version=UNSIGNED)
    )
    chosen: list[str] = []

    def answer(request: Any, **_: Any) -> Any:
        chosen.append(request.url)
        return AWSResponse(request.url, 200, {}, _NoBody())

    client.meta.events.register("before-send.s3.HeadBucket", answer)
    client.head_bucket(Bucket=bucket)
    found = chosen[0].rstrip("/")
    if (urlsplit(found).hostname or "").startswith(f"{bucket}.".lower()):
        return found, True
    return found.removesuffix(f"/{bucket}"), False


class _NoBody(io.BytesIO):
    """An empty body, of an answer that no server sent."""

    def stream(self, **_: Any) -> Any:
        """Return no chunks."""
        return iter(())


def _aws_keys(url: str, options: Mapping[str, Any], static: tuple[str, str, str | None] | None, session: Any) -> Keys:
    """Return the keys among the options, else botocore's, else those of the environment."""
    if static is not None and (session is None or options.get("key")):
        plain = {"access_key_id": static[0], "secret_access_key": static[1], "token": static[2], "expires_at": None}
        return lambda: plain
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

    return keys


# ------------------------------------------------------------------------------------------------------------------ OBS


def _obs(url: str, options: Mapping[str, Any], environ: Mapping[str, str], moving: TransferOptions) -> ObstoreConfig:
    from .obs import HuaweiKeys, bucket_endpoint, find_keys, virtual

    _only(options, "client_kwargs key secret token")
    region = (options.get("client_kwargs") or {}).get("region_name") or environ.get("OBS_REGION")
    endpoint = environ.get("OBS_ENDPOINT") or (f"https://obs.{region}.myhuaweicloud.com" if region else "")
    endpoint = f"https://{endpoint}" if endpoint and "://" not in endpoint else endpoint
    if not endpoint:
        hint = "set OBS_REGION, such as cn-north-4, or OBS_ENDPOINT"
        raise SpecError(f"{url}: the region of the bucket is unknown", field="store", hint=hint)
    bucket, root = _parts(url)
    endpoint = _checked_endpoint(endpoint)
    inside = virtual(endpoint)
    endpoint = bucket_endpoint(endpoint, bucket) if inside else endpoint
    config = {
        "region": region or "region", "endpoint": endpoint, "aws_endpoint_url_s3": endpoint, "skip_signature": False,
        "virtual_hosted_style_request": inside, "conditional_put": "disabled", "s3_express": False,
        "unsigned_payload": False, "request_payer": False,
    }  # fmt: skip

    def keys() -> Mapping[str, Any]:
        if options.get("key"):
            found = HuaweiKeys(str(options["key"]), str(options.get("secret")), options.get("token") or "")
        else:
            found = find_keys(environ)
        now = datetime.now(timezone.utc)  # temporary keys are asked for each time
        return {
            "access_key_id": found.ak,
            "secret_access_key": found.sk,
            "token": found.token or None,
            "expires_at": now if found.token else None,
        }

    keys()
    bundle = _first(environ, _CERTIFICATES)
    return ObstoreConfig(
        kind="s3", bucket=bucket, root=root, config=config, keys=keys, certificates=_certificates(bundle)
    )


# ---------------------------------------------------------------------------------------------------------------- Azure


def _azure(url: str, options: Mapping[str, Any], environ: Mapping[str, str], moving: TransferOptions) -> ObstoreConfig:
    known = "account_host account_key account_name anon client_id client_secret connection_string sas_token tenant_id"
    _only(options, f"{known} authority disable_instance_discovery")
    if environ.get("AZURE_ENCRYPTION_KEY"):
        hint = "unset AZURE_ENCRYPTION_KEY"
        raise SpecError("AZURE_ENCRYPTION_KEY is set, which Azure's SDK does not know", field="store", hint=hint)

    def given(name: str) -> str:
        return str(options.get(name) or environ.get(f"AZURE_STORAGE_{name.upper()}") or "")

    place, root = _parts(url)
    container, _, host = place.partition("@")
    if not host and _AZURE_HOST.fullmatch(container):
        hint = f"write abfs://CONTAINER@{container}/…"
        raise SpecError(f"{url} names no container", field="store", hint=hint)
    words = _words(given("connection_string"))
    own_host = str(options.get("account_host", ""))
    account, endpoint = _connected(words, url, host) if words else _account(url, host, given, own_host)
    key = words.get("AccountKey", "") if words else given("account_key")
    sas = words.get("SharedAccessSignature", "") if words else given("sas_token")
    principal = {} if words or key or sas else {name: given(name) for name in _PRINCIPAL}
    anonymous = _true(given("anon")) and not (words or key or sas or any(principal.values()))
    identity = {name: options[name] for name in ("authority", "disable_instance_discovery") if name in options}
    # obstore reads variables of its own for these: each is given, so that none of them counts.
    config = {
        "account_name": account,
        "endpoint": _checked_endpoint(endpoint),
        "skip_signature": anonymous,
        "use_emulator": False,
        "use_fabric_endpoint": False,
    }
    return ObstoreConfig(
        kind="azure",
        bucket=container,
        root=root,
        config=config,
        keys=None if anonymous else _azure_keys(url, key, sas, principal, identity),
        certificates=_certificates(_first(environ, _CERTIFICATES)),
    )


def _account(url: str, host: str, given: Callable[[str], str], own_host: str) -> tuple[str, str]:
    """Return the account name and endpoint by the URL's host, else by the options and variables."""
    named = _AZURE_HOST.fullmatch(host)
    if host and not named and not own_host:
        hint = "set the host of its blobs: FSSPEC_ABFS_ACCOUNT_NAME=NAME FSSPEC_ABFS_ACCOUNT_HOST=NAME.blob.…"
        raise SpecError(f"{url}: {host} is not a host of a known Azure cloud", field="store", hint=hint)
    account = named["account"] if named else given("account_name")
    if not account:
        hint = "set AZURE_STORAGE_ACCOUNT_NAME, or write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/…"
        raise SpecError(f"{url}: the storage account is not named", field="store", hint=hint)
    cloud = named["cloud"] if named else "core.windows.net"
    return account, f"https://{own_host or f'{account}.blob.{cloud}'}"


def _words(string: str) -> dict[str, str]:
    """Return the words of a connection string, {} for none."""
    words = dict(part.split("=", 1) for part in string.strip().strip(";").split(";") if "=" in part)
    if string and not (words.get("AccountKey") or words.get("SharedAccessSignature")):
        raise SpecError("the connection string has neither AccountKey nor SharedAccessSignature", field="store")
    return words


def _connected(words: Mapping[str, str], url: str, host: str) -> tuple[str, str]:
    """Return a connection string's account name and endpoint; raise `SpecError` if the URL names another account."""
    endpoint = words.get("BlobEndpoint", "")
    account = words.get("AccountName") or re.sub(r"^https?://([^./:]+)\..*", r"\1", endpoint)
    if (named := _AZURE_HOST.fullmatch(host)) and named["account"] != account:
        hint = "unset AZURE_STORAGE_CONNECTION_STRING, or use that account's URL"
        raise SpecError(f"{url}: the connection string is of the account {account}", field="store", hint=hint)
    protocol, suffix = words.get("DefaultEndpointsProtocol", "https"), words.get("EndpointSuffix", "core.windows.net")
    return account, endpoint or f"{protocol}://{account}.blob.{suffix}"


def _azure_keys(url: str, key: str, sas: str, principal: Mapping[str, str], identity: Mapping[str, Any]) -> Keys:
    """Return the account key, else the signature, else tokens of azure-identity."""
    if key:
        try:
            base64.b64decode(key, validate=True)
        except ValueError:
            raise SpecError("the key of the storage account is not base64", field="store") from None
        return lambda: {"access_key": key, "expires_at": None}
    if sas:
        return lambda: {"sas_token": sas.removeprefix("?"), "expires_at": None}
    try:
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ImportError:
        from .extras import extra_of, not_installed

        raise not_installed(f"{url_scheme(url)}://", extra_of(_AZURE), field="store", named=[_AZURE]) from None
    if any(principal.values()):
        if lacking := [f"AZURE_STORAGE_{name.upper()}" for name, value in principal.items() if not value]:
            why = f"the service principal is incomplete: {', '.join(lacking)} not set"
            raise SpecError(why, field="store", hint="set that too, or unset the rest of the service principal")
        credential: Any = ClientSecretCredential(**principal, **identity)
    else:
        credential = DefaultAzureCredential(**identity)

    def token() -> Mapping[str, Any]:
        found = credential.get_token(_AZURE_SCOPE)
        return {"token": found.token, "expires_at": datetime.fromtimestamp(found.expires_on, timezone.utc)}

    return token
