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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CloudtrainError, NotFoundError, SpecError
from ..estimator import RunFailedError, attach, log_line, ranks
from ..job.job import Job
from ..settings.settings import Settings
from .keywords import LINEAGE, NAME, SETTINGS, TrainingInput, checked, inputs_of, job_fields

if TYPE_CHECKING:
    from ..runs.log_order import Line
    from ..runs.run import Run
    from ..runs.submit import Plan

__all__ = ["PyTorch", "Session", "TrainingInput", "TrainingJob", "get_execution_role"]

METADATA = Path("/opt/ml/metadata/resource-metadata.json")  # on a SageMaker notebook; names its role
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/.+")
_AROUND_RUN = re.compile(r"^arn:[^/]*:training-job/|-[0-9a-f]{16}(-\d+){0,2}$")  # of a job's name or ARN
_CALLER = re.compile(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.*")


class Session:
    """The caller of v2's jobs: region, profile and default bucket.

    ``boto_session`` is a ``boto3.Session``; without one the environment and AWS's own files decide. Raises `SpecError`
    for one with keys that were given by hand: a client that attaches later would not have them.
    """

    def __init__(
        self, boto_session: Any = None, *, default_bucket: str | None = None, default_bucket_prefix: str | None = None
    ) -> None:
        self.boto_session, self._bucket, self._prefix = boto_session, default_bucket, default_bucket_prefix
        self.settings: dict[str, str] = {}
        if boto_session is not None:
            if getattr(boto_session.get_credentials(), "method", "") == "explicit":
                hint = "put them into a profile and set AWS_PROFILE, or set role_to_assume (docs/sagemaker.md)"
                raise SpecError("holds keys that were given by hand", field="boto_session", hint=hint)
            named = {"region": boto_session.region_name, "profile": boto_session.profile_name}
            self.settings = {key: value for key, value in named.items() if value and value != "default"}

    @property
    def boto_region_name(self) -> str:
        """The region."""
        return str(Settings.load(overrides=self.settings, provider=NAME).make_provider(NAME).settings.region)

    def default_bucket(self) -> str:
        """Return the bucket that v2 takes by default, by a call to AWS if none is given. It is not created."""
        if self._bucket:
            return self._bucket
        provider: Any = Settings.load(overrides=self.settings, provider=NAME).make_provider(NAME)
        return f"{NAME}-{provider.settings.region}-{provider.principal().split(':')[4]}"

    def store(self, settings: Settings) -> str | None:
        """Return ``cloudtrain`` in the default bucket; None if the settings have a store, or no region or role."""
        account = settings.make_provider(NAME).settings
        role = _ROLE.fullmatch(account.role)
        if "store" in settings.origins or not (self._bucket or (account.region and role)):
            return None
        bucket = self._bucket or f"{NAME}-{account.region}-{role and role[1]}"
        return "/".join(filter(None, ["s3:/", bucket, self._prefix, "cloudtrain"]))


def get_execution_role(sagemaker_session: Session | None = None) -> str:
    """Return the ARN of the role that jobs run as: the setting, a notebook's own, or the role of the caller.

    Raises `SpecError` where the caller is no role.
    """
    settings = (sagemaker_session or Session()).settings
    provider: Any = Settings.load(overrides=settings, provider=NAME).make_provider(NAME)
    if provider.settings.role:
        return str(provider.settings.role)
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(METADATA.read_text(encoding="utf-8"))["ExecutionRoleArn"])
    caller = provider.principal()
    if (match := _CALLER.fullmatch(caller)) is None:
        hint = f'add to cloudtrain.toml: [{NAME}] role = "arn:aws:iam::ACCOUNT:role/NAME"'
        raise SpecError(f"{caller} is not a role", field="role", hint=hint)
    try:
        return str(provider.account.call("iam", "get_role", RoleName=match[3])["Role"]["Arn"])
    except CloudtrainError:  # the caller may not read its role, and few roles have a path
        return f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}"


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
        kinds = [logs] if isinstance(logs, (str, bool)) else list(logs or ())  # v2's words for what to show

        def show(line: Line) -> None:
            sys.stdout.write(log_line(line, many=many) + "\n")

        result = self.run.wait(on_line=show if {True, "All", "Training"}.intersection(kinds) else None)
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


class PyTorch:
    """v2's estimator, with the keywords of `cloudtrain.compat.keywords`. `SpecError` names a refused one.

    ``job`` is the Job that they make: ``print(estimator.job.to_toml())`` is the job file that needs none of this. With
    ``instance_type="local"`` it runs on this machine, where role, network and keys mean nothing, as in v2.
    """

    def __init__(
        self,
        entry_point: Any = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        **keywords: Any,
    ) -> None:
        code = {"entry_point": entry_point, "source_dir": source_dir, "hyperparameters": hyperparameters}
        image = {"framework_version": framework_version, "py_version": py_version, "image_uri": image_uri}
        self._keywords = checked({**code, **image, **keywords})
        kind, self.provider = self._keywords.get("instance_type"), NAME
        if kind is None or kind == "local_gpu":
            hint = "give one such as 'ml.p4d.24xlarge'; cloudtrain.Estimator(provider='local', gpu='A10G:1') runs here"
            raise SpecError("must be a type of machine", field="instance_type", hint=hint)
        fields = job_fields(self._keywords)
        if kind == "local":
            self.provider = "docker" if "image_uri" in self._keywords else "local"
            del fields["instance_type"]
        self.job = Job.make(**fields)
        if LINEAGE in self._keywords:
            warnings.warn(
                f"{LINEAGE}: checkpoints are kept in the run, and the next job with {self.job.tags[LINEAGE]} resumes"
                " from them; what the SageMaker SDK has left there is not read",
                stacklevel=2,
            )
        self._session = self._keywords.get("sagemaker_session", Session())
        if not isinstance(self._session, Session):
            hint = "import Session from cloudtrain.compat.sagemaker_v2, or leave it out and set AWS_REGION, AWS_PROFILE"
            raise SpecError("must be a Session of this module", field="sagemaker_session", hint=hint)
        own = {ours: self._keywords[name] for name, ours in SETTINGS.items() if name in self._keywords}
        self.settings = {**own, **self._session.settings} if self.provider == NAME else {}
        self.latest_training_job: TrainingJob | None = None

    def fit(self, inputs: Any = None, wait: bool = True, logs: Any = "All", job_name: str | None = None) -> Run:
        """Submit the job as v2 does, and with ``wait`` wait until it has ended. ``job_name`` is the run's id.

        Raises `SpecError` before anything is sent, `RunFailedError` for a run that ended badly, and the errors of
        sending. Ctrl-C stops the waiting, not the job.
        """
        from ..runs.submit import send_plan

        plan = self.plan(inputs, job_name, preview=False)
        self.latest_training_job = TrainingJob(send_plan(plan, environ=os.environ))
        if wait:
            self.latest_training_job.wait(logs)
        return self.latest_training_job.run

    @classmethod
    def attach(
        cls, training_job_name: str, sagemaker_session: Session | None = None, *, store: str | None = None
    ) -> PyTorch:
        """Wait for a job that was sent before, by its name (or ARN), run id or URL, and return its estimator.

        ``store`` is by default the setting, else in v2's default bucket. Raises the errors of `cloudtrain.attach`, and
        `RunFailedError` if the job did not succeed.
        """
        session = sagemaker_session or Session()
        place = store or session.store(Settings.load(overrides=session.settings, provider=NAME))
        made = cls.__new__(cls)
        run = attach(_AROUND_RUN.sub("", training_job_name), store=place)
        made._keywords, made.job, made.latest_training_job = {}, run.job, TrainingJob(run)
        made.latest_training_job.wait(logs=False)
        return made

    @property
    def model_data(self) -> str:
        """URL of the model of the latest job; see `TrainingJob.model_data`."""
        if self.latest_training_job is None:
            raise SpecError("there is no job yet: call fit", field="model_data")
        return self.latest_training_job.model_data()

    def plan(self, inputs: Any = None, job_name: str | None = None, *, preview: bool = True) -> Plan:
        """Return the request of ``fit``, made without network or credentials if ``preview``. Raises `SpecError`."""
        from ..runs.submit import make_plan

        if not self._keywords:
            raise SpecError("was attached to a job whose code is not here", field="fit", hint="make a new PyTorch")
        channels = inputs_of(inputs, input_mode=self._keywords.get("input_mode"))
        job = self.job.replace(inputs={**self.job.inputs, **channels})
        if self.provider != NAME:
            job = job.replace(env={**_toolkit(job), **job.env})
        shared: dict[str, Any] = {"settings": self._settings(), "provider": self.provider, "run_id": job_name}
        plan = make_plan(job, **shared, cwd=Path.cwd(), preview=preview)
        if not preview and (before := _before(plan)):
            plan = make_plan(job.replace(resume_from=before), **shared, cwd=Path.cwd(), preview=preview)
        return plan

    def _settings(self) -> Settings:
        given: dict[str, Any] = {"overrides": self.settings, "provider": self.provider}
        found = Settings.load(**given, store=self._keywords.get("output_path"))
        if self.provider != NAME or "store" in found.origins:
            return found
        if store := self._session.store(found):
            return Settings.load(**given, store=store)
        why = "is not set, and v2's default bucket is not known without a region and the ARN of a role"
        raise SpecError(why, field="output_path", hint="set AWS_REGION and give role as an ARN, or give output_path")


def _before(plan: Plan) -> str | None:
    """Return the URL of the newest run with the plan's ``checkpoint_s3_uri`` that has a checkpoint to resume from.

    A run that was sent before under the plan's own id resumes from the same run as then.
    """
    from ..runs.listing import Wanted, list_page

    store, run_id, uri = plan.store, plan.layout.run_id, plan.job.tags.get(LINEAGE)
    if uri is None:
        return None
    with contextlib.suppress(NotFoundError):
        return Job.from_dict(store.run(run_id)["job"]).resume_from
    rows = list_page(store, limit=None, wanted=Wanted(tags={LINEAGE: uri})).rows
    names = (row["run_id"] for row in rows)
    return next((f"{store.url}/runs/{name}" for name in names if store.newest_checkpoint(name) is not None), None)


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
