"""``PyTorch`` with the keywords of SageMaker's SDK v2, over our own jobs: scripts of that SDK change their import.

::

    from cloudtrain.compat.sagemaker_v2 import PyTorch, TrainingInput

Neither that SDK nor AWS's is imported. `cloudtrain.compat.keywords` translates or refuses each keyword.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CloudtrainError, NotFoundError, SpecError
from ..estimator import RunFailedError, log_line, ranks
from ..job.job import Job, check_run_id, run_tag
from ..settings.settings import Settings
from ..storage.extras import translated
from ..validate import did_you_mean, table_of
from .keywords import LINEAGE, NAME, checked, inputs_of, job_fields, keyword_of, settings_of

if TYPE_CHECKING:
    from ..runs.log_order import Line
    from ..runs.run import Run
    from ..runs.submit import Plan

__all__ = ["NOT_CARRIED", "FileSystemInput", "HuggingFace", "NotCarriedError", "PyTorch", "Session"]
__all__ += ["TrainingInput", "TrainingJob", "get_execution_role"]

METADATA = Path("/opt/ml/metadata/resource-metadata.json")
"""File on a SageMaker notebook that names its role."""
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/.+")
_CALLER = re.compile(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.*")
_JOB_NAME = re.compile(r"(?:arn:[^/]*:training-job/)?(?P<run>.+?)(?:-(?P<tag>[0-9a-f]{16})(?:-\d+){0,2})?")

_INSTEAD = {
    "prepare_workflow_for_training": "a pipeline calls fit, or `cloudtrain submit`, and reads its exit code",
    "training_job_analytics": "`cloudtrain pull --what metrics` pulls the rows of CLOUDTRAIN_METRICS_FILE",
    "set_hyperparameters": "give hyperparameters to PyTorch",
    "get_app_url": "the console has the job by latest_training_job.name",
    "enable_remote_debug": "give enable_remote_debug=True to PyTorch",
    "disable_remote_debug": "leave enable_remote_debug out",
    "latest_job_tensorboard_artifacts_path": "event files in CLOUDTRAIN_ARTIFACT_DIR are pulled with the artifacts",
    "deploy create_model register transformer compile_model": "deploy model_data with the serving tool of your choice",
    "get_vpc_config get_remote_debug_config get_session_chaining_config": "plan() shows the request",
    "enable_default_profiling disable_profiling update_profiler latest_job_debugger_artifacts_path"
    " latest_job_profiler_artifacts_path": "no debugger or profiler is attached",
}
NOT_CARRIED: dict[str, str] = {name: why for names, why in _INSTEAD.items() for name in names.split()}
"""Methods and properties of v2's estimator that this one lacks, and what to do instead."""


class NotCarriedError(SpecError, AttributeError):
    """A name of v2 that is not carried over. `hasattr` is False for it."""


class _Refusing:
    """A class that refuses v2's other names with the way out in ``_instead``."""

    _instead: Mapping[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self._instead:
            raise NotCarriedError(f"is not carried over: {self._instead[name]}", field=name)
        near = did_you_mean(name, [*self._instead, *dir(type(self))])
        raise AttributeError(f"{type(self).__name__} has no {name!r}" + (f"; {near}" if near else ""))


class Session(_Refusing):
    """The caller of v2's jobs: region, profile and default bucket. AWS is called only when an answer needs it.

    ``boto_session`` is a ``boto3.Session``; without one the environment and AWS's own files decide.
    """

    local_mode = False
    _instead: Mapping[str, str] = {
        "upload_data": "give fit the local folder: it is uploaded once, at its own digest",
        "download_data": "`cloudtrain pull RUN` brings what a job has left",
        "logs_for_job": "`cloudtrain logs RUN`, or logs() of the estimator",
        "describe_training_job": "`cloudtrain status RUN`, or boto_session.client(...)",
        "wait_for_job": "`cloudtrain wait RUN`, or latest_training_job.wait()",
        "stop_training_job": "`cloudtrain cancel RUN`, or latest_training_job.stop()",
    }

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
                raise SpecError("is not carried over", field=name, hint="leave it out: boto_session is the caller")
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
        region = getattr(vars(self).get("boto_session"), "region_name", None)
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not (region := region or self.boto_session.region_name):
            raise SpecError("the region is not known", field="sagemaker_session", hint="set AWS_REGION")
        return str(region)

    def default_bucket(self) -> str:
        """Return the bucket that v2 takes by default. It is not created."""
        return self._default_bucket_name_override or f"{NAME}-{self.boto_region_name}-{self.account_id()}"

    def account_id(self) -> str:
        """Return the account of the caller, by a call to AWS."""
        return str(_provider(self).principal().split(":")[4])


def get_execution_role(sagemaker_session: Any = None, use_default: bool = False) -> str:
    """Return the ARN of the role that jobs run as: the setting, a notebook's own, or the role of the caller.

    Raises `SpecError` where the caller is no role. ``use_default`` is refused: no role is ever created.
    """
    how = f'add to cloudtrain.toml: [{NAME}] role = "arn:aws:iam::ACCOUNT:role/NAME"'
    if use_default:
        raise SpecError("is not carried over: no role is created for you", field="use_default", hint=how)
    provider = _provider(sagemaker_session)
    if provider.settings.role:
        return str(provider.settings.role)
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(METADATA.read_text(encoding="utf-8"))["ExecutionRoleArn"])
    caller = provider.principal()
    if (match := _CALLER.fullmatch(caller)) is None:
        raise SpecError(f"{caller} is not a role", field="role", hint=how)
    try:
        return str(provider.account.call("iam", "get_role", RoleName=match[3])["Role"]["Arn"])
    except CloudtrainError:  # the caller may not read its role, and few roles have a path
        return f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}"


def _provider(session: Any) -> Any:
    """Return the provider with this session as its caller."""
    return _loaded(settings_of({"sagemaker_session": session})).make_provider(NAME)


def _by_name(names: tuple[str, ...], values: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name. Raises `TypeError` for too many ``values``, or one that is a keyword too."""
    named = dict(zip(names, values, strict=False))
    if len(named) < len(values) or named.keys() & keywords.keys():
        raise TypeError(f"the arguments without a name are {', '.join(names)}, each once")
    return {**named, **keywords}


_CHANNEL_NAMES = {
    "distribution": "S3DataDistributionType",
    "compression": "CompressionType",
    "content_type": "ContentType",
    "record_wrapping": "RecordWrapperType",
    "s3_data_type": "S3DataType",
    "instance_groups": "InstanceGroupNames",
    "input_mode": "InputMode",
    "attribute_names": "AttributeNames",
    "target_attribute_name": "TargetAttributeName",
    "shuffle_config": "ShuffleConfig",
    "hub_access_config": "HubAccessConfig",
    "model_access_config": "ModelAccessConfig",
}
"""Argument of v2's TrainingInput: its name in a request."""


class TrainingInput:
    """An S3 channel, with the arguments of v2's. `PyTorch.fit` also takes that SDK's own."""

    def __init__(self, s3_data: str, *values: Any, **words: Any) -> None:
        given = _by_name(tuple(_CHANNEL_NAMES), values, words)
        if unknown := sorted(set(given) - set(_CHANNEL_NAMES)):
            raise SpecError("TrainingInput has no such argument", field=unknown[0])
        named = {_CHANNEL_NAMES[key]: value for key, value in given.items() if value is not None}
        source = {key: named.pop(key) for key in ("S3DataType", "S3DataDistributionType") if key in named}
        self.config: dict[str, Any] = {"DataSource": {"S3DataSource": {"S3Uri": s3_data, **source}}, **named}


class FileSystemInput:
    """A channel in EFS or FSx for Lustre, in v2's words."""

    def __init__(
        self,
        file_system_id: str,
        file_system_type: str,
        directory_path: str,
        file_system_access_mode: str = "ro",
        content_type: str | None = None,  # has no effect
    ) -> None:
        source = {"FileSystemId": file_system_id, "FileSystemType": file_system_type}
        source |= {"DirectoryPath": directory_path, "FileSystemAccessMode": file_system_access_mode}
        self.config = {"DataSource": {"FileSystemDataSource": source}}


class TrainingJob:
    """The object in ``latest_training_job``: a run, by its training job's name. ``run`` is our own handle."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def name(self) -> str:
        """The name of the newest attempt's training job; the run's id if it runs on this machine."""
        return str(self._body().get("TrainingJobName", self.run.run_id))

    job_name = name

    def wait(self, logs: Any = True) -> None:
        """Wait until it has ended, with ``logs`` its lines on stdout. Raises `RunFailedError` unless it succeeded."""
        many = ranks(self.run.job) > 1

        def show(line: Line) -> None:
            sys.stdout.write(log_line(line, many=many) + "\n")

        result = self.run.wait(on_line=show if _is_wanted(logs) else None)
        if result["state"] != "succeeded":
            raise RunFailedError(result)

    def stop(self) -> None:
        """Cancel the run."""
        self.run.cancel()

    def model_data(self) -> str:
        """Return the URL of the model of an ended job: of a folder with ``disable_output_compression``."""
        body = self._body()
        if "TrainingJobName" not in body:
            return f"{self.run.url}/live/artifacts/node-0/"
        output = body["OutputDataConfig"]
        name = "model/" if output.get("CompressionType") == "NONE" else "model.tar.gz"
        return f"{output['S3OutputPath'].rstrip('/')}/{body['TrainingJobName']}/output/{name}"

    def _body(self) -> Mapping[str, Any]:
        store, run_id = self.run.store, self.run.run_id
        request = store.attempt_request(run_id, max(store.attempts(run_id), default=0))
        return {} if request is None else request.body


_CODE = ("source_dir", "hyperparameters", "image_uri", "distribution")


class PyTorch(_Refusing):
    """v2's estimator, with the keywords of `cloudtrain.compat.keywords`. `SpecError` names a refused one.

    ``job`` is the Job that they make: ``print(estimator.job.to_toml())`` is the job file that needs none of this. With
    ``instance_type="local"`` it runs on this machine, where role, network and keys mean nothing, as in v2.
    """

    _instead = NOT_CARRIED

    def __init__(self, *values: Any, **keywords: Any) -> None:
        self._keywords = checked(_by_name(("entry_point", "framework_version", "py_version", *_CODE), values, keywords))
        kind, self.provider = str(self._keywords.get("instance_type", "")), NAME
        if kind == "local_gpu":
            how = "name them: cloudtrain.Estimator(provider='local', gpu='A10G:1')"
            raise SpecError("the GPUs of this machine are not known", field="instance_type", hint=how)
        if kind == "local":
            self.provider = "docker" if "image_uri" in self._keywords else "local"
        elif not kind:
            raise SpecError("is missing: the machine to run on, such as 'ml.p4d.24xlarge'", field="instance_type")
        with _their_words():
            fields = job_fields(self._keywords)
            if self.provider != NAME:
                del fields["instance_type"]
            self.job = Job.make(**fields)
        if LINEAGE in self._keywords:
            warnings.warn(
                f"{LINEAGE}: checkpoints are kept in the run, and the next job with {self.job.tags[LINEAGE]} resumes"
                " from them; what the SageMaker SDK has left there is not read",
                stacklevel=2 if type(self) is PyTorch else 3,
            )
        self.settings = settings_of(self._keywords) if self.provider == NAME else {}
        self.latest_training_job: TrainingJob | None = None

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: Any = "All",
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
    ) -> Run:
        """Submit the job as v2 does, and with ``wait`` wait until it has ended. ``job_name`` is the run's id.

        Raises `SpecError` before anything is sent, `RunFailedError` for a run that ended badly, and the errors of
        sending. Ctrl-C stops the waiting, not the job.
        """
        from ..runs.submit import send_plan

        _is_wanted(logs)
        if self.provider == NAME:
            _check_caller(self._keywords.get("sagemaker_session"))
        plan = self._plan(inputs, job_name, experiment_config, preview=False)
        self.latest_training_job = TrainingJob(send_plan(plan, environ=os.environ))
        if wait:
            self.latest_training_job.wait(logs)
        return self.latest_training_job.run

    @classmethod
    def attach(
        cls,
        training_job_name: str,
        sagemaker_session: Any = None,
        model_channel_name: str = "model",
        *,
        store: str | None = None,
    ) -> PyTorch:
        """Wait for a job that was sent before, and return its estimator. It has a name (or ARN), a run's id, or a URL.

        A name is looked for in ``store``, by default the setting, else on this machine and in v2's default bucket.
        ``model_channel_name`` has no effect. Raises `NotFoundError`, and `RunFailedError` if the job did not succeed.
        """
        from ..runs.run import open_run

        _check_caller(sagemaker_session)
        match = None if "/runs/" in training_job_name else _JOB_NAME.fullmatch(training_job_name)
        session = {"sagemaker_session": sagemaker_session}
        settings = _loaded(settings_of(session), store=store)
        target = match["run"] if match else training_job_name
        if match and store is None and not Path(settings.store, "runs", target).is_dir():
            settings = _loaded(settings_of(session), store=_default_store(settings, session))
        try:
            run = open_run(target, store_url=settings.resolved(), cwd=Path.cwd(), settings=settings)
        except NotFoundError as exc:
            how = "give the run's URL, or its store="
            raise NotFoundError(exc.message, field="training_job_name", hint=how) from None
        if match and match["tag"] and match["tag"] != run_tag(run.url):
            raise NotFoundError(f"no training job {training_job_name} in {run.store.url}", field="training_job_name")
        made = cls.__new__(cls)
        made._keywords, made.provider, made.job, made.settings = {}, run.provider_name, run.job, {}
        made.latest_training_job = TrainingJob(run)
        made.latest_training_job.wait(logs=False)
        return made

    @property
    def model_data(self) -> str:
        """URL of the model of the latest job; see `TrainingJob.model_data`."""
        return self._latest("model_data").model_data()

    def logs(self) -> None:
        """Print the latest job's lines until it has ended."""
        self._latest("logs").wait(logs=True)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the given hyperparameters."""
        return dict(self.job.hyperparameters)

    def training_image_uri(self) -> str:
        """Return the image of the planned job."""
        return str(self.plan().request.body["AlgorithmSpecification"]["TrainingImage"])

    def enable_network_isolation(self) -> bool:
        """Return True if the job's containers have no network."""
        return bool(self.settings.get("enable_network_isolation", False))

    def plan(self, inputs: Any = None, job_name: str | None = None) -> Plan:
        """Return the request of ``fit``, made without network or credentials. Raises `SpecError`."""
        return self._plan(inputs, job_name, None, preview=True)

    def _plan(
        self, inputs: Any, job_name: str | None, experiment_config: Mapping[str, str] | None, *, preview: bool
    ) -> Plan:
        from ..runs.submit import make_plan

        if not self._keywords:
            raise SpecError("was attached to a job whose code is not here", field="fit", hint="make a new PyTorch")
        with _their_words():
            if job_name is not None:
                check_run_id(job_name)
            channels = inputs_of(inputs, input_mode=self._keywords.get("input_mode"))
            job = self.job.replace(inputs={**self.job.inputs, **channels})
            if experiment_config:
                options = {**job.options[NAME], "ExperimentConfig": table_of(experiment_config, "experiment_config")}
                job = job.replace(options={**job.options, NAME: options})
            if self.provider != NAME:
                job = job.replace(env={**_toolkit(job), **job.env})
            shared: dict[str, Any] = {"settings": self._settings(), "provider": self.provider, "run_id": job_name}
            plan = make_plan(job, **shared, cwd=Path.cwd(), preview=preview)
            if not preview and (before := _before(plan)):
                plan = make_plan(job.replace(resume_from=before), **shared, cwd=Path.cwd(), preview=preview)
        version = self._keywords.get("py_version")
        if version is not None and self.provider == NAME and "image_uri" not in self._keywords:
            image = str(plan.request.body["AlgorithmSpecification"]["TrainingImage"]).rpartition("/")[2]
            found = re.search(r"-(py\d+)\b", image)
            if found and found[1] != version:
                raise SpecError(f"is {found[1]} in AWS's image {image}, not {version!r}", field="py_version")
        return plan

    def _settings(self) -> Settings:
        found = _loaded(self.settings, provider=self.provider, store=self._keywords.get("output_path"))
        if self.provider != NAME or "store" in found.origins:
            return found
        if store := _default_store(found, self._keywords):
            return _loaded(self.settings, store=store)
        role = found.make_provider(NAME).settings.role
        if not role:
            raise SpecError("is not set", field="role", hint="give the ARN of the role that jobs run as")
        if not _ROLE.fullmatch(role):
            how = f"aws iam get-role --role-name {role.rpartition('/')[2]} --query Role.Arn --output text"
            raise SpecError(f"{role!r} is not an ARN", field="role", hint=f"to look up the ARN, run: {how}")
        why = "the region is not known, nor the bucket that v2 takes there"
        raise SpecError(f"{why}: set AWS_REGION, or give output_path", field="output_path")

    def _latest(self, what: str) -> TrainingJob:
        if self.latest_training_job is None:
            raise SpecError("there is no job yet: call fit or attach", field=what)
        return self.latest_training_job


class HuggingFace(PyTorch):
    """v2's estimator of that name: a `PyTorch` in an image with transformers, which only ``image_uri`` can name."""

    def __init__(self, *values: Any, **keywords: Any) -> None:
        versions = ("transformers_version", "tensorflow_version", "pytorch_version")
        given = _by_name(("py_version", "entry_point", *versions, *_CODE), values, keywords)
        transformers, tensorflow, pytorch = (given.pop(name, None) for name in versions)
        page = "https://github.com/aws/deep-learning-containers/blob/master/available_images.md"
        hint = f"give image_uri, of {page}, or use PyTorch with transformers in the requirements.txt of source_dir"
        if tensorflow is not None:
            raise SpecError("is not carried over: the ranks are PyTorch's", field="tensorflow_version", hint=hint)
        if given.get("image_uri") is None and given.get("instance_type") != "local":
            wanted = f"transformers {transformers or '(any)'} and PyTorch {pytorch or '(any)'}"
            raise SpecError(f"is missing: AWS's image of {wanted} is not known here", field="image_uri", hint=hint)
        super().__init__(**given)


def _before(plan: Plan) -> str | None:
    """Return the URL of the newest run with the plan's ``checkpoint_s3_uri`` that has a checkpoint to resume from.

    A run that was sent before under the plan's own id resumes from the same run as then.
    """
    from ..storage.files import parallel

    store, run_id, uri = plan.store, plan.layout.run_id, plan.job.tags.get(LINEAGE)
    if uri is None:
        return None

    def record(name: str) -> tuple[float, str, Mapping[str, Any]]:
        try:
            found = store.run(name)
        except CloudtrainError:  # a damaged record, or one of a later version
            return 0.0, name, {}
        return float(found["created"]), name, found["job"]

    runs = sorted(parallel(record, store.runs()), key=lambda run: run[:2], reverse=True)
    for _, name, job in runs:
        if name == run_id and job:
            return job.get("resume_from")
    names = (name for _, name, job in runs if job.get("tags", {}).get(LINEAGE) == uri)
    return next((f"{store.url}/runs/{name}" for name in names if store.newest_checkpoint(name) is not None), None)


def _is_wanted(logs: Any) -> bool:
    """Return True if v2's ``logs`` ask for the lines of the training."""
    words = [logs] if isinstance(logs, (str, bool)) else list(logs or ["None"])
    for word in words:
        if word not in (True, False, "All", "None", "Training"):
            why = "no debugger is attached, so there are no rules" if word == "Rules" else "give 'All' or 'None'"
            raise SpecError(f"{word!r} is not carried over: {why}", field="logs")
    return any(word in (True, "All", "Training") for word in words)


def _check_caller(session: Any) -> None:
    """Raise `SpecError` for a session with keys given by hand: a client that attaches later would not have them."""
    boto = vars(session).get("boto_session") if session is not None else None
    if boto is not None and getattr(boto.get_credentials(), "method", "") == "explicit":
        how = "put them into a profile and set AWS_PROFILE, or set role_to_assume (docs/sagemaker.md)"
        raise SpecError(f"holds keys that were given by hand: {how}", field="sagemaker_session")


@contextlib.contextmanager
def _their_words() -> Iterator[None]:
    """Name v2's keyword in a `SpecError` about a Job's field."""
    try:
        yield
    except SpecError as exc:
        theirs = keyword_of(exc.field)
        if theirs == exc.field:
            raise
        raise SpecError(exc.message, field=theirs, hint=exc.hint) from None


def _loaded(overrides: Mapping[str, Any], *, provider: str = NAME, store: str | None = None) -> Settings:
    return Settings.load(overrides=overrides, provider=provider, store=store)


def _default_store(settings: Settings, keywords: Mapping[str, Any]) -> str | None:
    """Return ``cloudtrain`` in v2's default bucket: the session's own, else by region and the role's account.

    Return None if the settings have a store, or region or account are not known.
    """
    if "store" in settings.origins:
        return None
    session = keywords.get("sagemaker_session")
    bucket = getattr(session, "_default_bucket_name_override", None)
    prefix = getattr(session, "default_bucket_prefix", None)
    if not isinstance(bucket, str):
        account = settings.make_provider(NAME).settings
        role = _ROLE.fullmatch(account.role)
        if not account.region or not role:
            return None
        bucket = f"{NAME}-{account.region}-{role[1]}"
    return f"s3://{bucket}/{prefix}/cloudtrain" if prefix and isinstance(prefix, str) else f"s3://{bucket}/cloudtrain"


def _toolkit(job: Job) -> dict[str, str]:
    """Return the ``SM_*`` variables of AWS's toolkit whose values are known on this machine."""
    upper = {name: re.sub(r"[^A-Za-z0-9_]", "_", name).upper() for name in (*job.inputs, *job.hyperparameters)}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in job.hyperparameters.items()}
    return {
        "SM_MODEL_DIR": "{artifact_dir}",
        "SM_OUTPUT_DATA_DIR": "{artifact_dir}",
        "SM_NUM_GPUS": "0",
        "SM_CHANNELS": json.dumps(sorted(job.inputs)),
        "SM_HPS": json.dumps(job.hyperparameters),
        **{f"SM_CHANNEL_{upper[name]}": f"{{inputs.{name}}}" for name in job.inputs},
        **{f"SM_HP_{upper[name]}": text for name, text in texts.items()},
    }
