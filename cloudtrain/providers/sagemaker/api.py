"""Call AWS over boto3, and translate its exceptions. Only an expired session's call is retried: `submit` and `run`
retry the rest."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ... import errors
from ...job.job import run_tag
from ...provider_api.protocol import Request, Shell, python_command, shell_arguments
from ...storage.extras import translated
from ...validate import url_scheme
from .._cloud import ANOTHER_ID, unless_over
from .node import CHANNELS, INPUTS
from .request import FIELDS, TAG_RUN
from .validate import field_at

if TYPE_CHECKING:
    from . import Settings

TIMEOUT = 30
SESSION_NAME = "cloudtrain"
FINAL = ("Completed", "Failed", "Stopped")
_ARN = re.compile(r"arn:aws[a-z-]*:sagemaker:(?P<region>[a-z0-9-]+):\d{12}:training-job/(?P<name>.+)")

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
STALE = EXPIRED | {"InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException"}
"""Error codes of a session whose keys were replaced after it read them."""
_CODES: Mapping[type[errors.CloudtrainError], str] = {
    errors.AuthError: """
        ExpiredToken ExpiredTokenException RequestExpired
        AccessDenied AccessDeniedException AuthFailure IncompleteSignature InvalidAccessKeyId InvalidClientTokenId
        InvalidSignatureException MissingAuthenticationToken MissingAuthenticationTokenException NotAuthorized
        OptInRequired SignatureDoesNotMatch UnauthorizedOperation UnrecognizedClientException""",
    errors.LostContactError: """
        InternalError InternalFailure InternalServerError InternalServerException LimitExceeded PriorRequestNotComplete
        RequestLimitExceeded RequestThrottled RequestThrottledException RequestTimeout RequestTimeoutException
        ServiceUnavailable ServiceUnavailableException SlowDown Throttling ThrottledException ThrottlingException
        TooManyRequestsException""",
    errors.QuotaError: "ResourceLimitExceeded",
    errors.ConflictError: "ResourceInUse",
    errors.NotFoundError: """
        ResourceNotFound ResourceNotFoundException NoSuchEntity ImageNotFoundException RepositoryNotFoundException""",
    errors.SpecError: "InvalidParameterException ValidationException",
}
CODES: Mapping[str, type[errors.CloudtrainError]] = {
    code: kind for kind, codes in _CODES.items() for code in codes.split()
}
"""Error class of each AWS code. Any other code is the platform's failure, or with status 5xx a passing one."""
#: Messages of a ValidationException that mean another error.
_SAID: tuple[tuple[re.Pattern[str], type[errors.CloudtrainError]], ...] = (
    (re.compile(r"resource not found|not find (the )?training job", re.I), errors.NotFoundError),
    (re.compile(r"assume (the )?role|not authorized|access ?denied|PassRole", re.I), errors.AuthError),
)
_CONSTRAINT = re.compile(r"Value .*? at '([A-Za-z.]+)[^']*' failed to satisfy constraint", re.S)
_LIST = re.compile(r"\[[^\]]{80,}\]")
_QUOTA = re.compile(r"service limit '([^']+)'")
_REGION = "set sagemaker.region, or the variable AWS_REGION"
HELP: Mapping[str, str] = {
    "region": "choose another region or type: aws ec2 describe-instance-type-offerings lists those of a region",
    "quota": "ask for more: aws service-quotas list-service-quotas --service-code sagemaker",
    "expired": "sign in again (aws sso login, or new keys); the submitted run continues",
    "none": "sign in (aws configure, aws sso login), or set profile",
    "policy": "let the caller's policy allow that; docs/sagemaker.md has one",
    "role": "let the caller pass it (iam:PassRole) and SageMaker assume it (its trust policy); see docs/sagemaker.md",
}


def job_of(native_id: str) -> tuple[str, str]:
    """Return (region, name) of a job's ARN; a bare name has an empty region."""
    match = _ARN.fullmatch(native_id)
    return (match["region"], match["name"]) if match else ("", native_id)


def error_of(exc: Exception) -> errors.CloudtrainError | None:
    """Return the error for one of boto3's exceptions, or None for any other: the provider's whole table."""
    import boto3.exceptions
    import botocore.exceptions as known

    if isinstance(exc, known.ClientError):
        return _refusal(exc)
    text = " ".join(str(exc).split())
    unknown = f"the installed boto3 does not know this request: {text}"
    no_profile = errors.SpecError(
        text, field="sagemaker.profile", hint="to list the profiles, run: aws configure list-profiles"
    )
    expired = (known.UnauthorizedSSOTokenError, known.SSOTokenLoadError, known.TokenRetrievalError)
    unread = (known.CredentialRetrievalError, known.NoAuthTokenError, known.RefreshWithMFAUnsupportedError)
    rows: tuple[tuple[Any, errors.CloudtrainError], ...] = (
        (known.ProfileNotFound, no_profile),
        (known.NoRegionError, errors.SpecError("is not set", field="sagemaker.region", hint=_REGION)),
        (
            known.ParamValidationError,
            errors.SpecError(unknown, field="options", hint="run: pip install --upgrade boto3"),
        ),
        (expired, errors.AuthError(text, hint=HELP["expired"])),
        (
            (known.NoCredentialsError, known.PartialCredentialsError),
            errors.AuthError("no AWS credentials", hint=HELP["none"]),
        ),
        (unread, errors.AuthError(text, hint=HELP["none"])),
        ((known.HTTPClientError, known.ConnectionError), errors.LostContactError(f"AWS does not answer: {text}")),
        ((known.BotoCoreError, boto3.exceptions.Boto3Error), errors.PlatformError(f"{type(exc).__name__}: {text}")),
    )
    return next((error for kinds, error in rows if isinstance(exc, kinds)), None)


def _refusal(exc: Any) -> errors.CloudtrainError:
    error = exc.response.get("Error", {})
    code, message = str(error.get("Code", "")), " ".join(str(error.get("Message", "")).split())
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    kind: type[errors.CloudtrainError] | None = CODES.get(code)
    if code == "ValidationException":
        kind = next((other for pattern, other in _SAID if pattern.search(message)), errors.SpecError)
    if kind is errors.QuotaError and "not available in this region" in message:
        kind = errors.CapacityError  # no quota brings the machine there: a fallback moves on
    if kind is None:
        kind = errors.LostContactError if status >= 500 or status == 429 else errors.PlatformError
    text, hint = f"{exc.operation_name}: {message or code or f'status {status}'}", ""
    if kind is errors.SpecError:
        return _blamed(text)
    if kind is errors.AuthError and "not authorized to perform" in message and "PassRole" not in message:
        text, hint = f"{text} ({code})", HELP["policy"]
    elif kind is errors.AuthError:
        role = "role" in message.lower()  # also iam:PassRole
        text, hint = f"{text} ({code})", HELP["expired" if code in EXPIRED else "role" if role else "none"]
    elif kind is errors.CapacityError:
        hint = HELP["region"]
    elif kind is errors.QuotaError:
        named = _QUOTA.search(message)
        hint = HELP["quota"] + (f" (quota {named[1]!r})" if named else "")
    elif kind is errors.LostContactError:
        text = f"AWS does not answer now: {code}: {message}"
    return kind(text, hint=hint)


def _blamed(text: str) -> errors.SpecError:
    """Return the error with our field for the field that AWS names, without AWS's list of allowed values."""
    said = _CONSTRAINT.search(text)
    path = [part[:1].upper() + part[1:] for part in said[1].split(".")] if said else []
    return errors.SpecError(_LIST.sub("[...]", text), field=field_at(FIELDS, path))


class Account:
    """One session, and its clients by service and region. A session with rejected credentials is replaced."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = threading.RLock()

    def call(self, service: str, operation: str, *, region: str = "", **arguments: Any) -> Any:
        """Return the answer. Raises only cloudtrain's errors."""
        try:
            return self._call(service, operation, region or self.settings.region, arguments)
        except errors.AuthError as exc:
            if not any(code in str(exc) for code in STALE):
                raise
            with self._lock:
                self._session, self._clients = None, {}
            return self._call(service, operation, region or self.settings.region, arguments)

    def _call(self, service: str, operation: str, region: str, arguments: Mapping[str, Any]) -> Any:
        with translated(error_of, needs="boto3", extra="sagemaker"):
            return getattr(self._client(service, region), operation)(**arguments)

    def _client(self, service: str, region: str) -> Any:
        with self._lock:
            if (service, region) not in self._clients:
                from botocore.config import Config

                if not region:
                    raise errors.SpecError("is not set", field="sagemaker.region", hint=_REGION)
                config = Config(
                    connect_timeout=TIMEOUT,
                    read_timeout=TIMEOUT,
                    retries={"total_max_attempts": 1},
                    user_agent_extra="cloudtrain",
                )
                self._session = self._session or sign_in(self.settings, region)
                self._clients[service, region] = self._session.client(service, region_name=region, config=config)
            return self._clients[service, region]

    def bucket_region(self, name: str) -> str:
        """Return a bucket's region, which a refusal names too. Empty if unnamed. Raises `NotFoundError`."""
        with translated(error_of, needs="boto3", extra="sagemaker"):
            from botocore.exceptions import ClientError

            try:
                answer: Any = self._client("s3", self.settings.region).head_bucket(Bucket=name)
            except ClientError as exc:
                answer = exc.response
                if str(answer.get("Error", {}).get("Code")) in ("404", "NoSuchBucket"):
                    raise errors.NotFoundError(f"there is no bucket {name}", field="store") from None
        headers = answer["ResponseMetadata"].get("HTTPHeaders") or {}
        return str(headers.get("x-amz-bucket-region") or "")

    def principal(self) -> str:
        """Return the ARN of the calling user or role session."""
        return str(self.call("sts", "get_caller_identity")["Arn"])

    def storage(self, url: str) -> Mapping[str, Any]:
        """Return a store's options for the same caller and region."""
        own, options = self.settings, dict[str, Any]()
        if url_scheme(url) not in ("s3", "s3a"):
            return options
        if own.region:
            options["client_kwargs"] = {"region_name": own.region}
        if own.profile or own.role_to_assume:
            options["session"] = sign_in(own, own.region)._session  # botocore's, which boto3 does not expose
        return options

    # ---------------------------------------------------------------------------------------------------- training jobs

    def create(self, request: Request) -> str:
        """Return the ARN of this request's one job. Raises `ConflictError` if another run's job has its name."""
        try:
            return str(self.call("sagemaker", "create_training_job", **request.body)["TrainingJobArn"])
        except errors.ConflictError:
            found = self.find(request)
            if found is None:
                name = request.body["TrainingJobName"]
                why = f"SageMaker has a training job {name} of another run"
                raise errors.ConflictError(why, field="run_id", hint=ANOTHER_ID) from None
            return found

    def find(self, request: Request) -> str | None:
        """Return the ARN of the request's job, if it was ever created."""
        try:
            arn = str(self.describe(request.body["TrainingJobName"])["TrainingJobArn"])
        except errors.NotFoundError:
            return None
        tags = self.call("sagemaker", "list_tags", ResourceArn=arn, MaxResults=100)["Tags"]
        ours = any(tag["Key"] == TAG_RUN and tag["Value"] == run_tag(request.run) for tag in tags)
        return arn if ours else None

    def describe(self, native_id: str) -> dict[str, Any]:
        """Call DescribeTrainingJob. Raises `NotFoundError`, also for a job that is being deleted."""
        region, name = job_of(native_id)
        job: dict[str, Any] = self.call("sagemaker", "describe_training_job", region=region, TrainingJobName=name)
        if job["TrainingJobStatus"] == "Deleting":
            raise errors.NotFoundError(f"SageMaker is deleting the training job {name}", field="run")
        return job

    def cancel(self, native_id: str) -> None:
        """Call StopTrainingJob. A job that has ended stays as it is."""
        region, name = job_of(native_id)
        with unless_over(lambda: self.describe(native_id)["TrainingJobStatus"] in (*FINAL, "Stopping")):
            self.call("sagemaker", "stop_training_job", region=region, TrainingJobName=name)

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        """Return the command of a session of SSM. Raises `SpecError` for a job that lets none in.

        Sources: AWS's page on remote debugging for the target; the SSM document of a command is unverified there.
        """
        region, name = job_of(native_id)
        region = region or self.settings.region
        if not request.body.get("RemoteDebugConfig"):
            words = f"--region {region} --training-job-name {name} --remote-debug-config EnableRemoteDebug=true"
            hint = f"send a job with --interactive, or let a shell in now: aws sagemaker update-training-job {words}"
            raise errors.SpecError("the job was sent without it, and lets no shell in", field="interactive", hint=hint)
        argv = ["aws", "ssm", "start-session", "--region", region]
        argv += ["--target", f"sagemaker-training-job:{name}_algo-{node + 1}"]
        if command:
            pyz = f"{INPUTS}/{CHANNELS['runtime']}/cloudtrain.pyz"
            line = shlex.join(python_command(shell_arguments(pyz, request, node, command)))
            argv += ["--document-name", "AWS-StartInteractiveCommand", "--parameters", json.dumps({"command": [line]})]
        env = {"AWS_PROFILE": self.settings.profile} if self.settings.profile else {}
        if self.settings.role_to_assume:
            key, secret, token, *_ = sign_in(self.settings, region).get_credentials().get_frozen_credentials()
            env = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": token}
        install = "install the AWS CLI and its session-manager-plugin: https://docs.aws.amazon.com/cli"
        return Shell(argv=argv, env=env, install=install)


# -------------------------------------------------------------------------------------------------------- credentials


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
