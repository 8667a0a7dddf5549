"""``Session`` and ``get_execution_role`` of SageMaker's SDK v2: who calls, in which region, as which role jobs run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CloudtrainError, SpecError
from ..settings.settings import Settings
from ..storage.extras import translated
from ..validate import did_you_mean
from .keywords import NAME, settings_of

__all__ = ["METADATA", "NotCarriedError", "Session", "get_execution_role"]

METADATA = Path("/opt/ml/metadata/resource-metadata.json")
"""Where a notebook of the platform's own names the role that it runs as."""
_CALLER = re.compile(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.*")

_INSTEAD: dict[str, str] = {
    "upload_data": "give fit the local folder: it is uploaded once, at its own digest",
    "download_data": "`cloudtrain pull RUN` brings what a job has left",
    "logs_for_job": "`cloudtrain logs RUN`, or logs() of the estimator",
    "describe_training_job": "`cloudtrain status RUN`, or boto_session.client(...)",
    "wait_for_job": "`cloudtrain wait RUN`, or latest_training_job.wait()",
    "stop_training_job": "`cloudtrain cancel RUN`, or latest_training_job.stop()",
}
"""Methods of v2's Session, and what to do instead."""


class NotCarriedError(SpecError, AttributeError):
    """A name of v2 that is not carried over; also what `hasattr` asks for."""


class Session:
    """The caller of v2's jobs: region, profile and default bucket. Nothing is called before it is asked for.

    ``boto_session`` is a ``boto3.Session``; without one the environment and AWS's own files decide.
    """

    local_mode = False

    def __init__(
        self,
        boto_session: Any = None,
        *,
        default_bucket: str | None = None,
        default_bucket_prefix: str | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value is not None:
                raise SpecError("is not carried over", field=name, hint="leave it out: boto_session says who calls")
        if boto_session is not None:
            self.boto_session = boto_session
        self._default_bucket_name_override, self.default_bucket_prefix = default_bucket, default_bucket_prefix

    @cached_property
    def boto_session(self) -> Any:
        """boto3's session. Raises `SpecError` where boto3 is missing."""
        with translated(lambda exc: None, needs="boto3", extra=NAME):
            import boto3
        return boto3.Session()

    @cached_property
    def boto_region_name(self) -> str:
        """The region. Raises `SpecError` where none is known."""
        given = vars(self).get("boto_session")
        region = given.region_name if given is not None else None
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = region or self.boto_session.region_name
        if not region:
            raise SpecError("the region is not known", field="sagemaker_session", hint="set AWS_REGION")
        return str(region)

    def default_bucket(self) -> str:
        """Return the bucket that v2 takes where none is given. It is not created."""
        return self._default_bucket_name_override or f"{NAME}-{self.boto_region_name}-{self.account_id()}"

    def account_id(self) -> str:
        """Return the account of the caller, by a call to AWS."""
        return str(_provider(self).principal().split(":")[4])

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise NotCarriedError("is not carried over", field=name, hint=_INSTEAD[name])
        near = did_you_mean(name, [*_INSTEAD, *dir(type(self))])
        raise AttributeError(f"Session has no {name!r}" + (f"; {near}" if near else ""))


def get_execution_role(sagemaker_session: Any = None, use_default: bool = False) -> str:
    """Return the ARN of the role that jobs run as: the setting, a notebook's own, or the role of the caller.

    Raises `SpecError` where the caller is no role. ``use_default`` is refused: no role is ever created.
    """
    if use_default:
        raise SpecError("is not carried over: no role is created for you", field="use_default", hint=_HOW)
    provider = _provider(sagemaker_session)
    if provider.settings.role:
        return str(provider.settings.role)
    try:
        return str(json.loads(METADATA.read_text(encoding="utf-8"))["ExecutionRoleArn"])
    except (OSError, ValueError, KeyError):
        pass
    caller = provider.principal()
    match = _CALLER.fullmatch(caller)
    if match is None:
        raise SpecError(f"{caller} is not a role", field="role", hint=_HOW)
    try:
        return str(provider.account.call("iam", "get_role", RoleName=match[3])["Role"]["Arn"])
    except CloudtrainError:  # it may not look, and few roles have a path
        return f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}"


_HOW = f'add to cloudtrain.toml: [{NAME}] role = "arn:aws:iam::ACCOUNT:role/NAME"'


def _provider(session: Any) -> Any:
    """Return the provider as this session calls."""
    given: Mapping[str, Any] = {} if session is None else {"sagemaker_session": session}
    return Settings.load(overrides=settings_of(given), provider=NAME).make_provider(NAME)
