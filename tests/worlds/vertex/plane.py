"""A project: its custom jobs, quotas, capacity and permissions; with its buckets, log, accounts and secrets."""

from __future__ import annotations

import base64
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base import Platform
from .entries import Entries
from .gcs import Gcs
from .identity import Identity
from .life import CustomJob
from .questions import Questions
from .replicas import NUMBER
from .strict import STANDARD, UNSUPPORTED, broken_rules, parsed
from .wire import Answer, Call, Refusal, Wire, no_consumer, off

__all__ = ["LOCATION", "OTHER", "PROJECT", "Plane"]

PROJECT, LOCATION = "contract", "europe-west4"
OTHER = "another-project"
"""A project of the same caller, without any API enabled."""
SERVICE = "//aiplatform.googleapis.com"
AGENT = f"service-{NUMBER}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
"""Account of a job that names no service account: the custom code service agent."""
PAGE = 100
QUOTA = "The following quota metrics exceed quota limits: {metrics}"
NO_JOB = 'The CustomJob "{name}" does not exist.'
_JOBS = r"/v1/(projects/[^/]+/locations/[^/]+)/customJobs"
_CLAUSE = re.compile(r'\s*(labels\.[\w-]+|display_name|displayName|state)\s*=\s*(?:"([^"]*)"|([\w-]+))\s*')


class Plane(Platform):
    """A project on loopback, with quota and machines in ``location`` and in ``others``.

    Faults:

    - ``wire.faults``, and those of ``identity`` and ``entries``;
    - ``no_capacity``, or the locations ``crowded``: a job of FLEX_START waits, and any other fails after
      ``capacity_seconds``;
    - ``quotas``: machines that may run at a time, by metric; none in the locations ``capped``;
    - ``lacking``: locations without GPU machines;
    - ``consumer`` False: the caller may not bill its calls to the project;
    - ``accounts``: service accounts that a caller may give to a job;
    - ``list_lag``: seconds until a listing has a job; ``error_late``: seconds between a job's end and its error;
    - ``unknown``: states by name, as numbers;
    - ``timed_out``, ``waited_out``: states (without JOB_STATE_) after a time limit or a wait that was too long;
    - ``grace``: most seconds from SIGTERM to SIGKILL; a strategy may give less;
    - ``restart_seconds``: time between a container's failure, after which its machine restarts it in place, and the
      job's end.
    """

    def __init__(self, folder: Path, *, project: str = PROJECT, location: str = LOCATION) -> None:
        self.folder, self.project, self.location, self.number = folder, project, location, NUMBER
        self.wire: Wire = Wire(lambda token: self.identity.account(token))
        self.identity = Identity(self.wire, folder, project=project)
        self.gcs = Gcs(folder, self.wire)
        self.entries = Entries(self.wire, project=project)
        self.jobs: dict[str, CustomJob] = {}
        self.accounts: set[str] = set()
        self.quotas: dict[str, int] = {}
        self.unknown: dict[str, int] = {}
        self.no_capacity = False
        self.others: set[str] = set()
        self.crowded: set[str] = set()
        self.capped: set[str] = set()
        self.lacking: set[str] = set()
        self.consumer = True
        self.capacity_seconds, self.list_lag, self.error_late, self.grace = 1.0, 0.0, 0.0, float("inf")
        self.restart_seconds = 5.0
        self.timed_out, self.waited_out = "CANCELLED", "EXPIRED"
        self._lock = threading.RLock()
        self.questions = Questions(self)
        self.wire.charged = self._charged
        self.wire.route("POST", _JOBS, "POST customJobs", self._create)
        self.wire.route("GET", _JOBS, "GET customJobs", self._list)
        self.wire.route("GET", rf"{_JOBS}/([^/:]+)", "GET customJob", self._get)
        self.wire.route("POST", rf"{_JOBS}/([^/:]+):cancel", "POST cancel", self._cancel)

    @property
    def url(self) -> str:
        """Return the base URL of all its APIs."""
        return self.wire.listen()

    @property
    def parent(self) -> str:
        """Return the resource name that its jobs stand below."""
        return f"projects/{self.project}/locations/{self.location}"

    def environ(self) -> dict[str, str]:
        """Return the environment in which Google's clients sign in, and they and gcloud find this fake's services."""
        return {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING": f"{self.url}/",
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.identity.adc),
            "STORAGE_EMULATOR_HOST": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": OTHER,
        }

    def job(self, name: str) -> CustomJob:
        """Return the job of that name. Raises `KeyError` for an unknown name."""
        return self.jobs[name]

    # ------------------------------------------------------------------------------------------------ servers for nodes

    def serve(self, gateway: str, account: str) -> str:
        """Serve the nodes of a job with the service account ``account`` at their network's gateway. Return the URL."""
        url = self.wire.listen(gateway)
        self.identity.nodes[url.removeprefix("http://")] = account or AGENT
        return url

    def withdraw(self, url: str) -> None:
        """Stop serving those nodes."""
        self.identity.nodes.pop(url.removeprefix("http://"), None)
        self.wire.forget(url.removeprefix("http://").partition(":")[0])

    def node_environ(self, url: str) -> dict[str, str]:
        """Return the variables that lead a node to this fake's metadata server, buckets and secrets. A real node has
        none.
        """
        return {
            "GCE_METADATA_HOST": url.removeprefix("http://"),
            "STORAGE_EMULATOR_HOST": url,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"{url}/",
        }

    def mounted(self) -> list[str]:
        """Return the buckets below ``/gcs``: those of one region."""
        return [name for name, (_, kind) in self.gcs.places.items() if kind == "region"]

    # ------------------------------------------------------------------------------------------------------ operations

    def _create(self, call: Call) -> Answer:
        (parent,) = call.words
        self._check_parent(parent, "aiplatform.customJobs.create")
        try:
            record = parsed(call.body)
        except ValueError as exc:
            raise Refusal("INVALID_ARGUMENT", str(exc)) from None
        if problems := broken_rules(record):
            raise Refusal("INVALID_ARGUMENT", " ".join(problems))
        location = parent.rpartition("/")[2]
        for pool in record.job_spec.worker_pool_specs:
            if location in self.lacking and pool.machine_spec.accelerator_count:
                raise Refusal("INVALID_ARGUMENT", UNSUPPORTED.format(pool.machine_spec.machine_type))
        if any(pool.WhichOneof("task") == "python_package_spec" for pool in record.job_spec.worker_pool_specs):
            raise Refusal("UNIMPLEMENTED", "This fake runs containers, no Python packages.")
        account = record.job_spec.service_account
        if account and account not in self.accounts:
            text = f"You do not have permission to act as service_account: {account}. (or it may not exist)."
            raise Refusal("PERMISSION_DENIED", text)
        capped = location in self.capped
        if over := [m for m, count in metrics(record).items() if capped or count > self.quotas.get(m, count)]:
            names = ",".join(f"aiplatform.googleapis.com/{metric}" for metric in sorted(over))
            raise Refusal("RESOURCE_EXHAUSTED", QUOTA.format(metrics=names))
        with self._lock:
            name = f"{self._numbered(parent)}/customJobs/{secrets.randbelow(9 * 10**18) + 10**18}"
            made = self.jobs[name] = CustomJob(self, name, record)
        return Answer(made.describe(numbers=_numbers(call)))

    def _charged(self, project: str, storage: bool) -> None:
        """Check the project that a call is billed to. The caller has one other project, without the APIs."""
        if project == OTHER:
            raise off("Vertex AI API", "aiplatform.googleapis.com", project)
        if project not in (self.project, self.number) or not self.consumer:
            raise no_consumer(project, storage=storage)

    def _numbered(self, name: str) -> str:
        """Return a name with the project's number, as the service writes every name."""
        return name.replace(f"projects/{self.project}/", f"projects/{self.number}/", 1)

    def _check_parent(self, parent: str, permission: str) -> None:
        _, project, _, location = parent.split("/")
        if project not in (self.project, self.number):
            raise Refusal.denied(permission, f"{SERVICE}/{parent}")
        if location not in {self.location, *self.others}:
            raise Refusal("INVALID_ARGUMENT", f"Location {location} is not one that this endpoint serves.")

    def over_quota(self, job: CustomJob) -> bool:
        """Return True if the running jobs leave too little quota for this one."""
        with self._lock:
            used: Counter[str] = Counter()
            for other in self.jobs.values():
                if other is not job and other.state == "JOB_STATE_RUNNING":
                    used += metrics(other.record)
            wanted = metrics(job.record)
            return any(used[m] + count > self.quotas.get(m, used[m] + count) for m, count in wanted.items())

    def _found(self, call: Call, permission: str) -> CustomJob:
        parent, number = call.words
        self._check_parent(parent, permission)
        name = f"{self._numbered(parent)}/customJobs/{number}"
        if name not in self.jobs:
            raise Refusal("NOT_FOUND", NO_JOB.format(name=name))
        return self.jobs[name]

    def _get(self, call: Call) -> Answer:
        return Answer(self._found(call, "aiplatform.customJobs.get").describe(numbers=_numbers(call)))

    def _cancel(self, call: Call) -> Answer:
        job = self._found(call, "aiplatform.customJobs.cancel")
        with self._lock:
            if job.over:
                text = f'The CustomJob "{job.name}" is in state {job.state}, and cannot be cancelled.'
                raise Refusal("FAILED_PRECONDITION", text)
            job.stop()
        return Answer({})

    def _list(self, call: Call) -> Answer:
        """List jobs, newest first."""
        (parent,) = call.words
        self._check_parent(parent, "aiplatform.customJobs.list")
        wanted = _wanted(call.query.get("filter", ""))
        now = time.time()
        with self._lock:
            jobs = [job for job in self.jobs.values() if job.name.startswith(f"{self._numbered(parent)}/")]
        found = [job for job in reversed(jobs) if now - job.created >= self.list_lag and wanted(job)]
        start = int(base64.b64decode(call.query.get("pageToken") or "MA=="))
        end = start + min(int(call.query.get("pageSize") or PAGE), PAGE)
        answer: dict[str, Any] = {}
        if found[start:end]:
            answer["customJobs"] = [job.describe(numbers=_numbers(call)) for job in found[start:end]]
        if end < len(found):
            answer["nextPageToken"] = base64.b64encode(str(end).encode()).decode()
        return Answer(answer)


GPUS = {
    "NVIDIA_TESLA_T4": "custom_model_training_nvidia_t4_gpus",
    "NVIDIA_TESLA_P4": "custom_model_training_nvidia_p4_gpus",
    "NVIDIA_TESLA_P100": "custom_model_training_nvidia_p100_gpus",
    "NVIDIA_TESLA_V100": "custom_model_training_nvidia_v100_gpus",
    "NVIDIA_L4": "custom_model_training_nvidia_l4_gpus",
    "NVIDIA_TESLA_A100": "custom_model_training_nvidia_a100_gpus",
    "NVIDIA_A100_80GB": "custom_model_training_nvidia_a100_80gb_gpus",
    "NVIDIA_H100_80GB": "custom_model_training_nvidia_h100_gpus",
    "NVIDIA_H100_MEGA_80GB": "custom_model_training_nvidia_h100_mega_gpus",
    "NVIDIA_H200_141GB": "custom_model_training_nvidia_h200_gpus",
    "NVIDIA_B200": "custom_model_training_nvidia_b200_gpus",
}
"""Quotas by accelerator, from Google's code (vertex-ai-samples, ``get_resource_id``), its pages and users' errors. B200
is unverified. GB200 and RTX PRO 6000 have no source."""
CPUS = {
    "n1": "custom_model_training_cpus", "e2": "custom_model_training_cpus", "n2": "custom_model_training_n2_cpus",
    "n4": "custom_model_training_n4_cpus", "c2": "custom_model_training_c2_cpus", "g2": "custom_model_training_g2_cpus",
    "a2": "custom_model_training_a2_cpus", "a3": "custom_model_training_a3_cpus", "m1": "custom_model_training_m1_cpus",
}  # fmt: skip
"""Quotas of cores by family; with a GPU as well. Of the preemptible quotas, errors have only named that of N1."""
CORES = {"a2-highgpu": 12, "a2-ultragpu": 12, "a2-megagpu": 6, "a3-highgpu": 26, "a3-megagpu": 26, "a3-ultragpu": 28}
"""Cores per GPU of the machines whose names count GPUs: Compute Engine's page of accelerator-optimized machines."""


def metrics(job: Any) -> Counter[str]:
    """Return the quota that a CustomJob message uses, by metric."""
    from google.cloud.aiplatform_v1 import AcceleratorType

    preemptible = job.job_spec.scheduling.strategy not in (0, STANDARD)
    found = Counter[str]()
    for pool in job.job_spec.worker_pool_specs:
        machine = pool.machine_spec
        kind, size = machine.machine_type.rpartition("-")[::2]
        cores = int(size) if size.isdigit() else CORES.get(kind, 0) * machine.accelerator_count
        taken = {GPUS.get(AcceleratorType(machine.accelerator_type).name): machine.accelerator_count}
        if not preemptible or kind.startswith(("n1-", "e2-")):
            taken[CPUS.get(kind.partition("-")[0])] = cores
        for metric, count in taken.items():
            if metric and count * pool.replica_count:
                name = metric.replace("training_", "training_preemptible_") if preemptible else metric
                restricted = "/vertex-ai-restricted/" in pool.container_spec.image_uri
                name = name.replace("custom_model", "restricted_image") if restricted else name
                found[name] += count * pool.replica_count
    return found


def _numbers(call: Call) -> bool:
    """Return True if a client wants enums as numbers, as the generated clients do."""
    return "enum-encoding=int" in call.query.get("$alt", "")


def _wanted(text: str) -> Callable[[CustomJob], bool]:
    """Parse equalities joined by AND. Raises `Refusal`."""
    wanted = []
    for clause in text.split(" AND ") if text else []:
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise Refusal("INVALID_ARGUMENT", f"Invalid filter: {clause!r}")
        wanted.append((found[1], found[2] if found[2] is not None else found[3]))

    def test(job: CustomJob) -> bool:
        fields = {"state": job.state, **dict.fromkeys(("display_name", "displayName"), job.record.display_name)}
        fields |= {f"labels.{key}": value for key, value in job.record.labels.items()}
        return all(fields.get(name) == value for name, value in wanted)

    return test
