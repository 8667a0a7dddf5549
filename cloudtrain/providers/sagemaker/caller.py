"""Sign in this machine: one session for the calls to AWS, and the same credentials for the store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...storage.credential import Credential

if TYPE_CHECKING:
    from . import Settings

__all__ = ["sign_in", "storage"]

SESSION_NAME = "cloudtrain"


def sign_in(settings: Settings, region: str) -> Any:
    """Return a new boto3 session of the profile, as the role to assume if one is set.

    botocore renews a profile's expiring credentials (SSO, a process, a role), and the assumed role. Only a new session
    reads keys again that were rotated in a file.
    """
    import boto3
    import botocore.session
    from botocore.credentials import DeferredRefreshableCredentials

    session = boto3.Session(profile_name=settings.profile or None, region_name=region or None)
    role = settings.role_to_assume
    if not role:
        return session

    def assumed() -> dict[str, str]:
        keys = session.client("sts").assume_role(RoleArn=role, RoleSessionName=SESSION_NAME)["Credentials"]
        return {
            "access_key": keys["AccessKeyId"],
            "secret_key": keys["SecretAccessKey"],
            "token": keys["SessionToken"],
            "expiry_time": keys["Expiration"].isoformat(),
        }

    inner = botocore.session.Session(profile=settings.profile or None)
    inner._credentials = DeferredRefreshableCredentials(refresh_using=assumed, method="sts-assume-role")
    return boto3.Session(botocore_session=inner, region_name=region or None)


def storage(settings: Settings) -> Mapping[str, Any]:
    """Return a store's options for the same caller and region. Other options of fsspec's configuration stay."""
    options: dict[str, Any] = {}
    if settings.region:
        from fsspec.config import conf

        # An option replaces the configured one whole, and that may name the user's own server.
        own = conf.get("s3", {}).get("client_kwargs")
        options["client_kwargs"] = {**(own if isinstance(own, Mapping) else {}), "region_name": settings.region}
    if settings.profile or settings.role_to_assume:
        session = sign_in(settings, settings.region)
        own = session._session  # botocore's, which boto3 does not expose
        options["session"] = Credential(own=own, fsspec=partial(_asynchronous, session, settings.profile))
    return options


def _asynchronous(session: Any, profile: str) -> Any:
    """Return s3fs's kind of session, with the current credentials of ``session``."""
    from aiobotocore.credentials import AioCredentials
    from aiobotocore.session import AioSession

    source = session.get_credentials()

    class Credentials(AioCredentials):  # type: ignore[misc]
        async def get_frozen_credentials(self) -> Any:
            return source.get_frozen_credentials()

    made = AioSession(profile=profile or None)
    if source is not None:
        made._credentials = Credentials("", "")
    return made
