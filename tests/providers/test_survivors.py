"""Tests of surviving mutants of `make mutants`: words and limits that scripts and users rely on."""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plans import Plans
from rows import for_each
from worlds.vertex.wire import Answer, Wire

from cloudtrain.errors import AuthError, NotFoundError, PlatformError, SpecError, UnsupportedError
from cloudtrain.provider_api.node import Topology
from cloudtrain.providers import local
from cloudtrain.providers.azureml import Provider as AzureML
from cloudtrain.providers.azureml import api as azure
from cloudtrain.providers.azureml import status as azureml
from cloudtrain.providers.azureml.request import TAG_VALUE, _page
from cloudtrain.providers.docker import ENGINE_PREFIX, PORT, PREEMPTED
from cloudtrain.providers.docker import Provider as Docker
from cloudtrain.providers.local import Provider as Local
from cloudtrain.providers.sagemaker import Provider as SageMaker
from cloudtrain.providers.sagemaker import api as aws
from cloudtrain.providers.sagemaker import status as sagemaker
from cloudtrain.providers.vertex import Provider as Vertex
from cloudtrain.providers.vertex import api as google
from cloudtrain.providers.vertex import status as vertex
from cloudtrain.providers.vertex.request import TAG_CI, TAG_COUNT, TAG_REVISION, _origin
from cloudtrain.runtime import host_facts
from cloudtrain.storage.timings import CLIENT_TIMINGS

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/run-a0"
IN_VERTEX = Plans(Vertex, {"project": "p", "location": "europe-west4"}, "gs://b/s", {"image": "team/trainer:1"})
ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
OF_SAGEMAKER = {"role": ROLE, "region": "eu-west-1"}
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
IN_SAGEMAKER = Plans(SageMaker, OF_SAGEMAKER, "s3://bucket/store")
TIER = {"job_tier": "spot"}
WORKSPACE = {"subscription_id": "1-2-3", "resource_group": "training", "workspace_name": "vision"}
IN_AZURE = Plans(AzureML, WORKSPACE, "abfs://c@account.dfs.core.windows.net/store", {"image": "team/trainer:1"})


# ------------------------------------------------------------------------------------------------------------ on a node


def test_the_sm_variables_name_the_network_the_machine_and_its_devices(tmp_path: Path) -> None:
    config = tmp_path / "input/config/resourceconfig.json"
    config.parent.mkdir(parents=True)
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth7"}
    for machine in ({"current_instance_type": "ml.p4d.24xlarge"}, {}):
        config.write_text(json.dumps({**resources, **machine}))
        site = SageMaker.node_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)}, {})
        words, compat = site.export_env, site.cuda_compat
        assert words["SM_NETWORK_INTERFACE_NAME"] == "eth7"
        assert words["SM_CURRENT_INSTANCE_TYPE"] == machine.get("current_instance_type", "")
        assert int(words["SM_NUM_GPUS"]) >= 0
        assert compat == "/usr/local/cuda/compat"
    config.write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
    assert (
        SageMaker.node_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)}, {}).export_env["SM_NETWORK_INTERFACE_NAME"]
        == ""
    )
    with pytest.raises(FileNotFoundError, match=r"'/opt/ml/input/config/resourceconfig\.json'"):
        SageMaker.node_environment({}, {})


def local_variables(folder: Path, nodes: int) -> dict[str, str]:
    """Return the variables of a node that is a process of this machine. Its secrets can be read once."""
    (folder / "secrets").write_text('{"HF": "hush"}')
    words = {"NODES": nodes, "NODE": 0, "PORT": 5000, "SCRATCH": "/tmp", "SUPERVISOR": 1, "GROUPS": "g"}
    words["SECRETS_FD"] = os.open(folder / "secrets", os.O_RDONLY)
    return {f"{local.ENGINE_PREFIX}{name}": str(value) for name, value in words.items()}


@pytest.mark.parametrize(("cores", "nodes", "each"), [(8, 2, 4), (2, 4, 1)])
def test_nodes_on_one_machine_share_its_cores(
    cores: int, nodes: int, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "cpu_count", lambda: cores)
    found = Local.node_environment(local_variables(tmp_path, nodes), {})
    assert (found.cpus, found.secrets("env:HF")) == (each, "hush")


@pytest.mark.parametrize(("system", "loopback"), [("darwin", "lo0"), ("linux", "lo")])
def test_nodes_on_one_machine_use_its_loopback(
    system: str, loopback: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "cpu_count", lambda: 1)
    monkeypatch.setattr("sys.platform", system)
    for own, expected in (({}, {"GLOO_SOCKET_IFNAME": loopback}), ({"GLOO_SOCKET_IFNAME": "eth0"}, {})):
        given = {**local_variables(tmp_path, 1), **own}
        assert Local.node_environment(given, {}).export_env == expected


def test_a_container_gets_its_node_number_and_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the values come over its standard input, where no other process can read them."""
    monkeypatch.setattr("sys.stdin", io.StringIO('{"HF": "hush"}\nmore'))
    environ = {"NODES": 3, "NODE": 2, "CPUS": 4, "ATTEMPT": "1.0", "SECRETS": 1}
    found = Docker.node_environment(
        {f"{ENGINE_PREFIX}{name}": str(value) for name, value in environ.items()}, {"live": "/live"}
    )
    assert found.topology == Topology(nodes=3, node_rank=2, master_addr="node-0", master_port=PORT)
    assert (found.paths, found.scratch, found.cpus, found.attempt) == ({"live": "/live"}, (), 4, "1.0")
    assert found.exit_code == {"succeeded": 0, "failed": 1, "preempted": PREEMPTED}
    assert (found.stop_grace, found.secrets("env:HF")) == (CLIENT_TIMINGS.stop_grace, "hush")
    bare = {f"{ENGINE_PREFIX}{name}": "1" for name in ("NODES", "CPUS")}
    assert Docker.node_environment({**bare, f"{ENGINE_PREFIX}NODE": "0"}, {}).attempt == ""


def test_a_single_node_of_azureml_needs_no_variables() -> None:
    words = {"AZUREML_NODE_COUNT": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0"}
    assert (
        AzureML.node_environment(words, {}).topology.nodes,
        AzureML.node_environment(words, {}).topology.node_rank,
    ) == (2, 1)
    assert AzureML.node_environment(words, {}).folders == {"outputs": "artifacts"}
    with pytest.raises(SpecError, match=r"does not know its number: MASTER_ADDR or .* is not set"):
        AzureML.node_environment({"CLOUDTRAIN_NODES": "2", "NODE_RANK": "1"}, {})
    with pytest.raises(SpecError, match=r"does not know its number: NODE_RANK or AZUREML_CR_NODE_RANK is not set"):
        AzureML.node_environment({"CLOUDTRAIN_NODES": "2", "MASTER_ADDR": "node-0"}, {})


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Give a server without a route."""
    wire = Wire()
    yield wire
    wire.close()
    assert wire.crashes == []


def test_a_reference_to_a_secret_keeps_all_its_colons(wire: Wire) -> None:
    """Check an ARN, and a project of a domain."""
    name, arn = "projects/example.com:p/secrets/s", "arn:aws:ssm:eu-west-1:123456789012:parameter/x"
    token, value = Answer({"access_token": "t"}), {"payload": {"data": base64.b64encode(b"hush").decode()}}
    wire.route("GET", "/computeMetadata/.*", "GET token", lambda call: token, open=True)
    wire.route("GET", f"/v1/{name}/versions/latest:access", "GET secret", lambda call: Answer(value), open=True)
    wire.route(
        "POST", "/", "POST secret", lambda call: Answer({"Parameter": {"Value": call.json()["Name"]}}), open=True
    )
    url = wire.listen()
    google = {"GCE_METADATA_HOST": url.removeprefix("http://"), "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": url}
    assert Vertex.node_environment(google, {}).secrets(f"gcp:{name}") == "hush"
    assert sagemaker_secrets(url)(f"aws:{arn}") == arn


def sagemaker_secrets(url: str) -> Any:
    """Return the reader of secrets on a SageMaker node, for a service at ``url``."""
    with tempfile.TemporaryDirectory() as base:
        config = Path(base) / "input/config/resourceconfig.json"
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL_SSM": url}
        return SageMaker.node_environment({"SAGEMAKER_BASE_DIR": base, **keys}, {}).secrets


@pytest.mark.parametrize("word", ["replicas", "hosts"])
def test_a_cluster_in_the_other_shape_uses_either_name(word: str) -> None:
    pools = [{word: ["a:3333"]}, {word: ["b:3333", "c:3333"]}]
    spec = {"cluster": {"worker_pools": pools}, "task": {"worker_pool_index": 1, "replica_index": 1}}
    found = Vertex.node_environment({"CLOUDTRAIN_NODES": "3", "CLUSTER_SPEC": json.dumps(spec)}, {}).topology
    assert (found.nodes, found.node_rank, found.master_addr, found.master_port) == (3, 2, "a", 3333)


# ------------------------------------------------------------------------------------------------------------- statuses


def sagemaker_status(**more: Any) -> Any:
    return sagemaker.status_of({"TrainingJobArn": ARN, "TrainingJobStatus": "InProgress", **more})


def test_a_status_of_sagemaker_has_its_start_and_both_native_words() -> None:
    began = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    found = sagemaker_status(SecondaryStatus="Training", TrainingStartTime=began)
    assert (found.native, found.started) == ("InProgress/Training", began.timestamp())
    assert sagemaker_status(TrainingJobStatus="Completed", SecondaryStatus="Completed").native == "Completed"
    assert sagemaker_status(TrainingJobStatus="Stopped", SecondaryStatus="Stopped").reason == "it was stopped"


@for_each(
    ("native", "details", "expected"),
    [
        ("CancelRequested", {}, ("running", "", "stopping")),
        ("Canceled", {}, ("cancelled", "cancelled", "it was cancelled")),
        ("Failed", {"error": {"code": "UserError", "message": "it broke."}}, ("failed", "user_error", "it broke.")),
        ("Failed", {"error": {"error": {"code": "UserError", "message": "bad"}}}, ("failed", "user_error", "bad")),
    ],
)
def test_azureml_has_a_reason_in_either_shape_of_its_errors(
    native: str, details: Any, expected: tuple[str, ...]
) -> None:
    found = azureml.status_of({"properties": {"status": native}}, details)
    assert (found.state, found.category) == expected[:2]
    assert found.reason.startswith(expected[2])


def test_a_cancel_by_azureml_at_the_limit_is_a_timeout() -> None:
    hour = {"startTimeUtc": "2026-01-01T00:00:00Z", "endTimeUtc": "2026-01-01T01:00:00Z"}
    properties = {"status": "Canceled", "limits": {"timeout": "PT1H"}}
    found = azureml.status_of({"properties": properties}, hour)
    assert (found.state, found.category, found.reason) == ("failed", "timeout", "max_runtime is used up")


def test_vertex_without_a_reason() -> None:
    name = "projects/p/locations/europe-west4/customJobs/1"
    found = vertex.status_of({"name": name, "state": "JOB_STATE_FAILED"})
    assert found.reason == "Vertex AI gives no reason; Vertex AI itself failed; submit it again"


def test_vertex_without_machines_gives_a_hint() -> None:
    found = vertex.status_of({"state": "JOB_STATE_EXPIRED"})
    waited = "no machines within max_wait (maxWaitDuration); try another machine, location or time, a reservation"
    assert (found.category, found.reason.partition(", or a max_wait")[0]) == ("capacity", waited)


def test_azureml_names_the_inner_codes_of_an_error_without_a_message() -> None:
    error = {"code": "UserError", "innerError": {"code": "BadArgument", "innerError": {"code": "BadImage"}}}
    found = azureml.status_of({"properties": {"status": "Failed"}}, {"error": error})
    assert found.reason.startswith("UserError/BadArgument/BadImage")


def test_a_hint_follows_the_message_without_its_full_stop() -> None:
    details = {"error": {"code": "ServiceError", "message": "It broke."}}
    found = azureml.status_of({"properties": {"status": "Failed"}}, details)
    assert found.reason == "It broke; Azure ML itself failed; submit it again"
    failed = sagemaker_status(TrainingJobStatus="Failed", FailureReason="InternalServerError: ...it broke.")
    assert failed.reason == "InternalServerError: ...it broke; SageMaker itself failed; submit it again"


@pytest.mark.parametrize(
    ("reason", "category"),
    [("CapacityError: Unable to provision.", "capacity"), ("ResourceLimitExceeded: too many.", "quota")],
)
def test_a_stop_by_sagemaker_itself_has_a_category(reason: str, category: str) -> None:
    found = sagemaker_status(TrainingJobStatus="Stopped", SecondaryStatus="Stopped", FailureReason=reason)
    assert (found.state, found.category) == ("failed", category)
    assert found.reason.startswith(reason.rstrip(".") + "; ")


# ------------------------------------------------------------------------------------------------------- answers of AWS


def test_an_empty_answer_of_aws_shows_its_status() -> None:
    from botocore.exceptions import ClientError

    found = aws.error_of(ClientError({"ResponseMetadata": {"HTTPStatusCode": 418}}, "DescribeIt"))
    assert (type(found), str(found)) == (PlatformError, "DescribeIt: status 418")


@pytest.mark.parametrize("missing", ["boto3", "botocore.exceptions"])
def test_a_missing_library_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SpecError, match=r"^provider sagemaker needs boto3, which is not installed \("):
        SageMaker(**OF_SAGEMAKER).account.bucket_region("b")
    for api, needs in ((azure, "azureml needs azure-ai-ml"), (google, "vertex needs google-cloud-aiplatform")):
        why = rf"^provider {needs}, which is not installed \(why\)\n"
        with pytest.raises(SpecError, match=why), api.translated("look"):
            raise ImportError("why")


@pytest.fixture
def account(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> aws.Account:
    """Return an account whose SageMaker calls go to the server."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in {**keys, "AWS_ENDPOINT_URL_SAGEMAKER": wire.listen()}.items():
        monkeypatch.setenv(name, value)
    return SageMaker(**OF_SAGEMAKER).account


def test_a_refusal_that_new_keys_cannot_help_is_not_tried_again(wire: Wire, account: aws.Account) -> None:
    refused = Answer({"__type": "AccessDeniedException", "message": "you may not"}, 400)
    wire.route("POST", "/", "POST", lambda call: refused, open=True)
    with pytest.raises(AuthError, match="you may not"):
        account.describe("a-job")
    assert wire.count("POST") == 1


def test_a_job_in_deletion_is_not_found(wire: Wire, account: aws.Account) -> None:
    job = {"TrainingJobArn": ARN, "TrainingJobName": "run-a0", "TrainingJobStatus": "Deleting"}
    wire.route("POST", "/", "POST", lambda call: Answer(job), open=True)
    with pytest.raises(SpecError) as caught:
        account.describe(ARN)
    assert (caught.value.field, str(caught.value)) == ("run", "run: SageMaker is deleting the training job run-a0")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("status", "header", "region"),
    [(200, "eu-west-1", "eu-west-1"), (301, "us-west-2", "us-west-2"), (403, "eu-west-3", "eu-west-3"), (403, "", "")],
)
def test_a_refusal_names_the_region_of_a_bucket(
    wire: Wire, account: aws.Account, monkeypatch: pytest.MonkeyPatch, status: int, header: str, region: str
) -> None:
    headers = {"x-amz-bucket-region": header} if header else {}
    wire.route("HEAD", "/bucket", "HEAD bucket", lambda call: Answer(None, status, headers), open=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", wire.listen())
    assert account.bucket_region("bucket") == region
    with pytest.raises(NotFoundError) as caught:
        account.bucket_region("none")
    assert str(caught.value) == "store: there is no bucket none"
    assert {call.headers["host"] for call in wire.calls} == {wire.listen().removeprefix("http://")}


def test_a_store_of_sagemaker_is_used_in_its_region(account: aws.Account) -> None:
    found = SageMaker(**OF_SAGEMAKER)
    assert found.storage("s3://bucket/x") == {"client_kwargs": {"region_name": "eu-west-1"}}
    assert found.storage("/a/folder") == {}
    other = SageMaker(**OF_SAGEMAKER, role_to_assume="arn:aws:iam::123456789012:role/other").storage("s3://bucket/x")
    assert other["session"].get_config_variable("region") == "eu-west-1"
    assert other["session"].get_credentials().method == "sts-assume-role"


def test_a_call_of_aws_waits_for_half_a_minute_and_is_made_once(account: aws.Account) -> None:
    config = account._client("sagemaker", "eu-west-1").meta.config
    assert (config.connect_timeout, config.read_timeout) == (30, 30)
    assert config.retries["total_max_attempts"] == 1


# ---------------------------------------------------------------------------------------------------------------- plans


def test_a_too_small_machine_is_named_with_its_size() -> None:
    for plans, machine, has in (
        (IN_AZURE, "Standard_DS3_v2", "4 cores and 14 GiB"),
        (IN_SAGEMAKER, "ml.m5.xlarge", "4 cores and 16 GiB"),
    ):
        found = plans.refused(instance_type=machine, memory_gb=999)
        assert str(found).endswith(f"{machine} has {has}")
        assert found.hint == "leave out memory_gb or instance_type"


def test_a_vault_is_named_with_its_port() -> None:
    secret = "azure:vault.example.net:8443/name"
    assert IN_AZURE.planned(secrets={"T": secret}).context["secrets"] == {"T": secret}


def test_spot_machines_are_requested_by_either_setting_or_both() -> None:
    wanted = [IN_AZURE.planned(given, spot=spot) for given, spot in (({}, True), (TIER, False), (TIER, True))]
    assert [request.body["queue_settings"] for request in wanted] == [TIER] * 3
    assert IN_AZURE.refused({"job_tier": "premium"}, spot=True).field == "azureml.job_tier"


def test_a_machine_with_neuron_needs_an_image() -> None:
    fields = {"instance_type": "ml.trn9.48xlarge", "nproc_per_node": 4}
    found = IN_SAGEMAKER.refused(**fields)
    assert str(found) == "image: ml.trn9.48xlarge needs an image with AWS Neuron"
    assert IN_SAGEMAKER.planned(**fields, image=f"{ECR}/neuron:1").instance_types == ("ml.trn9.48xlarge",)


def test_a_local_request_has_the_name_of_its_job() -> None:
    assert Plans(Local, {}, "/tmp/store", {"name": "mine"}).planned().body["name"] == "mine"


def test_a_missing_python_is_named_with_its_setting() -> None:
    with pytest.raises(SpecError) as caught:
        Local().check(Plans(Local, {"python": "/no/python"}, "/tmp/store").planned())
    how = "set local.python to the path of a Python, or leave it out"
    assert caught.value.with_hint() == f"local.python: there is no program /no/python; {how}"


def test_a_container_that_could_not_write_is_refused_and_its_image_is_checked(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check with a fake container engine; a user may be named with a group."""
    image = {"Os": "linux", "Architecture": "amd64"}
    wire.route("GET", "/version", "GET version", lambda call: Answer({"ApiVersion": "1.44", **image}), open=True)
    wire.route("GET", r"/v1\.44/version", "GET version", lambda call: Answer({"Arch": "amd64"}), open=True)
    wire.route("GET", r"/v1\.44/images/(.+)/json", "GET image", lambda call: Answer(image), open=True)
    monkeypatch.setenv("DOCKER_HOST", wire.listen().replace("http://", "tcp://"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for user, refused in (("4321:100", True), ("4321", True), ("1000:100", False), ("1000", False)):
        made, request = Docker(user=user), Plans(Docker, {"user": user}, "/tmp/store", {"image": "a/b:1"}).planned()
        if not refused:
            made.check(request)
            continue
        with pytest.raises(SpecError, match=r"^docker.user: uid 4321 could not write the run's folder") as caught:
            made.check(request)
        assert caught.value.hint == "leave docker.user unset"
    assert [call.words for call in wire.calls if call.operation == "GET image"] == [("a/b:1",)] * 2


def test_as_many_labels_as_vertex_takes() -> None:
    tags = {f"t{i}": "x" for i in range(TAG_COUNT)}
    request = IN_VERTEX.planned(tags=tags)
    assert tags.items() <= request.body["labels"].items()
    assert (request.provider, request.attempt) == ("vertex", 0)
    assert IN_VERTEX.refused(tags={**tags, "more": "x"}).field == "tags"


def test_the_origin_of_a_run_in_either_alphabet() -> None:
    assert _origin({"ci": "GitHub", "ci_run": "12"}) == {TAG_CI: "github-12"}
    assert _origin({"revision": "c" * 70 + "-dirty"}) == {TAG_REVISION: "c" * 57 + "-dirty"}
    assert _page({"ci_url": "https://ci/" + "x" * TAG_VALUE, "ci_run": "12"}) == "12"
    assert _page({"ci_run": "12"}) == "12"
    assert _page({"ci_url": "https://ci/1", "ci_run": "12"}) == "https://ci/1"


def test_options_that_sagemaker_cannot_take_are_refused_by_their_field() -> None:
    ours = {"sagemaker": {"Environment": {"CLOUDTRAIN_RUN_ID": "x"}}}
    found = IN_SAGEMAKER.refused(options=ours)
    assert str(found) == "options.sagemaker.Environment.CLOUDTRAIN_RUN_ID: is set by cloudtrain itself"
    shared = IN_SAGEMAKER.refused(shm_gb=8)
    assert isinstance(shared, UnsupportedError)
    assert (shared.field, "use fewer DataLoader workers" in shared.hint) == ("resources.shm_gb", True)
