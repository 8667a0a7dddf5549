"""The loopback Vertex AI itself, with Google's own clients and requests by hand, independent of cloudtrain's
provider."""

from __future__ import annotations

import copy
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.auth
import pytest
from containers import left
from google.api_core import exceptions
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError
from google.auth.transport.requests import Request
from google.cloud.aiplatform_v1 import CustomJob as Message
from google.cloud.aiplatform_v1 import JobServiceClient, JobState
from google.oauth2.credentials import Credentials as Token
from jobs import Jobs
from worlds.vertex.life import CustomJob, _Over
from worlds.vertex.plane import AGENT, Plane
from worlds.vertex.replicas import differences, reading
from worlds.vertex.strict import broken_rules, model_errors, parsed
from worlds.vertex.wire import Fault, Refusal

from cloudtrain.provider_api.launch_spec import LaunchSpec, Mount, NodeSpec

IMAGE = "cloudtrain-test:py313"
BUCKET = "team-bucket"
ACCOUNT = "trainer@contract.iam.gserviceaccount.com"
SEE = """
import json, os, signal, sys, time, urllib.request
spec = json.loads(os.environ["CLUSTER_SPEC"])
here = "/gcs/team-bucket"
me = spec["task"]["type"][-1] + "-" + str(spec["task"]["index"])
def sigterm(*_):
    open(here + "/live/sigterm-" + me, "w").write("sigterm")
    print("sigterm", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, sigterm)
os.makedirs(here + "/live", exist_ok=True)
print(json.dumps({"me": me, "word": open(here + "/word.txt").read(), "env": os.environ["WORD"],
                  "engine": [k for k in os.environ if k.startswith("CLOUDTRAIN_")], "rank": os.environ["RANK"],
                  "hosts": sum(map(len, spec["cluster"].values()))}), flush=True)
"""
SCRIPTS = {
    "done": SEE + "open(here + '/live/done-' + me, 'w').write(me)\n",
    "hold": SEE + "time.sleep(100)\n",
    "deaf": "import time\nprint(1, flush=True)\ntime.sleep(100)\n",
    "fail": SEE + "sys.exit(3) if me == '1-0' else time.sleep(100)\n",
    "abort": SEE + "sys.exit(134)\n",
    "once": SEE + "if not os.path.exists(here + '/live/seen-' + me):\n"
    "    open(here + '/live/seen-' + me, 'w').write('x')\n    time.sleep(100)\n",
    "chief": SEE + "if me != '0-0':\n    print('holding', flush=True)\n    time.sleep(100)\n"
    "time.sleep(3)\n",
    "ask": SEE + """
def ask(path, **headers):
    return urllib.request.urlopen(urllib.request.Request(path, headers=headers), timeout=9).read()
meta = "http://" + os.environ["GCE_METADATA_HOST"] + "/computeMetadata/v1/instance/service-accounts/default/"
token = json.loads(ask(meta + "token", **{"Metadata-Flavor": "Google"}))["access_token"]
signed = {"Authorization": "Bearer " + token}
print(ask(meta + "email", **{"Metadata-Flavor": "Google"}).decode(), flush=True)
store = os.environ["STORAGE_EMULATOR_HOST"] + "/storage/v1/b/team-bucket/o/word.txt?alt=media"
print("stored", ask(store, **signed).decode(), flush=True)
base = os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"]
secret = base + "v1/projects/contract/secrets/s/versions/1:access"
print("secret", json.loads(ask(secret, **signed))["payload"]["data"], flush=True)
""",
}  # fmt: skip
"""Scripts by name. Each prints its view of the node, then waits, ends or fails."""


def pool(count: int = 1, script: str = "done", **more: Any) -> dict[str, Any]:
    """Return a worker pool. ``more`` replaces members."""
    container = {
        "imageUri": IMAGE,
        "command": ["python3", f"/gcs/{BUCKET}/code/{script}.py"],
        "env": [{"name": "WORD", "value": "of the environment"}],
    }
    return {
        "machineSpec": {"machineType": "n1-standard-4"},
        "replicaCount": str(count),
        "containerSpec": container,
        **more,
    }


def body(*pools: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a job that the service accepts. ``more`` replaces members of its spec; None removes one."""
    spec: dict[str, Any] = {
        "workerPoolSpecs": list(pools or (pool(), pool())),
        "scheduling": {"timeout": "600s", "restartJobOnWorkerRestart": True},
        "serviceAccount": ACCOUNT,
        **more,
    }
    job = {key: value for key, value in spec.items() if value is not None}
    return {"displayName": "a-job", "labels": {"run": "r-1"}, "jobSpec": job}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the job with one value changed; a number in the path is an index."""
    made = copy.deepcopy(body())
    at: Any = made
    *before, last = path.split(".")
    for key in before:
        at = at[int(key)] if key.isdigit() else at.setdefault(key, {})
    at[last] = value
    return made


# ------------------------------------------------------------------------------------------------------------- refusals

FIRST = "jobSpec.workerPoolSpecs.0"
GPU = {"machineType": "a2-highgpu-1g", "acceleratorType": "NVIDIA_TESLA_A100", "acceleratorCount": 1}
GB200 = {"machineType": "a4x-highgpu-4g", "acceleratorType": "NVIDIA_GB200", "acceleratorCount": 4}
ANY = {"reservationAffinityType": "ANY_RESERVATION"}
T4 = {"machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 2}
RESERVED = {
    "reservationAffinityType": "SPECIFIC_RESERVATION",
    "key": "compute.googleapis.com/reservation-name",
    "values": ["projects/p/zones/z/reservations/r"],
}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("noSuchField", 1, "no field named \"noSuchField\""),
        ("jobSpec.noSuchField", 1, "no field named \"noSuchField\""),
        ("display_name", "x", "display"),
        ("jobSpec.service_account", ACCOUNT, "not in camel case"),
        ("state", "JOB_STATE_RUNNING", "for the service to say"),
        ("displayName", "", "1 to 128 characters"),
        ("displayName", "x" * 129, "1 to 128 characters"),
        ("labels", {"Run": "x"}, "Invalid label Run"),
        ("labels", {"run": "two words"}, "Invalid label run"),
        ("labels", {"1": "x"}, "Invalid label 1"),
        ("labels", {"r" * 64: "x"}, "Invalid label rrr"),
        ("labels", {"run": 1}, "Failed to parse labels"),
        ("encryptionSpec.kmsKeyName", "mine", "Invalid kms_key_name"),
        ("jobSpec.workerPoolSpecs", [], "1 to 4 pools"),
        (f"{FIRST}.replicaCount", "2", "first worker pool must be 1"),
        (f"{FIRST}.replicaCount", "one", "Failed to parse"),
        (f"{FIRST}.containerSpec.command", "python3 x.py", "Failed to parse"),
        (f"{FIRST}.containerSpec.env", {"A": "1"}, "Failed to parse"),
        (f"{FIRST}.containerSpec.env", [{"name": "A B", "value": "1"}], "at most 100 variables"),
        (f"{FIRST}.containerSpec.env", [{"name": f"A{n}", "value": ""} for n in range(101)], "at most 100 variables"),
        (f"{FIRST}.containerSpec.env", 2 * [{"name": "A", "value": "1"}], "each once"),
        (f"{FIRST}.containerSpec.imageUri", "", "Invalid image URI"),
        (f"{FIRST}.containerSpec", {}, "Invalid image URI"),
        (f"{FIRST}.pythonPackageSpec", {"pythonModule": "m"}, "oneof"),
        (f"{FIRST}.diskSpec.bootDiskType", "nvme", "Unsupported boot disk type"),
        (f"{FIRST}.diskSpec.bootDiskSizeGb", 50, "between 100 and 64000"),
        (f"{FIRST}.machineSpec.machineType", "huge", "Machine type huge is not supported."),
        (f"{FIRST}.machineSpec.machineType", "c3-standard-8", "Machine type c3-standard-8 is not supported."),
        (f"{FIRST}.machineSpec.machineType", "n2-standard-2", "is not supported."),
        (f"{FIRST}.machineSpec", {**T4, "machineType": "n1-standard-32", "acceleratorCount": 1}, "does not take 1"),
        (f"{FIRST}.machineSpec", {"machineType": "cloud-tpu"}, "does not go with"),
        (f"{FIRST}.machineSpec", GB200, "needs a shared reservation"),
        (f"{FIRST}.machineSpec.acceleratorType", "NVIDIA_TESLA_T4", "go together"),
        (f"{FIRST}.machineSpec.acceleratorType", "T4", "Failed to parse acceleratorType"),
        (f"{FIRST}.machineSpec", {**T4, "acceleratorCount": 3}, "does not take 3 NVIDIA_TESLA_T4"),
        (f"{FIRST}.machineSpec", {**T4, "machineType": "n2-standard-8"}, "does not take 2 NVIDIA_TESLA_T4"),
        (f"{FIRST}.machineSpec", {**GPU, "acceleratorCount": 2}, "has 1 NVIDIA_TESLA_A100, not 2"),
        (f"{FIRST}.machineSpec", {**GPU, "acceleratorType": "NVIDIA_L4"}, "has 1 NVIDIA_TESLA_A100"),
        (f"{FIRST}.machineSpec", {"machineType": "a2-highgpu-1g"}, "not 0 ACCELERATOR_TYPE_UNSPECIFIED"),
        (f"{FIRST}.machineSpec.reservationAffinity", {**RESERVED, "values": ["r"]}, "projects/P/zones/Z/reservation"),
        (f"{FIRST}.machineSpec.reservationAffinity", {"values": RESERVED["values"]}, "named by key and values"),
        ("jobSpec.scheduling.timeout", "1h", "Failed to parse timeout"),
        ("jobSpec.scheduling.timeout", 600, "Failed to parse timeout"),
        ("jobSpec.scheduling.timeout", "0s", "must be positive"),
        ("jobSpec.scheduling.strategy", "LOW_COST", "deprecated"),
        ("jobSpec.scheduling.strategy", "CHEAP", "Failed to parse strategy"),
        ("jobSpec.scheduling.disableRetries", True, "not for a job with disable_retries"),
        ("jobSpec.scheduling.maxWaitDuration", "600s", "for FLEX_START only"),
        ("jobSpec.scheduling.strategy", "FLEX_START", "FLEX_START has no machines with ACCELERATOR_TYPE_UNSPECIFIED"),
        ("jobSpec.serviceAccount", "me", "Invalid service account"),
        ("jobSpec.network", "projects/p/global/networks/default", "Invalid network"),
        ("jobSpec.reservedIpRanges", ["r"], "needs a network"),
        ("jobSpec.tensorboard", "mine", "Invalid tensorboard"),
        ("jobSpec.persistentResourceId", "Mine", "Invalid persistent_resource_id"),
        ("jobSpec.baseOutputDirectory.outputUriPrefix", "s3://b/x", "Invalid base_output_directory"),
    ],
)  # fmt: skip
def test_the_service_refuses(path: str, value: Any, words: str) -> None:
    request = changed(path, value)
    assert words in "; ".join(model_errors(request) or broken_rules(parsed(request)))


def test_the_service_refuses_flexible_and_spot_machines() -> None:
    small = {"machineType": "a3-highgpu-1g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 1}
    flexible = {"strategy": "FLEX_START", "timeout": "600s"}
    for pools, scheduling, words in (
        (
            [pool(machineSpec=GPU), pool(machineSpec=T4)],
            flexible,
            "All worker pools of FLEX_START have the same machines",
        ),
        ([pool(machineSpec=GPU)], {**flexible, "timeout": "604801s"}, "7 days at most"),
        ([pool(machineSpec=small)], {}, "for SPOT and FLEX_START only"),
        ([pool(machineSpec={**GPU, "reservationAffinity": RESERVED})], {"strategy": "SPOT"}, "STANDARD only"),
        ([pool(machineSpec={**GPU, "reservationAffinity": ANY})], {"strategy": "SPOT"}, "STANDARD only"),
        ([pool(), pool(), pool(), pool(), pool()], {}, "1 to 4 pools"),
    ):
        assert words in " ".join(broken_rules(parsed(body(*pools, scheduling=scheduling)))), words


def test_a_job_on_a_persistent_resource_takes_no_reservation() -> None:
    job = body(pool(machineSpec={**GPU, "reservationAffinity": RESERVED}), persistentResourceId="mine")
    assert "cannot consume a reservation" in " ".join(broken_rules(parsed(job)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("labels", {"ключ": "ü-1_"}),
        (f"{FIRST}.machineSpec", {**GB200, "reservationAffinity": RESERVED}),
        (f"{FIRST}.machineSpec", {**GPU, "reservationAffinity": ANY}),
        (f"{FIRST}.machineSpec", {**GPU, "reservationAffinity": {"reservationAffinityType": "NO_RESERVATION"}}),
        (f"{FIRST}.machineSpec", T4),
        (f"{FIRST}.machineSpec", {**GPU, "reservationAffinity": RESERVED}),
        (f"{FIRST}.machineSpec", {"machineType": "a3-ultragpu-8g", "acceleratorType": 15, "acceleratorCount": 8}),
        (f"{FIRST}.replicaCount", 1),
        (f"{FIRST}.diskSpec", {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 500}),
        ("jobSpec.workerPoolSpecs", [pool(), {}, pool(2)]),
        ("jobSpec.workerPoolSpecs", [pool()]),
        ("jobSpec.scheduling", {"strategy": "SPOT", "timeout": "3.5s"}),
        ("jobSpec.network", "projects/12345/global/networks/vpc"),
        ("jobSpec.enableWebAccess", True),
    ],
)
def test_the_service_accepts(path: str, value: Any) -> None:
    request = changed(path, value)
    assert model_errors(request) + broken_rules(parsed(request)) == []


# ------------------------------------------------------------------------------------------------------------- readings

NAME = "projects/contract/locations/europe-west4/customJobs/42"


def test_a_reading_follows_the_pages() -> None:
    given = body(pool(), {}, pool(2), baseOutputDirectory={"outputUriPrefix": f"gs://{BUCKET}/out"})
    nodes = reading(NAME, parsed(given)).nodes
    specs = [json.loads(node.env["CLUSTER_SPEC"]) for node in nodes]
    assert [(spec["task"]["type"], spec["task"]["index"]) for spec in specs] == [
        ("workerpool0", 0), ("workerpool2", 0), ("workerpool2", 1),
    ]  # fmt: skip
    assert {key: len(hosts) for key, hosts in specs[0]["cluster"].items()} == {"workerpool0": 1, "workerpool2": 2}
    assert specs[0]["cluster"]["workerpool2"][1] == f"{nodes[2].hostname}:2222"
    assert specs[0]["job"]["workerPoolSpecs"][0]["containerSpec"]["env"][0]["value"] == "of the environment"
    first = nodes[0].env
    assert (first["CLOUD_ML_JOB_ID"], first["CLOUD_ML_REGION"]) == ("42", "europe-west4")
    assert first["AIP_CHECKPOINT_DIR"] == f"gs://{BUCKET}/out/checkpoints/"
    assert "TF_CONFIG" not in reading(NAME, parsed(body(pool()))).nodes[0].env
    assert json.loads(first["TF_CONFIG"])["task"] == {"type": "chief", "index": 0}


def test_differences_finds_every_part() -> None:
    ours = reading(NAME, parsed(body()))
    assert differences(body(), ours) == []
    for path, value in (
        (f"{FIRST}.containerSpec.imageUri", "other"),
        (f"{FIRST}.containerSpec.command", ["true"]),
        (f"{FIRST}.containerSpec.args", ["x"]),
        (f"{FIRST}.containerSpec.env", []),
        ("jobSpec.workerPoolSpecs", [pool()]),
        ("jobSpec.workerPoolSpecs", [pool(), {}, pool()]),
        ("jobSpec.scheduling", {"timeout": "7s"}),
        ("jobSpec.scheduling", {"timeout": "600s", "disableRetries": True}),
    ):
        assert differences(changed(path, value), ours), path
    elsewhere = Mount(url=f"gs://{BUCKET}/x", path="/mnt/x", kind="sync")
    one = NodeSpec(**{**vars(ours.nodes[0]), "mounts": [elsewhere]})
    assert "'/gcs/team-bucket/x'" in differences(body(), LaunchSpec(nodes=[one, *ours.nodes[1:]], rules=ours.rules))[0]


@pytest.mark.parametrize(
    ("codes", "state"),
    [
        ((134, 137), ""),
        ((0, 137), ""),
        ((143, 137), ""),  # killed by the service, with the lost one
        ((1, 137), "JOB_STATE_FAILED"),
        ((3, -9), "JOB_STATE_FAILED"),
    ],
)
def test_after_a_loss_a_replica_that_fails_for_good_ends_the_job(
    tmp_path: Path, codes: tuple[int, int], state: str
) -> None:
    """Lose node 1, and check by the exit code of node 0 if the job starts again. No container runs."""
    made = object.__new__(CustomJob)
    made.record, made.replicas, made._lost, made._for_good, made._failed = parsed(body()), ["0", "1"], {1}, False, 1
    made.containers = [SimpleNamespace(poll=lambda code=code: code, trouble=None) for code in codes]
    made.plane, made._counts, made._say = SimpleNamespace(number="1"), {"lost": 0}, lambda text: None
    for number in range(2):
        (tmp_path / f"node-{number}.log").write_text("the last line")
    if not state:
        made._conclude("failed", tmp_path)
        assert made._counts["lost"] == 1
        return
    with pytest.raises(_Over) as caught:
        made._conclude("failed", tmp_path)
    assert caught.value.state == state
    assert f"The replica 0 exited with a non-zero status of {codes[0]}" in caught.value.message


# ------------------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Give a project that has machines only where a test uses the engine too."""
    with Plane(tmp_path / "google") as made:
        for name, value in made.environ().items():
            monkeypatch.setenv(name, value)
        made.no_capacity, made.capacity_seconds = True, 600.0
        made.accounts.add(ACCOUNT)
        made.gcs.make(BUCKET)
        made.gcs.put(BUCKET, "word.txt", b"of the bucket")
        for name, text in SCRIPTS.items():
            made.gcs.put(BUCKET, f"code/{name}.py", text.encode())
        yield made


def token(plane: Plane) -> Credentials:
    """Return a plain token: those of a service account look up its regions in the background, outside these tests."""
    return Token(plane.identity.issue(plane.identity.email))


@pytest.fixture
def client(plane: Plane) -> Iterator[JobServiceClient]:
    """Give the generated client."""
    with JobServiceClient(
        credentials=token(plane), client_options={"api_endpoint": plane.url}, transport="rest"
    ) as made:
        yield made


def create(client: JobServiceClient, plane: Plane, *pools: Mapping[str, Any], **more: Any) -> CustomJob:
    """Create a job from JSON by the client."""
    message = Message.from_json(json.dumps(body(*pools, **more)))
    return plane.job(client.create_custom_job(parent=plane.parent, custom_job=message).name)


class Raw:
    """A client for requests by hand; with ``signed`` False, without a token."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.signed = plane, True

    def __call__(self, method: str, path: str, value: Any = None, **headers: str) -> tuple[int, Mapping[str, str], Any]:
        all_headers = {"Authorization": f"Bearer {self.plane.identity.issue(ACCOUNT)}"} if self.signed else {}
        data = value if isinstance(value, bytes) else None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(self.plane.url + path, data, {**all_headers, **headers}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, answer_headers, text = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                status, answer_headers, text = exc.code, exc.headers, exc.read()
        return (
            status,
            answer_headers,
            json.loads(text) if answer_headers["Content-Type"] == "application/json" and text else text,
        )


@pytest.fixture
def raw(plane: Plane) -> Raw:
    return Raw(plane)


JOBS = "/v1/projects/contract/locations/europe-west4/customJobs"


@pytest.mark.remote
class TestWire:
    def test_a_job_is_created_found_and_listed(self, plane: Plane, client: JobServiceClient) -> None:
        made = create(client, plane)
        answer = client.get_custom_job(name=made.name)
        assert (answer.name, answer.state, answer.display_name) == (made.name, JobState.JOB_STATE_PENDING, "a-job")
        assert answer.job_spec.worker_pool_specs[1].container_spec.env[0].value == "of the environment"
        assert answer.create_time.timestamp() <= time.time()
        others = [create(client, plane) for _ in range(4)]
        assert len({job.name for job in (made, *others)}) == 5, "the caller gives no name, so each call is another job"
        pages = client.list_custom_jobs(request={"parent": plane.parent, "page_size": 2})
        assert [job.name for job in pages] == [job.name for job in reversed((made, *others))]
        for wanted, count in (
            ('labels.run="r-1"', 5),
            ('labels.run="r-1" AND display_name="b"', 0),
            ("labels.x=r-1", 0),
        ):
            found = client.list_custom_jobs(request={"parent": plane.parent, "filter": wanted})
            assert len(list(found)) == count, wanted
        with pytest.raises(exceptions.BadRequest, match="Invalid filter"):
            client.list_custom_jobs(request={"parent": plane.parent, "filter": "labels.run:*"})
        with pytest.raises(exceptions.NotFound, match="does not exist"):
            client.get_custom_job(name=f"{plane.parent}/customJobs/7")

    def test_a_cancel_is_followed_to_its_end(self, plane: Plane, client: JobServiceClient) -> None:
        made = create(client, plane)
        client.cancel_custom_job(name=made.name)
        assert made.wait() == "JOB_STATE_CANCELLED"
        assert made.history == ["JOB_STATE_PENDING", "JOB_STATE_CANCELLING", "JOB_STATE_CANCELLED"]
        answer = client.get_custom_job(name=made.name)
        assert (answer.state, answer.error.message, "start_time" in answer) == (
            JobState.JOB_STATE_CANCELLED,
            "CANCELED",
            False,
        )
        with pytest.raises(exceptions.BadRequest, match="cannot be cancelled"):
            client.cancel_custom_job(name=made.name)

    def test_enums_go_both_ways_as_numbers_and_as_names(self, plane: Plane, raw: Raw) -> None:
        given = body(pool(machineSpec={**T4, "acceleratorType": 5}), scheduling={"strategy": "SPOT"})
        status, _, answer = raw("POST", JOBS, given)
        assert (status, answer["state"]) == (200, "JOB_STATE_PENDING")
        machine = answer["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]
        assert (machine["acceleratorType"], answer["jobSpec"]["workerPoolSpecs"][0]["replicaCount"]) == (
            "NVIDIA_TESLA_T4",
            "1",
        )
        answer = raw("GET", f"/v1/{answer['name']}?$alt=json;enum-encoding=int")[2]
        assert (answer["state"], answer["jobSpec"]["scheduling"]["strategy"]) == (2, 4)
        plane.unknown[answer["name"]] = 77
        assert raw("GET", f"/v1/{answer['name']}?%24alt=json%3Benum-encoding%3Dint")[2]["state"] == 77

    def test_a_body_with_an_unknown_field_makes_no_job(self, plane: Plane, raw: Raw) -> None:
        status, _, answer = raw("POST", JOBS, {**body(), "retries": 3})
        assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert plane.jobs == {}

    def test_a_refused_caller_learns_the_missing_permission(self, plane: Plane, raw: Raw) -> None:
        for path, given, words in (
            (JOBS.replace("contract", "other"), body(), "'aiplatform.customJobs.create' denied"),
            (
                JOBS,
                body(serviceAccount="boss@contract.iam.gserviceaccount.com"),
                "permission to act as service_account",
            ),
        ):
            status, _, error = raw("POST", path, given)
            assert (status, words in error["error"]["message"]) == (403, True)
        plane.wire.faults.append(Fault.disabled("POST customJobs", "contract"))
        error = raw("POST", JOBS, body())[2]["error"]
        assert "has not been used in project contract before or it is disabled" in error["message"]
        assert error["details"][0]["reason"] == "SERVICE_DISABLED"
        assert raw("POST", JOBS.replace("europe-west4", "us-east1"), body())[0] == 400
        assert plane.jobs == {}

    def test_a_quota_that_is_too_small_names_its_metric(self, plane: Plane, raw: Raw) -> None:
        plane.quotas["custom_model_training_preemptible_nvidia_t4_gpus"] = 3
        given = body(pool(machineSpec=T4), pool(machineSpec=T4), scheduling={"strategy": "SPOT"})
        status, _, await_lines = raw("POST", JOBS, given)
        assert (status, await_lines["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
        assert (
            "aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_t4_gpus"
            in await_lines["error"]["message"]
        )
        assert raw("POST", JOBS, body(pool(machineSpec=T4), scheduling={"strategy": "SPOT"}))[0] == 200

    def test_machines_that_never_come(self, plane: Plane, client: JobServiceClient) -> None:
        plane.capacity_seconds = 0.3
        plane.error_late = 1.0
        made = create(client, plane)
        assert made.wait() == "JOB_STATE_FAILED"
        assert client.get_custom_job(name=made.name).error.code == 0, "the error must come late"
        Jobs.wait_for(lambda: client.get_custom_job(name=made.name).error.code == 8)
        assert "insufficient in region: europe-west4" in client.get_custom_job(name=made.name).error.message
        flexible = {"strategy": "FLEX_START", "maxWaitDuration": "1s"}
        for plane.waited_out in ("EXPIRED", "CANCELLED"):
            made = create(client, plane, pool(machineSpec=GPU), scheduling=flexible)
            assert made.wait() == f"JOB_STATE_{plane.waited_out}"
            waited = made.record.start_time.ToDatetime() - made.record.create_time.ToDatetime()
            assert 0 < waited.total_seconds() < 1, "startTime must be the admission, as in every recorded job"

    @pytest.mark.parametrize(
        ("fault", "kind"),
        [
            (Fault.throttled("GET customJob", seconds=7), exceptions.TooManyRequests),
            (Fault.broken("GET customJob"), exceptions.ServiceUnavailable),
            (Fault.broken("*", code="INTERNAL"), exceptions.InternalServerError),
            (Fault("GET customJob", Refusal.denied("aiplatform.customJobs.get", "x")), exceptions.Forbidden),
        ],
    )
    def test_faults_on_demand(
        self, plane: Plane, client: JobServiceClient, fault: Fault, kind: type[Exception]
    ) -> None:
        made = create(client, plane)
        plane.wire.faults.append(fault)
        with pytest.raises(kind):
            client.get_custom_job(name=made.name)
        assert client.get_custom_job(name=made.name).name == made.name

    def test_a_lost_answer_has_had_its_effect(self, plane: Plane, raw: Raw) -> None:
        plane.list_lag = 0.5
        plane.wire.faults.append(Fault("POST customJobs", done=True))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            raw("POST", JOBS, body())
        assert len(plane.jobs) == 1
        assert raw("GET", JOBS)[2] == {}, "a listing must lag"
        Jobs.wait_for(lambda: len(raw("GET", JOBS)[2].get("customJobs", [])) == 1)
        plane.wire.faults.append(Fault("POST customJobs"))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            raw("POST", JOBS, body())
        assert len(plane.jobs) == 1

    def test_closing_leaves_no_thread(self, tmp_path: Path) -> None:
        """Check with a waiting job, and with a connection that its client keeps."""
        before = set(threading.enumerate())
        with Plane(tmp_path / "google") as made:
            made.no_capacity, made.capacity_seconds = True, 600.0
            assert Raw(made)("POST", JOBS, body(serviceAccount=None))[0] == 200
            kept = http.client.HTTPConnection(made.url.removeprefix("http://"))
            kept.request("GET", JOBS)
            assert kept.getresponse().read()
            assert set(threading.enumerate()) > before
        assert set(threading.enumerate()) == before
        assert next(iter(made.jobs.values())).state == "JOB_STATE_CANCELLED"
        kept.close()


@pytest.mark.remote
class TestIdentity:
    def test_a_service_account_signs_in(self, plane: Plane, raw: Raw) -> None:
        raw.signed = False
        credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        assert project == "another-project"
        own = credentials.with_always_use_jwt_access(True)
        for made in (credentials, own):
            made.refresh(Request())
            assert raw("GET", JOBS, Authorization=f"Bearer {made.token}")[0] == 200
        plane.identity.expire()
        assert raw("GET", JOBS, Authorization=f"Bearer {credentials.token}")[0] == 401
        plane.identity.signed_in = False
        with pytest.raises(RefreshError, match="invalid_grant"):
            credentials.refresh(Request())
        assert raw("GET", JOBS, Authorization=f"Bearer {own.token}")[0] == 401
        for forged in ("", "ya29.made-up", own.token[:-4] + "AAAA"):
            assert raw("GET", JOBS, Authorization=f"Bearer {forged}")[0] == 401
        assert raw("GET", JOBS)[0] == 401

    def test_a_node_is_its_job_s_account(self, plane: Plane, raw: Raw) -> None:
        path = "/computeMetadata/v1/instance/service-accounts/default"
        flavor = {"Metadata-Flavor": "Google"}
        assert raw("GET", f"{path}/token", **flavor)[0] == 404, "this address belongs to no node"
        plane.identity.nodes[plane.url.removeprefix("http://")] = AGENT
        assert raw("GET", f"{path}/token")[0] == 403
        assert raw("GET", f"{path}/email", **flavor)[2] == AGENT.encode()
        plane.identity.values["projects/p/secrets/s/versions/1"] = "s3cret"
        access = "/v1/projects/p/secrets/s/versions/1:access"
        assert raw("GET", access)[0] == 403
        plane.identity.readers.add(AGENT)
        raw.signed = False
        answer = raw("GET", f"{path}/token", **flavor)[2]
        assert answer["expires_in"] > 0
        signed = {"Authorization": f"Bearer {answer['access_token']}"}
        assert raw("GET", access, **signed)[2]["payload"] == {"data": "czNjcmV0"}
        assert raw("GET", access.replace("/s/", "/t/"), **signed)[0] == 404


@pytest.mark.remote
class TestStorage:
    """Parts that `tests/storage/test_files.py` does not need. It tests the rest of the API through gcsfs."""

    def test_generations_are_kept(self, plane: Plane, raw: Raw) -> None:
        upload = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=a%2Fb"
        one = f"/storage/v1/b/{BUCKET}/o/a%2Fb"
        status, _, first = raw("POST", f"{upload}&ifGenerationMatch=0", b"1")
        assert (status, first["name"], first["size"]) == (200, "a/b", "1")
        assert raw("POST", f"{upload}&ifGenerationMatch=0", b"2")[0] == 412
        second = raw("POST", f"{upload}&ifGenerationMatch={first['generation']}", b"22")[2]
        assert int(second["generation"]) > int(first["generation"])
        assert raw("POST", f"{upload}&ifGenerationMatch={first['generation']}", b"3")[0] == 412
        assert raw("GET", f"{one}?alt=media&generation={first['generation']}")[0] == 404
        assert raw("GET", f"{one}?alt=media&ifGenerationMatch={second['generation']}")[2] == b"22"
        assert raw("DELETE", f"{one}?ifGenerationMatch={first['generation']}")[0] == 412
        assert raw("DELETE", f"{one}?ifGenerationMatch={second['generation']}")[0] == 204
        assert raw("GET", one)[0] == raw("DELETE", one)[0] == 404
        assert not (plane.gcs.folder / BUCKET / "a").exists(), "an implicit folder must go with its last object"

    def test_one_of_many_simultaneous_creators_succeeds(self, plane: Plane, raw: Raw) -> None:
        upload = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&ifGenerationMatch=0&name="
        for number in range(20):
            found: list[int] = []
            barrier = threading.Barrier(4)

            def race(
                path: str = f"{upload}{number}", found: list[int] = found, at: threading.Barrier = barrier
            ) -> None:
                at.wait()
                found.append(raw("POST", path, b"x")[0])

            racers = [threading.Thread(target=race) for _ in range(4)]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            assert sorted(found) == [200, 412, 412, 412]

    def test_a_node_s_files_are_objects_and_its_folders_too(self, plane: Plane, raw: Raw) -> None:
        here = plane.gcs.folder / BUCKET
        (here / "made/empty").mkdir(parents=True)
        (here / "made/file").write_text("by a node")
        plane.gcs.put(BUCKET, "sent/file", b"by a client")
        assert plane.gcs.names(BUCKET, "made") == ["made/", "made/empty/", "made/file"]
        assert plane.gcs.names(BUCKET, "sent") == ["sent/file"]
        assert (here / "sent/file").read_text() == "by a client"
        assert raw("GET", f"/storage/v1/b/{BUCKET}/o/made%2Ffile?alt=media", Range="bytes=3-")[::2] == (206, b"a node")
        assert raw("GET", f"/storage/v1/b/{BUCKET}/o/made%2F")[2]["size"] == "0"
        answer = raw("GET", f"/storage/v1/b/{BUCKET}/o?delimiter=/&prefix=made/&maxResults=2")[2]
        assert ([item["name"] for item in answer["items"]], answer["prefixes"]) == (["made/"], ["made/empty/"])
        rest = raw("GET", f"/storage/v1/b/{BUCKET}/o?delimiter=/&prefix=made/&pageToken={answer['nextPageToken']}")[2]
        assert ([item["name"] for item in rest["items"]], "nextPageToken" in rest) == (["made/file"], False)

    def test_google_s_own_client_moves_large_objects(self, plane: Plane) -> None:
        from google.cloud import storage

        plane.gcs.make("other", "EU", "multi-region")
        assert plane.mounted() == [BUCKET]
        made = storage.Client(project="contract", credentials=token(plane))
        try:
            assert [(b.name, b.location, b.location_type) for b in made.list_buckets()] == [
                ("other", "EU", "multi-region"), (BUCKET, "EUROPE-WEST4", "region"),
            ]  # fmt: skip
            data = bytes(range(256)) * 5000
            blob = made.bucket(BUCKET).blob("large", chunk_size=1 << 18)
            blob.upload_from_string(data, if_generation_match=0)
            assert plane.gcs.read(BUCKET, "large") == data
            assert made.bucket(BUCKET).blob("large").download_as_bytes() == data
            with pytest.raises(exceptions.PreconditionFailed):
                blob.upload_from_string(b"again", if_generation_match=0)
            with pytest.raises(exceptions.NotFound):
                made.get_bucket("none")
        finally:
            made.close()

    def test_names_that_are_not_paths_are_refused(self, plane: Plane, raw: Raw) -> None:
        for name in ("a%2F%2Fb", "..%2Fx", "word.txt%2Fbelow"):
            assert raw("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}", b"x")[0] == 400, name
        raw.signed = False
        assert raw("GET", f"/storage/v1/b/{BUCKET}")[0] == 401


# ---------------------------------------------------------------------------------------------------------------- logs

READ = {"resourceNames": ["projects/contract"], "orderBy": "timestamp asc"}
OF_JOB = 'resource.type="ml_job" AND resource.labels.job_id="42"'


def read(raw: Raw, **more: Any) -> list[dict[str, Any]]:
    """Return all pages of a query."""
    request, entries = {**READ, "filter": OF_JOB, **more}, []
    while True:
        status, _, answer = raw("POST", "/v2/entries:list", request)
        assert status == 200, answer
        entries += answer.get("entries", [])
        if "nextPageToken" not in answer:
            return entries
        request = {**request, "pageToken": answer["nextPageToken"]}


@pytest.mark.remote
class TestLogs:
    def test_entries_come_in_pages_by_time(self, plane: Plane, raw: Raw) -> None:
        for second in (3, 1, 2):
            lines = [f"line {second}.{number}" for number in range(4)]
            plane.entries.put("42", f"workerpool{second % 2}-0", lines, at=second * 10**9 + 5)
        plane.entries.put("43", "workerpool0-0", ["of another job"])
        found = read(raw, pageSize=5)
        assert [entry["textPayload"][5] for entry in found] == list("111122223333")
        assert len({(entry["timestamp"], entry["insertId"], entry["logName"]) for entry in found}) == 12
        assert found[0]["timestamp"] == "1970-01-01T00:00:01.000000005Z"
        assert found[0]["resource"]["labels"]["task_name"] == "workerpool1-0"
        later = f'{OF_JOB} AND timestamp>="1970-01-01T00:00:03.000000005Z"'
        assert len(read(raw, filter=later)) == 4
        assert len(read(raw, filter=f'{OF_JOB} AND resource.labels.task_name="workerpool0-0"')) == 4
        assert read(raw, orderBy="timestamp desc", pageSize=3)[0]["textPayload"].startswith("line 3")

    def test_a_line_of_json_becomes_a_json_payload(self, plane: Plane, raw: Raw) -> None:
        plane.entries.put(
            "42", "workerpool0-0", ['{"message": "m", "severity": "ERROR", "step": 3}', '{"a": 1}', "[1]"]
        )
        found = {
            json.dumps(entry.get("jsonPayload", entry.get("textPayload"))): entry["severity"] for entry in read(raw)
        }
        assert found == {'{"message": "m", "step": 3}': "ERROR", '"{\\"a\\": 1}"': "INFO", '"[1]"': "INFO"}

    def test_late_entries_and_entries_that_come_twice(self, plane: Plane, raw: Raw) -> None:
        plane.entries.delay = lambda task, text: 0.5 if text == "late" else 0.0
        plane.entries.twice = lambda entry: entry.text == "twice"
        plane.entries.page_entries, plane.entries.repeats = 2, 1
        plane.entries.put("42", "workerpool0-0", ["late"], at=10**9)
        for text in ("first", "twice", "third", "last"):
            plane.entries.put("42", "workerpool0-0", [text])
        texts = lambda: [entry["textPayload"] for entry in read(raw)]  # noqa: E731
        assert texts() == ["first", "twice", "twice", "twice", "twice", "third", "last"]
        Jobs.wait_for(lambda: texts()[0] == "late")

    def test_logs_refuse_like_the_service(self, plane: Plane, raw: Raw) -> None:
        plane.entries.put("42", "workerpool0-0", ["one", "two"])
        first = raw("POST", "/v2/entries:list", {**READ, "filter": OF_JOB, "pageSize": 1})[2]
        for request, status in (
            ({**READ, "resourceNames": ["projects/other"]}, 403),
            ({**READ, "resource_names": []}, 400),
            ({**READ, "orderBy": "severity"}, 400),
            ({**READ, "filter": "resource.type=ml_job OR x"}, 400),
            ({**READ, "filter": 'nonsense="x"'}, 400),
            ({**READ, "filter": 'timestamp>="yesterday"'}, 400),
            ({**READ, "filter": "", "pageToken": first["nextPageToken"]}, 400),
            ({**READ, "pageToken": "x"}, 400),
        ):
            assert raw("POST", "/v2/entries:list", request)[0] == status, request
        plane.entries.reads = 1
        assert raw("POST", "/v2/entries:list", READ)[0] == 429


# -------------------------------------------------------------------------------------------------------- jobs that run


class Running:
    """A client that sends jobs by the generated client to a `Plane` with machines."""

    def __init__(self, plane: Plane, client: JobServiceClient) -> None:
        self.plane, self.client = plane, client

    def send(self, script: str, *, nodes: int = 2, strategy: str = "STANDARD", **more: Any) -> CustomJob:
        pools = [pool(script=script), *([pool(nodes - 1, script)] if nodes > 1 else [])]
        scheduling = {"timeout": "600s", "restartJobOnWorkerRestart": True, "strategy": strategy, **more}
        return create(self.client, self.plane, *pools, scheduling=scheduling)

    def keys(self) -> set[str]:
        return {name.removeprefix("live/") for name in self.plane.gcs.names(BUCKET, "live/")} - {""}

    def await_lines(self, made: CustomJob, text: str, times: int = 2) -> None:
        """Wait until the replicas have printed ``text`` in so many lines."""
        Jobs.wait_for(lambda: made.over or sum(text in line for line in made.printed().splitlines()) >= times)
        assert not made.over, made.record.error


@pytest.fixture
def running(
    plane: Plane, client: JobServiceClient, engine: Any, images: Callable[[str], str], tmp_path: Path
) -> Iterator[Running]:
    images("py313")
    before = left(engine, tmp_path)
    plane.no_capacity = False
    yield Running(plane, client)
    plane.close()
    assert left(engine, tmp_path) == before


@pytest.mark.docker
@pytest.mark.remote
@pytest.mark.slow
class TestJobs:
    def test_a_job_succeeds_with_the_platform_s_environment(self, running: Running) -> None:
        plane = running.plane
        plane.identity.values["projects/contract/secrets/s/versions/1"] = "s3cret"
        plane.identity.readers.add(ACCOUNT)
        made = running.send("ask")
        assert made.wait() == "JOB_STATE_SUCCEEDED", made.record.error
        states = ("PENDING", "QUEUED", "PENDING", "RUNNING", "SUCCEEDED")
        assert made.history == [f"JOB_STATE_{state}" for state in states]
        lines = made.printed().splitlines()
        views = [json.loads(line) for line in lines if line.startswith("{")]
        assert sorted(item.pop("me") for item in views) == ["0-0", "1-0"]
        await_lines = {"word": "of the bucket", "env": "of the environment", "engine": [], "rank": "7", "hosts": 2}
        assert views == [await_lines, await_lines]
        for word in (ACCOUNT, "stored of the bucket", "secret czNjcmV0"):
            assert lines.count(word) == 2
        answer = running.client.get_custom_job(name=made.name)
        assert answer.create_time <= answer.start_time <= answer.end_time
        messages = plane.entries.messages(made.id)
        assert sorted(set(messages) & {*lines}) == sorted(set(lines))
        assert messages[-1] == "Job completed successfully."

    def test_the_primary_replica_s_success_ends_all_others_at_once(self, running: Running) -> None:
        made = running.send("chief")
        running.await_lines(made, "holding", 1)
        assert made.wait() == "JOB_STATE_SUCCEEDED"
        assert "sigterm" not in made.printed()

    def test_preempted_spot_machines_start_the_job_again(self, running: Running) -> None:
        made = running.send("once", strategy="SPOT")
        Jobs.wait_for(lambda: running.keys() == {"seen-0-0", "seen-1-0"})
        made.preempt(1)
        assert made.wait() == "JOB_STATE_SUCCEEDED"
        assert running.keys() == {"seen-0-0", "seen-1-0", "sigterm-0-0", "sigterm-1-0"}
        assert made.history.count("JOB_STATE_RUNNING") == 2

    def test_a_cancel_reaches_every_container(self, running: Running) -> None:
        made = running.send("hold")
        running.await_lines(made, '"me"')
        running.client.cancel_custom_job(name=made.name)
        assert made.wait() == "JOB_STATE_CANCELLED"
        assert running.keys() == {"sigterm-0-0", "sigterm-1-0"}

    @pytest.mark.proof
    def test_a_failure_names_the_replica_and_its_code(self, running: Running) -> None:
        made = running.send("fail")
        assert made.wait() == "JOB_STATE_FAILED"
        error = made.record.error
        assert error.code == 3
        assert "The replica workerpool1-0 exited with a non-zero status of 3" in error.message
        assert running.keys() == {"sigterm-0-0"}, "its peer must get the signal"

    @pytest.mark.proof
    def test_an_unused_grace_ends_in_a_kill(self, running: Running) -> None:
        running.plane.grace = 1.0
        made = running.send("deaf")
        Jobs.wait_for(lambda: made.printed().count("1") == 2)
        made.stop()
        assert made.wait() == "JOB_STATE_CANCELLED"

    @pytest.mark.proof
    @pytest.mark.parametrize("state", ["CANCELLED", "EXPIRED", "FAILED"])
    def test_the_time_limit_ends_it(self, running: Running, state: str) -> None:
        running.plane.timed_out = state
        made = running.send("hold", timeout="2s")
        assert made.wait() == f"JOB_STATE_{state}"

    @pytest.mark.proof
    def test_a_spot_job_is_restarted_only_as_often_as_documented(self, running: Running) -> None:
        made = running.send("hold", nodes=1, strategy="SPOT")
        for start in range(1, 8):
            running.await_lines(made, '"me"', start)
            made.preempt()
            Jobs.wait_for(lambda count=start: made.over or made.starts > count)
        assert (made.wait(), made.starts) == ("JOB_STATE_FAILED", 7)
        assert made.record.error.code == 8

    @pytest.mark.proof
    def test_a_job_that_aborts_starts_four_times(self, running: Running) -> None:
        made = running.send("abort", nodes=1)
        assert (made.wait(), made.starts) == ("JOB_STATE_FAILED", 4)
        assert "non-zero status of 134" in made.record.error.message
        made = running.send("abort", nodes=1, disableRetries=True, restartJobOnWorkerRestart=False)
        assert (made.wait(), made.starts) == ("JOB_STATE_FAILED", 1)

    @pytest.mark.proof
    @pytest.mark.parametrize("for_good", [False, True])
    def test_a_lost_machine_starts_the_job_again(self, running: Running, for_good: bool) -> None:
        made = running.send("once")
        Jobs.wait_for(lambda: running.keys() == {"seen-0-0", "seen-1-0"})
        made.lose(1, for_good=for_good)
        assert made.wait() == ("JOB_STATE_FAILED" if for_good else "JOB_STATE_SUCCEEDED")
        assert made.starts == 2 - for_good
        assert made.record.error.code == (13 if for_good else 0)

    @pytest.mark.proof
    def test_a_job_waits_for_quota_that_another_holds(self, running: Running) -> None:
        running.plane.quotas["custom_model_training_cpus"] = 8
        first = running.send("hold")
        running.await_lines(first, '"me"')
        second = running.send("done", nodes=1)
        Jobs.wait_for(lambda: second.state == "JOB_STATE_QUEUED")
        first.stop()
        assert second.wait() == "JOB_STATE_SUCCEEDED"

    @pytest.mark.proof
    def test_images_that_cannot_be_started(self, running: Running) -> None:
        container = {"imageUri": "team/none:1"}
        made = create(running.client, running.plane, pool(containerSpec=container))
        assert made.wait() == "JOB_STATE_FAILED"
        assert "Failed to pull image" in made.record.error.message
        made = create(running.client, running.plane, pool(containerSpec={"imageUri": IMAGE, "command": ["no-such"]}))
        assert made.wait() == "JOB_STATE_FAILED"
        assert "status of 128. Termination reason: StartError" in made.record.error.message
