"""``PyTorch`` with the keywords of SageMaker's SDK v2, over our own jobs: scripts of that SDK change their import.

::

    from cloudtrain.compat.sagemaker_v2 import PyTorch, TrainingInput

Neither that SDK nor anything of AWS's is imported. `cloudtrain.compat.keywords` says what becomes of each keyword; none
is ignored in silence. ``plan`` is ours: what ``fit`` would send, without network or credentials.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CloudtrainError, NotFoundError, SpecError
from ..estimator import RunFailedError, log_line, ranks
from ..job.job import Job, check_run_id, run_tag
from ..settings.settings import Settings
from ..validate import did_you_mean, table_of
from .keywords import LINEAGE, checked, inputs_of, job_fields, keyword_of, settings_of
from .session import NotCarriedError, Session, get_execution_role

if TYPE_CHECKING:
    from ..runs.log_order import Line
    from ..runs.run import Run
    from ..runs.submit import Plan

__all__ = [
    "NOT_CARRIED",
    "FileSystemInput",
    "HuggingFace",
    "NotCarriedError",
    "PyTorch",
    "Session",
    "TrainingInput",
    "TrainingJob",
    "get_execution_role",
]

CLOUD, HERE, CONTAINERS = "sagemaker", "local", "docker"
"""Providers: of an instance type ``ml.…``; of ``local``; of ``local`` with an image."""
PREFIX = "cloudtrain"
"""Where a store lies in v2's default bucket."""
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/.+")
_JOB_NAME = re.compile(r"(?:arn:[^/]*:training-job/)?(?P<run>.+?)(?:-(?P<tag>[0-9a-f]{16})(?:-\d+){0,2})?")

NOT_CARRIED: dict[str, str] = {
    "prepare_workflow_for_training": "a pipeline calls fit, or `cloudtrain submit`, and reads its exit code",
    "training_job_analytics": "`cloudtrain pull --only metrics` brings what the script told CLOUDTRAIN_METRICS_FILE",
    "set_hyperparameters": "give hyperparameters to PyTorch",
    "get_app_url": "the console has the job by latest_training_job.name",
    "enable_remote_debug": "give enable_remote_debug=True to PyTorch",
    "disable_remote_debug": "leave enable_remote_debug out",
    "latest_job_tensorboard_artifacts_path": "event files in CLOUDTRAIN_ARTIFACT_DIR are pulled with the artifacts",
    **dict.fromkeys(
        ("deploy", "create_model", "register", "transformer", "compile_model"),
        "deploy model_data with the serving tool of your choice",
    ),
    **dict.fromkeys(
        ("get_vpc_config", "get_remote_debug_config", "get_session_chaining_config"), "plan() shows the request"
    ),
    **dict.fromkeys(
        (
            *("enable_default_profiling", "disable_profiling", "update_profiler"),
            *("latest_job_debugger_artifacts_path", "latest_job_profiler_artifacts_path"),
        ),
        "no debugger or profiler is attached",
    ),
}
"""Methods and properties of v2's estimator that this one lacks, and what to do instead."""


class TrainingInput:
    """An S3 channel, in v2's words; `fit` takes that SDK's own, too."""

    def __init__(
        self,
        s3_data: str,
        distribution: str | None = None,
        compression: str | None = None,
        content_type: str | None = None,
        record_wrapping: str | None = None,
        s3_data_type: str = "S3Prefix",
        instance_groups: Any = None,
        input_mode: str | None = None,
        attribute_names: Any = None,
        target_attribute_name: str | None = None,
        shuffle_config: Any = None,
        hub_access_config: Any = None,
        model_access_config: Any = None,
    ) -> None:
        source = {
            "S3Uri": s3_data,
            "S3DataType": s3_data_type,
            "S3DataDistributionType": distribution,
            "InstanceGroupNames": instance_groups,
            "AttributeNames": attribute_names,
            "HubAccessConfig": hub_access_config,
            "ModelAccessConfig": model_access_config,
        }
        config = {
            "CompressionType": compression,
            "ContentType": content_type,
            "RecordWrapperType": record_wrapping,
            "InputMode": input_mode,
            "TargetAttributeName": target_attribute_name,
            "ShuffleConfig": shuffle_config,
        }
        self.config: dict[str, Any] = {
            "DataSource": {"S3DataSource": {key: value for key, value in source.items() if value is not None}},
            **{key: value for key, value in config.items() if value is not None},
        }


class FileSystemInput:
    """A channel in EFS or FSx for Lustre, in v2's words."""

    def __init__(
        self,
        file_system_id: str,
        file_system_type: str,
        directory_path: str,
        file_system_access_mode: str = "ro",
        content_type: str | None = None,
    ) -> None:
        source = {
            "FileSystemId": file_system_id,
            "FileSystemType": file_system_type,
            "DirectoryPath": directory_path,
            "FileSystemAccessMode": file_system_access_mode,
        }
        self.config: dict[str, Any] = {"DataSource": {"FileSystemDataSource": source}}
        if content_type is not None:
            self.config["ContentType"] = content_type


class TrainingJob:
    """What ``latest_training_job`` is: a run, by its training job's name. ``run`` is our own handle."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def name(self) -> str:
        """The training job's, of the newest attempt; of a run on this machine its id."""
        return str(self._body().get("TrainingJobName", self.run.run_id))

    @property
    def job_name(self) -> str:
        """The same."""
        return self.name

    def wait(self, logs: Any = True) -> None:
        """Until it has ended; with ``logs`` its lines on stdout. Raises `RunFailedError` for any end but a good one."""
        many = ranks(self.run.job) > 1

        def show(line: Line) -> None:
            sys.stdout.write(log_line(line, many=many) + "\n")

        result = self.run.wait(on_line=show if _wanted(logs) else None)
        if result["state"] != "succeeded":
            raise RunFailedError(result)

    def stop(self) -> None:
        """Cancel the run."""
        self.run.cancel()

    def model_data(self) -> str:
        """Where the model is once the job has ended: a URL, of a folder with ``disable_output_compression``."""
        body = self._body()
        if "TrainingJobName" not in body:
            return f"{self.run.url}/live/artifacts/node-0/"
        output = body["OutputDataConfig"]
        name = "model/" if output.get("CompressionType") == "NONE" else "model.tar.gz"
        return f"{output['S3OutputPath'].rstrip('/')}/{body['TrainingJobName']}/output/{name}"

    def _body(self) -> Mapping[str, Any]:
        store = self.run.store
        newest = max(store.attempts(self.run.run_id), default=0)
        request = store.attempt_request(self.run.run_id, newest)
        return {} if request is None else request.body


class PyTorch:
    """v2's estimator. Keywords are those of `cloudtrain.compat.keywords`; `SpecError` names one that is not carried.

    ``job`` is the Job that they make: ``print(estimator.job.to_toml())`` is the job file that needs none of this. With
    ``instance_type="local"`` it runs on this machine, where what belongs to the account means nothing, as in v2.
    """

    def __init__(
        self,
        entry_point: Any = None,
        framework_version: Any = None,
        py_version: Any = None,
        source_dir: Any = None,
        hyperparameters: Any = None,
        image_uri: Any = None,
        distribution: Any = None,
        **keywords: Any,
    ) -> None:
        named = {
            "entry_point": entry_point,
            "framework_version": framework_version,
            "py_version": py_version,
            "source_dir": source_dir,
            "hyperparameters": hyperparameters,
            "image_uri": image_uri,
            "distribution": distribution,
        }
        self._keywords = checked({**named, **keywords})
        self.provider = CLOUD
        kind = str(self._keywords.get("instance_type", ""))
        if kind == "local_gpu":
            how = "cloudtrain.Estimator(provider='local', gpu='A10G:1')"
            raise SpecError(f"which GPUs this machine has is yours to say: {how}", field="instance_type")
        if kind == "local":
            self.provider = CONTAINERS if "image_uri" in self._keywords else HERE
        elif not kind:
            raise SpecError("is missing: the machine to run on, such as 'ml.p4d.24xlarge'", field="instance_type")
        with _their_words():
            fields = job_fields(self._keywords)
            if self.provider != CLOUD:
                del fields["instance_type"]
            self.job = Job.make(**fields)
        if LINEAGE in self._keywords:
            uri = self.job.tags[LINEAGE]
            warnings.warn(
                f"{LINEAGE}: checkpoints are kept in the run, and the next job with {uri} resumes from them; what the"
                " SageMaker SDK has left there is not read",
                stacklevel=2 if type(self) is PyTorch else 3,
            )
        self.settings = settings_of(self._keywords) if self.provider == CLOUD else {}
        self.latest_training_job: TrainingJob | None = None
        self._attached = False

    def __getattr__(self, name: str) -> Any:
        if name in NOT_CARRIED:
            raise NotCarriedError(f"is not carried over: {NOT_CARRIED[name]}", field=name)
        near = did_you_mean(name, [*NOT_CARRIED, *dir(type(self))])
        raise AttributeError(f"PyTorch has no {name!r}" + (f"; {near}" if near else ""))

    # ----------------------------------------------------------------------------------------------------- what v2 has

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: Any = "All",
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
    ) -> Run:
        """Submit the job; with ``wait`` until it has ended. ``job_name`` is the run's id.

        ``inputs`` as in v2. Raises `SpecError` before anything is sent, `RunFailedError` for a run that ended badly,
        and what sending raises. Ctrl-C stops the waiting, not the job.
        """
        from ..runs.submit import submit

        _wanted(logs)
        if self.provider == CLOUD:
            _check_caller(self._keywords.get("sagemaker_session"))
        plan = self._plan(inputs, job_name, experiment_config, preview=False)
        self.latest_training_job = TrainingJob(submit(plan, environ=os.environ))
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
        """The estimator of a job that was sent before, once it has ended: its name (or ARN), a run's id, or its URL.

        A name is looked for in ``store``, by default the setting, else on this machine and in v2's default bucket.
        ``model_channel_name`` is not needed: the run's record says what its inputs were. Raises `NotFoundError`, and
        `RunFailedError` when the job did not succeed.
        """
        from ..runs.run import open_run

        _check_caller(sagemaker_session)
        match = None if "/runs/" in training_job_name else _JOB_NAME.fullmatch(training_job_name)
        session = {"sagemaker_session": sagemaker_session} if sagemaker_session is not None else {}
        settings = _loaded(settings_of(session), store=store)
        here = match is not None and Path(settings.store, "runs", match["run"]).is_dir()
        if match and store is None and not here and (bucket := _default_store(settings, session)):
            settings = _loaded(settings_of(session), store=bucket)
        try:
            target = match["run"] if match else training_job_name
            run = open_run(target, store_url=settings.resolved(), cwd=Path.cwd(), settings=settings)
        except NotFoundError as exc:
            how = "give the run's URL, or its store="
            raise NotFoundError(f"{exc.message}; {how}", field="training_job_name") from None
        if match and match["tag"] and match["tag"] != run_tag(run.url):
            raise NotFoundError(f"no training job {training_job_name} in {run.store.url}", field="training_job_name")
        made = cls.__new__(cls)
        made._keywords, made.provider, made.job, made.settings = {}, run.provider_name, run.job, {}
        made.latest_training_job, made._attached = TrainingJob(run), True
        made.latest_training_job.wait(logs=False)
        return made

    @property
    def model_data(self) -> str:
        """URL of the model of the latest job; see `TrainingJob.model_data`."""
        return self._latest("model_data").model_data()

    def logs(self) -> None:
        """The latest job's lines, until it has ended."""
        self._latest("logs").wait(logs=True)

    def hyperparameters(self) -> dict[str, Any]:
        """As they were given."""
        return dict(self.job.hyperparameters)

    def training_image_uri(self) -> str:
        """The image that the job would run, by its plan."""
        return str(self.plan().request.body["AlgorithmSpecification"]["TrainingImage"])

    def enable_network_isolation(self) -> bool:
        """Whether the job's containers have no way out."""
        return bool(self.settings.get("enable_network_isolation", False))

    # ------------------------------------------------------------------------------------------------------------ ours

    def plan(self, inputs: Any = None, job_name: str | None = None) -> Plan:
        """Exactly what ``fit`` would send: no network, no credentials. Raises `SpecError`."""
        return self._plan(inputs, job_name, None, preview=True)

    def _plan(
        self, inputs: Any, job_name: str | None, experiment_config: Mapping[str, str] | None, *, preview: bool
    ) -> Plan:
        from ..runs.submit import make_plan

        if self._attached:
            raise SpecError("was attached to a job whose code is not here; make a new PyTorch", field="fit")
        with _their_words():
            if job_name is not None:
                check_run_id(job_name)
            mode = self._keywords.get("input_mode")
            job = self.job.replace(inputs={**self.job.inputs, **inputs_of(inputs, input_mode=mode)})
            if experiment_config:
                options = {**job.options[CLOUD], "ExperimentConfig": table_of(experiment_config, "experiment_config")}
                job = job.replace(options={**job.options, CLOUD: options})
            if self.provider != CLOUD:
                job = job.replace(env={**_toolkit(job), **job.env})
            make = partial(
                make_plan,
                settings=self._settings(),
                provider=self.provider,
                run_id=job_name,
                cwd=Path.cwd(),
                preview=preview,
            )
            plan = make(job)
            if not preview and (before := _before(plan)):
                plan = make(job.replace(resume_from=before))
        self._check_python(plan)
        return plan

    def _settings(self) -> Settings:
        store = self._keywords.get("output_path")
        if self.provider != CLOUD or store is not None:
            return _loaded(self.settings, provider=self.provider, store=store)
        found = _loaded(self.settings)
        if "store" in found.origins:
            return found
        account = found.make_provider(CLOUD).settings
        if account.role and not _ROLE.fullmatch(account.role):
            how = f"aws iam get-role --role-name {account.role.rpartition('/')[2]} --query Role.Arn --output text"
            raise SpecError(f"{account.role!r} is not an ARN", field="role", hint=f"to look up the ARN, run: {how}")
        store = _default_store(found, self._keywords)
        if store is None and not account.role:
            raise SpecError("is not set; give the ARN of the role that jobs run as", field="role")
        if store is None:
            why = "the region is not known, nor the bucket that v2 takes there"
            raise SpecError(f"{why}: set AWS_REGION, or give output_path", field="output_path")
        return _loaded(self.settings, store=store)

    def _check_python(self, plan: Plan) -> None:
        version = self._keywords.get("py_version")
        if version is None or "image_uri" in self._keywords or self.provider != CLOUD:
            return
        image = str(plan.request.body["AlgorithmSpecification"]["TrainingImage"])
        told = re.search(r"-(py\d+)\b", image)
        if told and told[1] != version:
            raise SpecError(
                f"is {told[1]} in AWS's image {image.rpartition('/')[2]}, not {version!r}", field="py_version"
            )

    def _latest(self, what: str) -> TrainingJob:
        if self.latest_training_job is None:
            raise SpecError("there is no job yet: call fit or attach", field=what)
        return self.latest_training_job


class HuggingFace(PyTorch):
    """v2's estimator of that name: a `PyTorch` in an image with transformers, which only ``image_uri`` can name."""

    def __init__(
        self,
        py_version: Any = None,
        entry_point: Any = None,
        transformers_version: Any = None,
        tensorflow_version: Any = None,
        pytorch_version: Any = None,
        source_dir: Any = None,
        hyperparameters: Any = None,
        image_uri: Any = None,
        distribution: Any = None,
        **keywords: Any,
    ) -> None:
        if tensorflow_version is not None:
            raise SpecError("is not carried over: the ranks are PyTorch's", field="tensorflow_version", hint=_IMAGES)
        if image_uri is None and keywords.get("instance_type") != "local":
            wanted = f"transformers {transformers_version or '(any)'} and PyTorch {pytorch_version or '(any)'}"
            raise SpecError(f"is missing: AWS's image of {wanted} is not known here", field="image_uri", hint=_IMAGES)
        super().__init__(
            entry_point, None, py_version, source_dir, hyperparameters, image_uri, distribution, **keywords
        )


_IMAGES = (
    "give image_uri, of https://github.com/aws/deep-learning-containers/blob/master/available_images.md, or use PyTorch"
    " with transformers in the requirements.txt of source_dir"
)


def _before(plan: Plan) -> str | None:
    """Return the URL of the newest run with the plan's ``checkpoint_s3_uri`` that has a checkpoint to resume from.

    A run that was sent before under the plan's own id resumes from what it did then.
    """
    from ..storage.files import parallel

    store, run_id, uri = plan.store, plan.layout.run_id, plan.job.tags.get(LINEAGE)
    if uri is None:
        return None

    def record(name: str) -> tuple[float, str, Mapping[str, Any]]:
        try:
            found = store.run(name)
        except CloudtrainError:  # one that is damaged, or from a later version, is none of these
            return 0.0, name, {}
        return float(found["created"]), name, found["job"]

    runs = sorted(parallel(record, store.runs()), key=lambda run: run[:2], reverse=True)
    same = next((job for _, name, job in runs if name == run_id), None)
    if same is not None:
        return same.get("resume_from")
    names = (name for _, name, job in runs if job.get("tags", {}).get(LINEAGE) == uri)
    return next((f"{store.url}/runs/{name}" for name in names if store.newest_checkpoint(name) is not None), None)


def _wanted(logs: Any) -> bool:
    """Whether v2's word for ``logs`` means those of the training."""
    words = [logs] if isinstance(logs, (str, bool)) else list(logs or ["None"])
    for word in words:
        if word not in (True, False, "All", "None", "Training"):
            why = "no debugger is attached, so there are no rules" if word == "Rules" else "give 'All' or 'None'"
            raise SpecError(f"{word!r} is not carried over: {why}", field="logs")
    return any(word in (True, "All", "Training") for word in words)


def _check_caller(session: Any) -> None:
    """Raise `SpecError` for a session of keys given by hand: whoever comes back could not call with them."""
    boto = vars(session).get("boto_session") if session is not None else None
    found = boto.get_credentials() if boto is not None else None
    if getattr(found, "method", "") == "explicit":
        how = "put them into a profile and set AWS_PROFILE, or set role_to_assume (docs/sagemaker.md)"
        raise SpecError(f"holds keys that were given by hand: {how}", field="sagemaker_session")


@contextlib.contextmanager
def _their_words() -> Iterator[None]:
    """A `SpecError` that names a field of ours names v2's keyword."""
    try:
        yield
    except SpecError as exc:
        theirs = keyword_of(exc.field)
        if theirs == exc.field:
            raise
        raise SpecError(exc.message, field=theirs, hint=exc.hint) from None


def _loaded(overrides: Mapping[str, Any], *, provider: str = CLOUD, store: str | None = None) -> Settings:
    values: Any = dict(overrides)
    return Settings.load(overrides=values, provider=provider, store=store)


def _default_store(settings: Settings, keywords: Mapping[str, Any]) -> str | None:
    """`PREFIX` in v2's default bucket: the session's own, else by region and account; None where these are not known,
    or the settings have a store.

    The account is that of the role: SageMaker takes no role of another.
    """
    if "store" in settings.origins:
        return None
    session = keywords.get("sagemaker_session")
    bucket = getattr(session, "_default_bucket_name_override", None)
    prefix = getattr(session, "default_bucket_prefix", None)
    if not isinstance(bucket, str):
        account = settings.make_provider(CLOUD).settings
        role = _ROLE.fullmatch(account.role)
        if not account.region or not role:
            return None
        bucket = f"{CLOUD}-{account.region}-{role[1]}"
    return "/".join(["s3:/", bucket, *([prefix] if isinstance(prefix, str) and prefix else []), PREFIX])


def _toolkit(job: Job) -> dict[str, str]:
    """The ``SM_*`` variables that AWS's toolkit sets and that can be told on this machine."""
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
