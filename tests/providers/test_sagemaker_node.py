"""Provider ``sagemaker`` on the node: its reading of the container's configuration, and secrets through the
job's role."""

from __future__ import annotations

import datetime
import hashlib
import http.server
import json
import os
import random
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as Botocores
from botocore.session import get_session

from cloudtrain.errors import DigestError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.node import NodeEnvironment
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.providers.sagemaker import SAMPLE, Provider
from cloudtrain.providers.sagemaker.node import _has_efa, secret
from cloudtrain.providers.sagemaker.s3 import DNS, Credentials, Objects, credentials, signed_headers
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.storage.files import files
from cloudtrain.store import runtime_zip

ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:token-AbCdEf"
PARAMETER = "arn:aws:ssm:eu-west-1:123456789012:parameter/team/token"


def site(
    base: Path,
    *,
    host: str = "algo-1",
    hosts: tuple[str, ...] = ("algo-1",),
    interface: str = "eth0",
    channels: tuple[str, ...] = ("cloudtrain-code", "cloudtrain-runtime", "cloudtrain-container"),
    context: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> NodeEnvironment:
    """Return the NodeEnvironment of a container with this configuration."""
    config = base / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    resources = {"current_host": host, "hosts": list(hosts), "network_interface_name": interface}
    (config / "resourceconfig.json").write_text(json.dumps({**resources, "current_instance_type": "ml.m5.xlarge"}))
    (config / "inputdataconfig.json").write_text(json.dumps({name: {"TrainingInputMode": "File"} for name in channels}))
    if context is not None:
        folder = base / "input" / "data" / "cloudtrain-container"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "context.json").write_text(json.dumps(context))
    return Provider.node_environment({"SAGEMAKER_BASE_DIR": str(base), **(environ or {})}, {})


# ------------------------------------------------------------------------------------------------------------- topology


@pytest.mark.parametrize(
    "hosts",
    [
        tuple(sorted(f"algo-{i}" for i in range(1, 13))),
        tuple(sorted(f"algo-{i}-x7k2q" for i in range(1, 13))),
    ],
    ids=["aws", "local-mode"],
)
def test_nodes_have_the_platform_s_numbers(hosts: tuple[str, ...], tmp_path: Path) -> None:
    """Check this because its list is sorted as text: algo-1, algo-10, …"""
    found = {host: site(tmp_path, host=host, hosts=hosts).topology for host in hosts}
    assert {host: t.node_rank + 1 for host, t in found.items()} == {host: int(host.split("-")[1]) for host in hosts}
    assert {t.master_addr for t in found.values()} == {next(h for h in hosts if h.split("-")[1] == "1")}
    assert {t.nodes for t in found.values()} == {12}


def test_the_platform_s_configuration(tmp_path: Path) -> None:
    given = site(tmp_path, channels=("cloudtrain-code", "cloudtrain-resume", "train", "val-2"))
    assert given.paths == {
        "live": f"{tmp_path}/cloudtrain/live",
        "code": f"{tmp_path}/input/data/cloudtrain-code/code.tar.gz",
        "resume": f"{tmp_path}/input/data/cloudtrain-resume",
        "input.train": f"{tmp_path}/input/data/train",
        "input.val-2": f"{tmp_path}/input/data/val-2",
    }
    assert given.stop_grace == 120
    assert given.exit_code == {"succeeded": 0, "failed": 1, "preempted": 0}
    assert given.failure_file == f"{tmp_path}/output/failure"
    assert given.folders == {f"{tmp_path}/checkpoints": "checkpoints"}
    assert given.export_env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "110"


def test_existing_scripts_find_their_variables(tmp_path: Path) -> None:
    context = {"hyperparameters": {"lr": 0.1, "data": "{inputs.train}", "it's": 'a "b"', "from": "{resume_from?}"}}
    context["hyperparameters"]["epochs"] = "3"  # as the command line gives it
    words = site(
        tmp_path, host="algo-2", hosts=("algo-1", "algo-2"), channels=("cloudtrain-code", "train"), context=context
    ).export_env
    assert words["SM_MODEL_DIR"] == f"{tmp_path}/model"
    assert words["SM_OUTPUT_DATA_DIR"] == f"{tmp_path}/output/data"
    assert words["SM_CHANNEL_TRAIN"] == f"{tmp_path}/input/data/train"
    assert json.loads(words["SM_CHANNELS"]) == ["train"]
    assert json.loads(words["SM_HOSTS"]) == ["algo-1", "algo-2"]
    assert (words["SM_CURRENT_HOST"], words["SM_CURRENT_HOST_RANK"], words["SM_HOST_COUNT"]) == ("algo-2", "1", "2")
    assert (words["SM_HP_LR"], words["SM_HP_DATA"], words["SM_HP_IT_S"]) == ("0.1", "{inputs.train}", 'a "b"')
    assert "SM_HP_FROM" not in words
    hps = json.loads(words["SM_HPS"])
    assert hps["it's"] == 'a "b"'
    assert (hps["lr"], hps["epochs"], words["SM_HP_EPOCHS"]) == (0.1, 3, "3")
    training_env = json.loads(words["SM_TRAINING_ENV"])
    assert (training_env["hyperparameters"], training_env["hosts"]) == (hps, json.loads(words["SM_HOSTS"]))
    assert training_env["channel_input_dirs"] == {
        name: words[f"SM_CHANNEL_{name.upper()}"] for name in json.loads(words["SM_CHANNELS"])
    }
    assert (training_env["master_hostname"], training_env["is_master"]) == ("algo-1", False)
    assert "SM_CHANNEL_CLOUDTRAIN_CODE" not in words


@pytest.mark.skipif(not os.path.exists("/sys/class/net/lo"), reason="needs Linux")
def test_the_network_interface_is_set_only_if_it_exists_and_is_unset(tmp_path: Path) -> None:
    names = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert {k: v for k, v in site(tmp_path, interface="lo").export_env.items() if k in names} == dict.fromkeys(
        names, "lo"
    )
    assert not names & set(site(tmp_path, interface="ethwe").export_env)
    chosen = site(tmp_path, interface="lo", environ={"NCCL_SOCKET_IFNAME": "eth9"}).export_env
    assert names & set(chosen) == {"GLOO_SOCKET_IFNAME"}


def test_efa_by_its_device(tmp_path: Path) -> None:
    assert not _has_efa(str(tmp_path / "none"))
    for name, driver in (("mlx5_0", "mlx5_core"), ("rdmap0s6", "efa")):
        (tmp_path / driver).mkdir()
        (tmp_path / "devices" / name / "device").mkdir(parents=True)
        (tmp_path / "devices" / name / "device" / "driver").symlink_to(tmp_path / driver)
        assert _has_efa(str(tmp_path / "devices")) == (driver == "efa")


# -------------------------------------------------------------------------------------------------------------- secrets


class Service(http.server.BaseHTTPRequestHandler):
    """Servers of credentials at /keys and of secrets at /, which check signatures with botocore's own signer."""

    answers: list[tuple[int, dict[str, Any]]]
    requests: list[dict[str, Any]]

    def do_GET(self) -> None:
        wanted = self.headers.get("Authorization") == "let me"
        self._send(200 if wanted else 403, {"AccessKeyId": "AK", "SecretAccessKey": "SK", "Token": "TK"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        service = self.headers["Authorization"].split("/")[3]
        self.requests.append({"target": self.headers["X-Amz-Target"], "service": service, "body": json.loads(body)})
        if not self._signed(body, service):
            self._send(400, {"__type": "InvalidSignatureException", "message": "signature"})
            return
        self._send(*(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]))

    def _signed(self, body: bytes, service: str) -> bool:
        names = ("Content-Type", "X-Amz-Target", "X-Amz-Date", "X-Amz-Security-Token", "Host")
        request = AWSRequest("POST", f"http://{self.headers['Host']}/", data=body)
        for name in names:
            request.headers[name] = self.headers[name]
        request.context["timestamp"] = self.headers["X-Amz-Date"]
        signer = SigV4Auth(Botocores("AK", "SK", "TK"), service, "eu-west-1")
        canonical = signer.canonical_request(request)
        signature = signer.signature(signer.string_to_sign(request, canonical), request)
        return self.headers["Authorization"].endswith(f"Signature={signature}")

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Service]]:
    monkeypatch.setattr(TIMINGS, "http_pauses", (0.0, 0.0))
    handler = type("Handler", (Service,), {"answers": [(200, {})], "requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    handler.environ = {  # type: ignore[attr-defined]
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{server.server_port}/keys",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "let me",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
    }
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def read(service: Any, arn: str = ARN) -> str:
    return secret(arn, service.environ, region="us-east-1")


def test_a_secret_is_read_with_the_role_of_the_job(service: Any) -> None:
    service.answers = [(200, {"SecretString": "s3cret ü"})]
    assert read(service) == "s3cret ü"
    assert service.requests == [
        {"target": "secretsmanager.GetSecretValue", "service": "secretsmanager", "body": {"SecretId": ARN}}
    ]
    service.answers = [(200, {"SecretBinary": "w7w="})]
    assert read(service) == "ü"


def test_a_parameter_is_read_decrypted(service: Any) -> None:
    service.answers = [(200, {"Parameter": {"Value": "v"}})]
    assert read(service, PARAMETER) == "v"
    assert service.requests[0]["body"] == {"Name": PARAMETER, "WithDecryption": True}


def test_each_partition_has_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the partitions that botocore knows; cloudtrain calls no other host."""
    data = get_session().get_component("data_loader").load_data("endpoints")
    assert {item["partition"]: item["dnsSuffix"] for item in data["partitions"]} == DNS
    urls: list[str] = []

    def ask(request: Any, **_: Any) -> Any:
        urls.append(request().full_url)
        return {"SecretString": "x"}

    monkeypatch.setattr("cloudtrain.providers.sagemaker.node.ask", ask)
    environ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for partition, region in (("aws-cn", "cn-north-1"), ("aws-us-gov", "us-gov-west-1"), ("aws-iso", "us-iso-east-1")):
        secret(f"arn:{partition}:secretsmanager:{region}:123456789012:secret:t-AbCdEf", environ, region=region)
    assert urls == [
        "https://secretsmanager.cn-north-1.amazonaws.com.cn/",
        "https://secretsmanager.us-gov-west-1.amazonaws.com/",
        "https://secretsmanager.us-iso-east-1.c2s.ic.gov/",
    ]


def test_passing_faults_are_retried(service: Any) -> None:
    throttled = (400, {"__type": "ThrottlingException", "message": "slow"})
    service.answers = [throttled, (500, {}), (200, {"SecretString": "v"})]
    assert read(service) == "v"
    service.answers, service.requests = [throttled], []
    with pytest.raises(StorageError, match="ThrottlingException"):
        read(service)
    assert len(service.requests) == 3


def test_a_refusal_is_raised_at_once(service: Any) -> None:
    service.answers = [(400, {"__type": "com.amazonaws#AccessDeniedException", "message": "not you"})]
    with pytest.raises(StorageError, match=r"GetSecretValue was refused \(AccessDeniedException\): not you; allow"):
        read(service)
    assert len(service.requests) == 1
    service.environ = {**service.environ, "AWS_CONTAINER_AUTHORIZATION_TOKEN": "no"}
    with pytest.raises(StorageError, match="reading the credentials of the job's role was refused"):
        read(service)


def test_a_service_that_does_not_answer_may_lack_an_endpoint_of_the_vpc(service: Any) -> None:
    service.environ = {**service.environ, "AWS_ENDPOINT_URL_SECRETS_MANAGER": "http://127.0.0.1:1"}
    with pytest.raises(StorageError, match=r"; a container in a VPC needs an endpoint of secretsmanager$"):
        read(service)


def test_sources_of_credentials(service: Any, tmp_path: Path) -> None:
    assert credentials({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}) == Credentials(
        access_key="a", secret_key="b"
    )
    (tmp_path / "token").write_text("let me\n")
    environ = {**service.environ, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")}
    environ.pop("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    assert credentials(environ) == Credentials(access_key="AK", secret_key="SK", token="TK")
    with pytest.raises(StorageError, match="no credentials"):
        credentials({})


def test_signatures_are_botocores() -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    keys = Credentials(access_key="AK", secret_key="SK/+", token="TK")
    url, body = "https://secretsmanager.eu-west-1.amazonaws.com/", b'{"a": "\xc3\xbc"}'
    ours = signed_headers(
        url, {"Content-Type": "x", "X-Amz-Target": "a  b"}, body, keys, region="eu-west-1", service="ssm", now=now
    )
    request = AWSRequest("POST", url, data=body, headers={k: v for k, v in ours.items() if k != "Authorization"})
    request.context["timestamp"] = ours["X-Amz-Date"]
    signer = SigV4Auth(Botocores("AK", "SK/+", "TK"), "ssm", "eu-west-1")
    theirs = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    assert ours["Authorization"].endswith(f"Signature={theirs}")


def test_signatures_of_s3_are_botocores() -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    keys, body = Credentials(access_key="AK", secret_key="SK/+", token="TK"), b"part"
    url = "https://s3.eu-west-1.amazonaws.com/bucket/run/live/a%20b/%C3%A9?partNumber=2&uploadId=x%2Fy"
    headers = {"x-amz-content-sha256": hashlib.sha256(body).hexdigest()}
    ours = signed_headers(url, headers, body, keys, region="eu-west-1", service="s3", method="PUT", now=now)
    request = AWSRequest("PUT", url, data=body, headers={k: v for k, v in ours.items() if k != "Authorization"})
    request.context["timestamp"] = ours["X-Amz-Date"]
    signer = S3SigV4Auth(Botocores("AK", "SK/+", "TK"), "s3", "eu-west-1")
    theirs = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    assert ours["Authorization"].endswith(f"Signature={theirs}")


# -------------------------------------------------------------------------------------------------- after the sync died


@pytest.mark.parametrize("size", [0, 1000, 11 << 20])
def test_a_node_writes_files_to_s3_by_itself(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("cloudtrain.providers.sagemaker.s3.PART_BYTES", 5 << 20)
    data = random.Random(1).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    live = f"{s3_url}/runs/r1/live"
    Objects(live, os.environ, region="us-east-1").put("checkpoints/step 1+é/model.pt", tmp_path / "file")
    assert files(live).read("checkpoints/step 1+é/model.pt") == data


@pytest.mark.parametrize("size", [0, 1000, 11 << 20])
def test_a_node_copies_reads_and_removes_objects(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for name in ("PART_BYTES", "COPY_BYTES"):
        monkeypatch.setattr(f"cloudtrain.providers.sagemaker.s3.{name}", 5 << 20)
    data, run = random.Random(2).randbytes(size), Objects(f"{s3_url}/runs/r1", os.environ, region="us-east-1")
    run.write("live/step 1+é/model.pt", data)
    run.copy("live/step 1+é/model.pt", "archive/step 1+é/model.pt", size)
    run.remove("live/step 1+é/model.pt")
    run.remove("live/step 1+é/model.pt")
    assert list(files(f"{s3_url}/runs/r1").list("")) == ["archive/step 1+é/model.pt"]
    run.read("archive/step 1+é/model.pt", tmp_path / "came")
    assert (tmp_path / "came").read_bytes() == data
    with pytest.raises(DigestError, match=r"there is no live/step 1\+é/model.pt in S3"):
        run.read("live/step 1+é/model.pt", tmp_path / "came")
    with pytest.raises(StorageError, match="NoSuchKey"):
        run.copy("live/step 1+é/model.pt", "archive/again", 1000)


def test_a_refusal_of_s3_is_named(s3_environment: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"S3 refused PUT of /no-such-bucket/live/file \(NoSuchBucket\)"):
        Objects("s3://no-such-bucket/live", os.environ, region="us-east-1").put("file", tmp_path / "file")


def test_a_failing_s3_is_tried_again(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.providers.sagemaker.s3.PAUSES", (0.0, 0.0, 0.0))
    tries, urlopen = [0], urllib.request.urlopen

    def sometimes(*args: Any, **more: Any) -> Any:
        tries[0] += 1
        if tries[0] < 3:
            raise urllib.error.URLError("reset")
        return urlopen(*args, **more)

    monkeypatch.setattr("cloudtrain.providers.sagemaker.s3.urllib.request.urlopen", sometimes)
    (tmp_path / "file").write_bytes(b"x")
    Objects(s3_url, os.environ, region="us-east-1").put("file", tmp_path / "file")
    assert tries == [3]


def test_another_thread_may_drop_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because four threads upload with one `Objects`, and each drops the keys when S3 refuses it."""

    class Forgetful(Objects):
        _keys = property(lambda self: None, lambda self, keys: None)  # type: ignore[assignment]

    monkeypatch.setattr("cloudtrain.providers.sagemaker.s3.credentials", lambda environ: "keys")
    assert Forgetful("s3://bucket/live", {}, region="us-east-1")._credentials() == "keys"  # type: ignore[comparison-overlap]


def test_the_environment_has_the_agents_marks_and_the_way_around_it(tmp_path: Path) -> None:
    keys = {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/role"}
    agent = site(tmp_path, context={"run": "s3://bucket/runs/r1"}, environ=keys).agent
    assert agent is not None
    assert agent.put is not None
    assert agent.objects is not None
    isolated = site(tmp_path / "isolated", context={"run": "s3://bucket/runs/r1"}).agent
    assert isolated is not None
    assert isolated.objects is None
    marks = (agent.uploading, agent.uploaded, agent.ignored)
    assert marks == (".sagemaker-uploading", ".sagemaker-uploaded", ".sagemaker-ignore")
    rehearsed = site(tmp_path / "here", context={"run": "file:///store/runs/r1"}).agent
    assert rehearsed is not None
    assert rehearsed.put is None


# ------------------------------------------------------------------------------------------------- before Python starts


def run_command(tmp_path: Path, *, lacks: str = "", **python: str) -> tuple[int, str | None, str]:
    """Run the planned command by /bin/sh with a folder as /opt/ml. Return exit code, failure file and stderr.

    ``python`` are the programs on PATH, ``lacks`` is a missing file below ``input``.
    """
    programs, ml = tmp_path / "bin", tmp_path / "ml"
    for folder in (
        programs,
        ml / "output",
        ml / "input/data/cloudtrain-runtime",
        ml / "input/data/cloudtrain-container",
    ):
        folder.mkdir(parents=True)
    for name, text in python.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (ml / "input/data/cloudtrain-runtime/cloudtrain.pyz").write_bytes(runtime_zip.build())
    (ml / "input/data/cloudtrain-container/context.json").write_text('{"protocol": 1, "provider": "sagemaker"}')
    (ml / "input/config").mkdir()
    (ml / "input/config/resourceconfig.json").write_text(json.dumps({"hosts": ["algo-1"], "current_host": "algo-1"}))
    if lacks:
        (ml / "input" / lacks).unlink()
    layout = Layout(store="s3://b/s", run_id="r", code_digest="c" * 64, runtime_digest="d" * 64)
    body = Provider(**SAMPLE["settings"]).plan(Job.make(entry_point="train.py"), layout).body  # type: ignore[arg-type]
    (line,) = body["AlgorithmSpecification"]["ContainerArguments"]
    environment = {name: value.replace("/opt/ml", str(ml)) for name, value in body["Environment"].items()}
    done = subprocess.run(
        ["/bin/sh", "-c", line.replace("/opt/ml", str(ml))],
        env={"PATH": str(programs), "SAGEMAKER_BASE_DIR": str(ml), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    failure = ml / "output/failure"
    return done.returncode, failure.read_text().strip() if failure.exists() else None, done.stderr


def test_an_image_without_python_leaves_its_cause(tmp_path: Path) -> None:
    code, failure, stderr = run_command(tmp_path)
    assert (code, failure) == (127, "never started: no python 3.10")
    assert "no-python3" in stderr


def test_an_image_whose_python_is_too_old_leaves_its_cause(tmp_path: Path) -> None:
    code, failure, _ = run_command(tmp_path, python="exit 127")
    assert (code, failure) == (127, "never started: no python 3.10")


def test_a_node_that_cannot_start_leaves_its_own_cause(tmp_path: Path) -> None:
    """Check that it is not the cause for a lack of Python."""
    code, failure, stderr = run_command(tmp_path, python3=f'exec {sys.executable} "$@"')
    assert code == 1
    assert failure is not None
    assert failure.startswith("this node cannot start: ")
    assert "container/key" in failure
    assert failure in stderr


@pytest.mark.parametrize("lacks", ["data/cloudtrain-container/context.json", "config/resourceconfig.json"])
def test_a_node_without_its_files_leaves_its_own_cause(tmp_path: Path, lacks: str) -> None:
    """Check this before the node knows its provider or its configuration."""
    code, failure, stderr = run_command(tmp_path, lacks=lacks, python3=f'exec {sys.executable} "$@"')
    assert code == 1
    assert failure is not None
    assert failure.startswith("this node cannot start: ")
    assert lacks in failure
    assert failure in stderr
