"""Check a project for ``doctor``: caller, API, bucket, permissions, service account, quota, image.

Nothing is created. The calls are documented. The answers of a real project are unverified.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ...errors import AuthError, CapacityError, CloudtrainError, NotFoundError, QuotaError, SpecError, StorageError
from ...provider_api.checks import Check, failed, installed, ok, passed, skipped, tried, unknown
from ...validate import url_scheme
from .._cloud import pages
from .api import AGENT, HELP, endpoint, name_of, pull_hint, translated
from .machines import known_machine

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from .api import Account

PERMISSIONS = (
    *(f"aiplatform.customJobs.{word}" for word in ("create", "get", "list", "cancel")),
    "logging.logEntries.list",
)
"""Permissions of a submit, a wait, a follower and a cancel in the project."""
ACT_AS = "iam.serviceAccounts.actAs"
PAGES = 20
_IMAGE = re.compile(
    r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<repository>[^/]+)/(?P<name>[^:@]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:\w+))?"
)
GPUS: Mapping[str, str] = {
    "NVIDIA_TESLA_T4": "nvidia_t4_gpus",
    "NVIDIA_TESLA_P4": "nvidia_p4_gpus",
    "NVIDIA_TESLA_P100": "nvidia_p100_gpus",
    "NVIDIA_TESLA_V100": "nvidia_v100_gpus",
    "NVIDIA_L4": "nvidia_l4_gpus",
    "NVIDIA_TESLA_A100": "nvidia_a100_gpus",
    "NVIDIA_A100_80GB": "nvidia_a100_80gb_gpus",
    "NVIDIA_H100_80GB": "nvidia_h100_gpus",
    "NVIDIA_H100_MEGA_80GB": "nvidia_h100_mega_gpus",
    "NVIDIA_H200_141GB": "nvidia_h200_gpus",
    "NVIDIA_B200": "nvidia_b200_gpus",
}
"""End of a metric's name, by accelerator. Source: ``get_resource_id`` in Google's vertex-ai-samples (``common_util.py``
of Model Garden). Users report P4. B200 follows the Dynamic Workload Scheduler's page. GB200 and RTX PRO 6000 are not
counted, because no source names them."""
CPUS: Mapping[str, str] = {
    "n1": "cpus",
    "e2": "cpus",
    **{family: f"{family}_cpus" for family in ("n2", "n4", "c2", "g2", "a2", "a3", "m1")},
}
"""End of a metric's name, by family of machines: Google's page on reserving quota for N1 and E2, users' reports for the
others. A machine with a GPU counts here too: a real 429 of an N1 machine names both."""
RESTRICTED = "/vertex-ai-restricted/"
"""Part of an image's name whose jobs have their own quotas."""


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """Yield the checks of `doctor`."""
    packages = installed(("google-cloud-aiplatform", "gcsfs", "requests"), extra="vertex")
    if not (yield from passed([packages], tried("credentials", lambda: _caller(account)))):
        return
    yield from tried("api", lambda: _api(account))
    yield from tried("bucket", lambda: _bucket(account, store))
    yield from tried("permissions", lambda: _permissions(account), extra=True)
    yield from tried("service account", lambda: _service_account(account), extra=True)
    if request is None:
        yield skipped("quota", "there is no plan, so no machine is named")
        yield skipped("image", "there is no plan")
        return
    if request.body["jobSpec"].get("persistentResourceId"):
        yield from tried("persistent resource", lambda: _persistent(account, request.body["jobSpec"]))
    yield from tried("quota", lambda: _quota(account, request.body["jobSpec"]), extra=True)
    image = str(request.body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["imageUri"])
    yield from tried("image", lambda: _image(account, image), extra=True)


def _caller(account: Account) -> Check:
    """Check the sign-in by a new token: a revoked key gets none."""
    with translated("sign in"):
        import requests
        from google.auth.transport.requests import Request as Transport

        known = account.session.credentials
        with requests.Session() as session:
            known.refresh(Transport(session))
    settings = account.settings
    where = f"project {settings.project}, location {settings.location}"
    return ok("credentials", f"{name_of(known) or 'a user'}, {where}")


def _get(account: Account, service: str, path: str, *, what: str, body: Any = None, **query: Any) -> dict[str, Any]:
    """Return a Google API's answer to GET, or to POST of ``body``. ``service`` is the API's name in its host."""
    method = "GET" if body is None else "POST"
    return account.call(service, method, endpoint(service) + path, what=what, body=body, params=query)


def _api(account: Account) -> Check:
    """Check that a list of jobs is answered: the API is on, the project and location are right."""
    settings = account.settings
    for name in ("project", "location"):
        if not getattr(settings, name):
            raise SpecError("is not set", field=f"vertex.{name}")
    jobs = f"projects/{settings.project}/locations/{settings.location}/customJobs"
    account.ask("GET", jobs, what="list jobs", params={"pageSize": 1})
    return ok("api", f"Vertex AI answers for {settings.project} in {settings.location}")


def _bucket(account: Account, store: str) -> Check:
    if not store:
        return skipped("bucket", "the location of the store is unknown")
    wanted = account.settings.location
    make = f"gcloud storage buckets create gs://NAME --location={wanted}"
    if url_scheme(store) != "gs":
        fix = f'add to cloudtrain.toml: store = "gs://BUCKET/PREFIX", a bucket in {wanted}'
        return failed("bucket", f"its nodes see Cloud Storage, not {store}", fix=fix, code=SpecError.exit_code)
    name = urlsplit(store).netloc
    try:
        there, kind = account.place(name, missing=True)
    except SpecError:
        fix = f"make it ({make}), or set store to another"
        return failed("bucket", f"there is no bucket {name}", fix=fix, code=StorageError.exit_code)
    if not there:
        return unknown("bucket", f"the caller may not look where {name} is (storage.buckets.get)")
    if kind != "region":
        fix = f"jobs mount a bucket of one region alone; {make}"
        return failed("bucket", f"{name} is a {kind} bucket ({there})", fix=fix, code=SpecError.exit_code)
    if there != wanted:
        fix = f"set vertex.location to {there}, or {make}"
        return failed("bucket", f"{name} is in {there}, the jobs are in {wanted}", fix=fix, code=SpecError.exit_code)
    return ok("bucket", f"{name} is in {there}, as the jobs are")


def _permissions(account: Account) -> Check:
    path = f"/v1/projects/{account.settings.project}:testIamPermissions"
    answer = _get(account, "cloudresourcemanager", path, what="test permissions", body={"permissions": [*PERMISSIONS]})
    denied = [name for name in PERMISSIONS if name not in (answer.get("permissions") or [])]
    if denied:
        fix = HELP["log" if denied == ["logging.logEntries.list"] else "role"]
        return failed("permissions", f"not allowed: {', '.join(denied)}", fix=fix, code=AuthError.exit_code)
    return ok("permissions", f"the project allows the caller {len(PERMISSIONS)} actions")


def _service_account(account: Account) -> Check:
    email = account.settings.service_account
    if not email:
        return skipped("service account", "none is set: jobs run as Vertex AI's own agent, which reads no secrets")
    path = f"/v1/projects/-/serviceAccounts/{quote(email)}"
    try:
        described = _get(account, "iam", path, what="get service account")
    except NotFoundError:
        fix = "gcloud iam service-accounts list names those there are; docs/vertex.md makes one"
        return failed("service account", f"there is no {email}", fix=fix, code=AuthError.exit_code)
    if described.get("disabled"):
        fix = f"gcloud iam service-accounts enable {email}"
        return failed("service account", f"{email} is disabled", fix=fix, code=AuthError.exit_code)
    body = {"permissions": [ACT_AS]}
    granted = _get(account, "iam", f"{path}:testIamPermissions", what="test permissions", body=body)
    if ACT_AS not in (granted.get("permissions") or []):
        fix = f"{HELP['act']} {email}"
        return failed("service account", f"the caller may not act as {email}", fix=fix, code=AuthError.exit_code)
    return ok("service account", f"the caller may act as {email}")


def _persistent(account: Account, spec: Mapping[str, Any]) -> Check:
    """Check that the job's persistent resource runs, and has its machines."""
    settings, title = account.settings, "persistent resource"
    place, name = f"projects/{settings.project}/locations/{settings.location}", str(spec["persistentResourceId"])
    seen = f"gcloud ai persistent-resources list --region={settings.location}"
    try:
        found = account.ask("GET", f"{place}/persistentResources/{name}", what="get persistent resource")
    except NotFoundError:
        fix = f"to list those there are, run: {seen}"
        return failed(title, f"there is no {name} in {settings.location}", fix=fix, code=SpecError.exit_code)
    if found.get("state") != "RUNNING":
        text = f"{name} is {found.get('state') or 'in an unknown state'}, not RUNNING"
        return failed(title, text, fix=f"wait, or name another; {seen}", code=CapacityError.exit_code)
    wanted, there = Counter[str](), Counter[str]()
    for pool in spec["workerPoolSpecs"]:
        wanted[_machine_text(pool["machineSpec"])] += int(pool["replicaCount"])
    for pool in found.get("resourcePools") or []:
        most = int((pool.get("autoscalingSpec") or {}).get("maxReplicaCount") or pool.get("replicaCount") or 0)
        there[_machine_text(pool.get("machineSpec") or {})] += most
    has = ", ".join(f"{count} x {kind}" for kind, count in there.items()) or "no machines"
    if short := next((kind for kind, count in wanted.items() if count > there[kind]), ""):
        text = f"{name} has {has}; the job needs {wanted[short]} x {short}"
        return failed(title, text, fix="choose other machines, or another resource", code=SpecError.exit_code)
    return ok(title, f"{name} is running, with {has}")


def _machine_text(spec: Mapping[str, Any]) -> str:
    """Return ``n1-standard-8`` or ``n1-standard-8+NVIDIA_TESLA_T4:1`` of a machineSpec."""
    gpus = int(spec.get("acceleratorCount") or 0)
    return str(spec.get("machineType")) + (f"+{spec.get('acceleratorType')}:{gpus}" if gpus else "")


def _quota(account: Account, spec: Mapping[str, Any]) -> Iterator[Check]:
    """Check the limit in the region by the Cloud Quotas API, which does not report the use."""
    wanted, settings = metrics(spec), account.settings
    if spec.get("persistentResourceId"):
        yield skipped("quota", "the machines are those of a persistent resource, which has its quota already")
        return
    if not wanted:
        yield unknown("quota", f"which quota {spec['workerPoolSpecs'][0]['machineSpec']['machineType']} counts against")
        return
    path = f"/v1/projects/{settings.project}/locations/global/services/aiplatform.googleapis.com/quotaInfos"

    def ask(token: str) -> dict[str, Any]:
        more = {"pageToken": token} if token else {}
        return _get(account, "cloudquotas", path, what="list quotas", pageSize=500, **more)

    limits = dict[str, int | None]()
    for page in itertools.islice(pages(ask, "nextPageToken"), PAGES):
        for info in page.get("quotaInfos") or []:
            metric = str(info.get("metric") or "").partition("/")[2]
            if metric in wanted:
                limits[metric] = _limit(info, settings.location)
    rows = [_limited(metric, count, limits.get(metric), settings.location) for metric, count in wanted.items()]
    yield from sorted(rows, key=lambda row: row.status == "failed")


def _limited(metric: str, count: int, limit: int | None, location: str) -> Check:
    if limit is None:
        return unknown("quota", f"Cloud Quotas has no limit of {metric} in {location}")
    if 0 <= limit < count:
        fix = f"ask for {count} of {metric} in {location} (IAM & Admin, Quotas), or choose another machine"
        return failed("quota", f"{metric}: {limit}, the job takes {count}", fix=fix, code=QuotaError.exit_code)
    return ok("quota", f"{metric}: {'no limit' if limit < 0 else limit}, the job takes {count}")


def _limit(info: Mapping[str, Any], location: str) -> int | None:
    """Return the region's limit, else that of all regions without their own."""
    general = None
    for item in info.get("dimensionsInfos") or []:
        value = (item.get("details") or {}).get("value")
        region = (item.get("dimensions") or {}).get("region")
        if value is None:
            continue
        if region == location or (region is None and location in (item.get("applicableLocations") or [])):
            return int(value)
        if region is None:
            general = int(value)
    return general


def metrics(spec: Mapping[str, Any]) -> Counter[str]:
    """Return a job's use of each quota, by metric; empty if no source names one.

    ``spec`` is the jobSpec. SPOT and FLEX_START count against the preemptible metrics. Of those for cores only that of
    N1 and E2 is known (a recorded 429).
    """
    preemptible = (spec.get("scheduling") or {}).get("strategy") in ("SPOT", "FLEX_START")
    found = Counter[str]()
    for pool in spec["workerPoolSpecs"]:
        machine, count = pool["machineSpec"], int(pool["replicaCount"])
        image = str((pool.get("containerSpec") or {}).get("imageUri") or "")
        group = "restricted_image_training_" if RESTRICTED in image else "custom_model_training_"
        prefix = group + ("preemptible_" if preemptible else "")
        if gpu := GPUS.get(str(machine.get("acceleratorType") or "")):
            found[prefix + gpu] += int(machine.get("acceleratorCount") or 0) * count
        cpus = CPUS.get(str(machine["machineType"]).partition("-")[0])
        if cpus == "cpus" or (cpus and not preemptible):
            found[prefix + cpus] += _cores(machine) * count
    return +found


def _cores(spec: Mapping[str, Any]) -> int:
    """Return the cores of a machineSpec, from the machine's name if the table lacks it."""
    machine = known_machine(spec)
    if machine is not None and machine.vcpus:
        return machine.vcpus
    size = re.search(r"-(\d+)$", str(spec["machineType"]))
    return int(size[1]) if size else 0


def _image(account: Account, image: str) -> Check:
    match = _IMAGE.fullmatch(image)
    if match is None:
        return unknown("image", f"{image} is not in Artifact Registry, so it is not checked")
    repository = f"projects/{match['project']}/locations/{match['location']}/repositories/{match['repository']}"
    version = f"versions/{match['digest']}" if match["digest"] else f"tags/{match['tag'] or 'latest'}"
    path = f"/v1/{repository}/packages/{quote(match['name'], safe='')}/{version}"
    try:
        _get(account, "artifactregistry", path, what="get image")
    except NotFoundError:
        fix = f"push it: docker push {image}; or name another with --image"
        return failed("image", f"Artifact Registry has no {image}", fix=fix, code=SpecError.exit_code)
    agent = _agent(account)
    if match["project"] == account.settings.project:
        return ok("image", f"Artifact Registry has {image}; jobs pull it as {agent}")
    why = f"Artifact Registry has {image}, in another project; whether jobs may pull it is not known"
    return unknown("image", f"{why}: {pull_hint(repository, agent)}")


def _agent(account: Account) -> str:
    """Return the account that pulls images for jobs. If the caller may not look, its number is a placeholder."""
    try:
        project = _get(account, "cloudresourcemanager", f"/v1/projects/{account.settings.project}", what="get project")
    except CloudtrainError:
        project = {}
    return AGENT.format(project.get("projectNumber") or "PROJECT_NUMBER")
