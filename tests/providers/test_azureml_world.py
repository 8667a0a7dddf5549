"""The loopback Azure ML itself, with the real MLClient and requests by hand, independent of cloudtrain's provider."""

from __future__ import annotations

import copy
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from azure.ai.ml import Input, MLClient, Output, command
from azure.ai.ml.entities import Environment
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.identity import ManagedIdentityCredential
from containers import left
from jobs import Jobs
from worlds.azureml.blobs import AppendLog, place
from worlds.azureml.hosts import differences, reading
from worlds.azureml.life import CommandJob
from worlds.azureml.plane import SUBSCRIPTION, Plane
from worlds.azureml.strict import broken_rules, model_errors, seconds_of
from worlds.azureml.wire import Fault, Refusal

IMAGE = "cloudtrain-test:py313"
ENVIRONMENT = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/versions/1"
STORE = "azureml://datastores/workspaceblobstore/paths"
SEE = """
import json, os, signal, sys, time
me, live = os.environ["NODE_RANK"], sys.argv[1]
def sigterm(*_):
    open(live + "/sigterm-" + me, "w").write("sigterm")
    print("sigterm", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, sigterm)
print(json.dumps({"me": me, "word": open(os.path.dirname(__file__) + "/word.txt").read(), "env": os.environ["WORD"],
                  "engine": [k for k in os.environ if k.startswith("CLOUDTRAIN_")],
                  "run": os.environ["AZUREML_RUN_ID"], "world": os.environ["WORLD_SIZE"],
                  "live": sorted(os.listdir(live))}), flush=True)
"""
SCRIPTS = {
    "see": SEE,
    "hold": SEE + "time.sleep(100)\n",
    "deaf": "import time\nprint(1, flush=True)\ntime.sleep(100)\n",
    "done": SEE + "open(live + '/checkpoint-' + me, 'w').write(me)\n",
    "fail": SEE + "if me == '1':\n    sys.exit(3)\n",
    "once": SEE + "if not os.path.exists(live + '/seen-' + me):\n    open(live + '/seen-' + me, 'w').write('x')\n"
    "    time.sleep(100)\n",
    "peers": SEE + "open(live + '/mine-' + me, 'w').write('x')\n"
    "while not os.path.exists(live + '/mine-' + str(1 - int(me))):\n    time.sleep(0.1)\nprint('met', flush=True)\n",
}  # fmt: skip
"""Scripts by name. Each prints its view of the node, then waits, ends or fails."""


def body(**more: Any) -> dict[str, Any]:
    """Return a job that the service accepts. ``more`` replaces members of its properties; None removes one."""
    folder = {"jobInputType": "uri_folder"}
    properties: dict[str, Any] = {
        "jobType": "Command",
        "command": "python3 ${{inputs.code}}/see.py ${{outputs.live}}",
        "environmentId": ENVIRONMENT,
        "environmentVariables": {"WORD": "of the environment"},
        "inputs": {
            "code": {**folder, "mode": "Download", "uri": f"{STORE}/code/"},
            "lr": {"jobInputType": "literal", "value": "0.1"},
        },
        "outputs": {"live": {"jobOutputType": "uri_folder", "mode": "ReadWriteMount", "uri": f"{STORE}/live/"}},
        "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 1},
        "resources": {"instanceCount": 2, "instanceType": "Standard_DS3_v2", "shmSize": "4g"},
        "limits": {"jobLimitsType": "Command", "timeout": "PT1H"},
        **more,
    }
    return {"properties": {key: value for key, value in properties.items() if value is not None}}


def changed(path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body())
    at: Any = made["properties"]
    *before, last = path.split(".")
    for key in before:
        at = at.setdefault(key, {})
    at[last] = value
    return made


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("noSuchMember", 1, "Could not find member 'noSuchMember'"),
        ("resources.noSuchMember", 1, "Could not find member 'noSuchMember' on object of type 'JobResource"),
        ("jobType", "Sweep", "not 'Command'"),
        ("command", None, "'properties.command'"),
        ("command", "  ", "The command is empty"),
        ("command", "python ${{inputs.nothing}}", "inputs.nothing, which the job does not have"),
        ("command", "python $${{inputs.code}}", "which nothing replaces"),
        ("environmentId", "azureml:mine:1", "no id of an environment"),
        ("environmentVariables", {"A": 1}, "'properties.environmentVariables.A' must be a string"),
        ("environmentVariables", {"A B": "x"}, "Invalid environment variable name"),
        ("tags", {"a": 1}, "must be a string"),
        ("tags", {str(n): "x" for n in range(51)}, "at most 50 tags"),
        ("inputs.code.mode", "ro_mount", "not one of ReadOnlyMount"),
        ("inputs.code.mode", "ReadWriteMount", "none of an input"),
        ("inputs.code.uri", "abfs://c/code", "no URI that Azure Machine Learning reads"),
        ("inputs.lr.value", 0.1, "must be a string"),
        ("inputs.two-words", {"jobInputType": "literal", "value": "x"}, "Invalid input name"),
        ("outputs.live.mode", "Download", "not one of ReadWriteMount"),
        ("outputs.live.uri", "wasbs://c@a.blob.core.windows.net/x", "on no datastore"),
        ("resources.instanceCount", 0, "at least 1"),
        ("resources.instanceCount", "2", "must be int"),
        ("resources.shmSize", "4gb", "a number above 0 and one of"),
        ("limits.timeout", "1h", "no ISO 8601 duration"),
        ("limits.timeout", 3600, "must be a string"),
        ("queueSettings", {"jobTier": "spot"}, "not one of"),
        ("queueSettings", {"jobTier": "Spot", "cheap": True}, "Could not find member 'cheap'"),
        ("distribution", {"distributionType": "NCCL"}, "'properties.distribution"),
        ("identity", {"identityType": "Mine"}, "'properties.identity"),
        ("computeId", "cluster", "no resource id"),
    ],
)  # fmt: skip
def test_the_service_refuses(path: str, value: Any, words: str) -> None:
    request = changed(path, value)
    problems = model_errors(request) or broken_rules("job", request)
    assert words in "; ".join(problems)


@pytest.mark.parametrize("name", ["", "-a", "two words", "a" * 256, "a.b"])
def test_the_service_refuses_names(name: str) -> None:
    assert "Job name" in "; ".join(broken_rules(name, body()))


def test_a_cluster_takes_no_spot() -> None:
    request = body(computeId="/subscriptions/s/computes/c", queueSettings={"jobTier": "Spot"})
    assert "a cluster has a tier of its own" in "; ".join(broken_rules("job", request))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("queueSettings", {"jobTier": "Spot", "priority": 3}),
        ("identity", {"identityType": "Managed", "clientId": "00000000-0000-4000-8000-000000000000"}),
        ("distribution", None),
        ("inputs.file", {"jobInputType": "uri_file", "mode": "Download", "uri": "https://h/x.csv"}),
        ("outputs.live.uri", None),
        ("limits.timeout", "P1DT2H3.5S"),
        ("tags", {"ключ": "two words"}),
    ],
)
def test_the_service_accepts(path: str, value: Any) -> None:
    request = changed(path, value)
    assert model_errors(request) + broken_rules("job", request) == []


def test_durations() -> None:
    assert [seconds_of(text) for text in ("PT60S", "PT1H", "P1DT1M", "PT0.5S")] == [60, 3600, 86460, 0.5]
    for wrong in ("", "P", "PT", "P1DT", "60", "PT1H ", "P1M"):
        with pytest.raises(ValueError, match=f"^{wrong}$"):
            seconds_of(wrong)


# ------------------------------------------------------------------------------------------------------------- readings


def test_a_reading_follows_the_pages() -> None:
    nodes = reading("job", body(), IMAGE).nodes
    first, second = (node.env for node in nodes)
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == nodes[0].hostname
    assert [env["NODE_RANK"] for env in (first, second)] == ["0", "1"]
    assert (second["RANK"], second["WORLD_SIZE"], second["MASTER_PORT"]) == ("1", "2", "6105")
    assert "${{" not in nodes[0].command[0]
    alone = body(distribution=None, resources={"instanceCount": 1})
    (node,) = reading("job", alone, IMAGE).nodes
    assert "MASTER_ADDR" not in node.env
    assert node.shm == 2 << 30, "the service's own default"


def test_differences_finds_every_part() -> None:
    containers = {"workspaceblobstore": "c", "other": "d"}
    where = lambda url: place(url, containers)  # noqa: E731
    ours = reading("job", body(), IMAGE)
    assert differences(ours, reading("another-name", body(), IMAGE), where) == []
    assert differences(ours, reading("job", body(), "other"), where)
    for path, value in (
        ("command", "python3 ${{outputs.live}}"),
        ("environmentVariables", {}),
        ("resources.instanceCount", 3),
        ("resources.shmSize", "8g"),
        ("distribution", None),
        ("limits.timeout", "PT2H"),
        ("inputs.code.mode", "ReadOnlyMount"),
        ("inputs.code.uri", f"{STORE}/other/"),
        ("outputs.live.uri", "azureml://datastores/other/paths/live/"),
    ):
        assert differences(ours, reading("job", changed(path, value), IMAGE), where), path


# ------------------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def plane(azure_environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Give a workspace that starts jobs only where a test uses the engine too."""
    with Plane(tmp_path / "azure", azurite=azure_environment, curated=IMAGE, runs=False) as made:
        for name, value in made.environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AZUREML_CURRENT_CLOUD", raising=False)
        made.no_capacity = True
        for name, text in {**{f"{key}.py": text for key, text in SCRIPTS.items()}, "word.txt": "of the input"}.items():
            made.blobs.put(f"{STORE}/code/{name}", text.encode())
        yield made


def client(plane: Plane) -> MLClient:
    words = {"cloud": plane.cloud, "cloud_metadata": plane.metadata, "retry_total": 0, "show_progress": False}
    return MLClient(ManagedIdentityCredential(), *plane.scope, enable_telemetry=False, **words)


def job(name: str, script: str = "see", nodes: int = 2, **more: Any) -> Any:
    """Return a job made by the SDK."""
    return command(
        name=name,
        command=f"exec python3 ${{{{inputs.code}}}}/{script}.py ${{{{outputs.live}}}}",
        environment=Environment(image=IMAGE),
        environment_variables={"WORD": "of the environment"},
        inputs={"code": Input(type="uri_folder", path=f"{STORE}/code/", mode="download")},
        outputs={"live": Output(type="uri_folder", path=f"{STORE}/{name}/live/", mode="rw_mount")},
        distribution={"type": "pytorch", "process_count_per_instance": 1},
        instance_count=nodes,
        instance_type="Standard_DS3_v2",
        **{"timeout": 600, **more},
    )


class Raw:
    """A client for requests by hand."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.token = plane, plane.wire.issue(plane.url)[0]
        self.context = ssl.create_default_context(cafile=str(plane.wire.pem))

    def __call__(
        self, method: str, url: str, value: Any = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        url = (
            url
            if url.startswith("https://")
            else f"{self.plane.url}{self.plane.id}{url}?api-version=2025-01-01-preview"
        )
        signed = {"Authorization": f"Bearer {self.token}"} if url.startswith(self.plane.url) else {}
        data = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(url, data, {**signed, **headers}, method=method)
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=20) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.headers, exc.read()


@pytest.mark.remote
class TestWire:
    def test_a_job_is_created_once_and_found(self, plane: Plane) -> None:
        ml = client(plane)
        assert ml.jobs.create_or_update(job("one")).status in ("NotStarted", "Starting", "Provisioning", "Queued")
        with pytest.raises(HttpResponseError, match="JobPropertyImmutable") as caught:  # microsoft/ai4s-jobq
            ml.jobs.create_or_update(job("one"))
        assert caught.value.status_code == 400
        assert ml.jobs.get("one").name == "one"
        with pytest.raises(ResourceNotFoundError):
            ml.jobs.get("two")
        assert [item.name for item in ml.jobs.list()] == ["one"]
        assert list(plane.environments.values()) == [{next(iter(*plane.environments.values())): IMAGE}]

    def test_a_cancel_is_followed_to_its_end(self, plane: Plane) -> None:
        ml = client(plane)
        ml.jobs.create_or_update(job("one"))
        ml.jobs.begin_cancel("one").result(30)
        assert plane.job("one").history[-2:] == ["CancelRequested", "Canceled"]
        assert ml.jobs.get("one").status == "Canceled"
        with pytest.raises(HttpResponseError, match="terminal state"):
            ml.jobs.begin_cancel("one")
        with pytest.raises(ResourceNotFoundError):
            ml.jobs.begin_cancel("none")

    def test_the_sdk_finds_uploaded_code_by_its_hash(self, plane: Plane, tmp_path: Path) -> None:
        ml, code = client(plane), tmp_path / "code"
        code.mkdir()
        (code / "train.py").write_text("print(1)\n")
        for name in ("one", "two"):
            ml.jobs.create_or_update(job(name, code=str(code)))
        assert (plane.wire.count("POST upload"), plane.wire.count("PUT code")) == (1, 1)
        assert len({plane.job(name).body["properties"]["codeId"] for name in ("one", "two")}) == 1

    def test_the_sdk_streams_the_logs_of_the_history(self, plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
        ml = client(plane)
        ml.jobs.create_or_update(job("one", nodes=1))
        made = plane.job("one")
        made.log(0).take(b"hello from the node\n")
        made.log(0).flush(whole=True)
        threading.Timer(2.0, made.stop).start()
        ml.jobs.stream("one")
        assert "hello from the node" in capsys.readouterr().out
        assert plane.wire.leaks == []

    def test_an_unknown_compute_and_environment_are_refused(self, plane: Plane) -> None:
        raw = Raw(plane)
        status, _, answer = raw("PUT", "/jobs/one", body(computeId=f"{plane.id}/computes/none"))
        assert (status, json.loads(answer)["error"]["message"]) == (400, "Unknown compute target 'none'.")
        plane.computes["cluster"] = {"vmSize": "STANDARD_DS3_V2", "vmPriority": "LowPriority"}
        assert raw("PUT", "/jobs/one", body(computeId=f"{plane.id}/computes/cluster"))[0] == 201
        assert client(plane).compute.get("cluster").tier == "low_priority"
        other = body(environmentId=f"{plane.id}/environments/mine/versions/1")
        assert raw("PUT", "/jobs/two", other)[0] == 400
        assert list(plane.jobs) == ["one"]

    def test_a_body_with_an_unknown_member_makes_no_job(self, plane: Plane) -> None:
        status, _, answer = Raw(plane)("PUT", "/jobs/one", body(restarts=3))
        assert (status, json.loads(answer)["error"]["code"]) == (400, "ValidationError")
        assert plane.jobs == {}

    def test_a_token_is_valid_until_it_expires(self, plane: Plane) -> None:
        raw = Raw(plane)
        assert raw("GET", "")[0] == 200
        plane.wire.expire()
        status, headers, _ = raw("GET", "")
        assert (status, "invalid_token" in headers["WWW-Authenticate"]) == (401, True)
        raw.token = "made.up."
        assert raw("GET", "")[0] == 401
        plane.wire.token_seconds = -1
        raw.token = plane.wire.issue(plane.url)[0]
        assert raw("GET", "")[0] == 401

    def test_a_machine_without_an_identity_gets_no_token(self, plane: Plane) -> None:
        plane.wire.signed_in = False
        with pytest.raises(Exception, match="managed identity"):
            client(plane).jobs.get("one")

    def test_a_token_sent_to_the_wrong_service_is_recorded(self, plane: Plane) -> None:
        raw = Raw(plane)
        raw("GET", f"{plane.api}/discovery/workspaces/w-1")
        assert plane.wire.leaks == []
        raw("GET", f"{plane.api}/discovery/workspaces/w-1", Authorization=f"Bearer {raw.token}")
        assert [call.operation for call in plane.wire.leaks] == ["GET discovery"]

    @pytest.mark.parametrize(
        ("fault", "status"),
        [
            (Fault.throttled("GET workspace", seconds=7), 429),
            (Fault.broken("GET workspace", status=503), 503),
            (Fault.denied("GET workspace", "Microsoft.MachineLearningServices/workspaces/read", SUBSCRIPTION), 403),
            (Fault("*", Refusal(409, "Conflict", "no")), 409),
        ],
    )
    def test_faults_on_demand(self, plane: Plane, fault: Fault, status: int) -> None:
        raw = Raw(plane)
        plane.wire.faults.append(fault)
        found, headers, answer = raw("GET", "")
        assert (found, json.loads(answer)["error"]["code"]) == (status, fault.error and fault.error.code)
        assert headers.get("Retry-After") == ("7" if status == 429 else None)
        assert raw("GET", "")[0] == 200

    def test_a_lost_answer_has_had_its_effect(self, plane: Plane) -> None:
        plane.wire.faults.append(Fault("PUT job", done=True))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            Raw(plane)("PUT", "/jobs/one", body())
        assert list(plane.jobs) == ["one"]
        plane.wire.faults.append(Fault("PUT job"))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            Raw(plane)("PUT", "/jobs/two", body())
        assert list(plane.jobs) == ["one"]

    def test_secrets_are_for_tokens_of_the_vault(self, plane: Plane) -> None:
        plane.secrets["127", "word"] = "s3cret"
        raw = Raw(plane)
        assert raw("GET", f"{plane.url}/secrets/word?api-version=7.4")[0] == 401
        raw.token = plane.wire.issue("https://vault.azure.net")[0]
        assert json.loads(raw("GET", f"{plane.url}/secrets/word")[2])["value"] == "s3cret"
        assert raw("GET", f"{plane.url}/secrets/other")[0] == 404


# ---------------------------------------------------------------------------------------------------------------- logs


@pytest.mark.remote
class TestLogs:
    def logged(self, plane: Plane, text: bytes = b"one\ntwo\n") -> tuple[Raw, CommandJob]:
        raw = Raw(plane)
        assert raw("PUT", "/jobs/one", body())[0] == 201
        made = plane.job("one")
        made.log(1).take(text)
        made.log(1).flush(whole=True)
        return raw, made

    def url(self, raw: Raw, name: str = "user_logs/std_log_process_1.txt") -> str:
        details = raw("GET", f"{raw.plane.url}/history/v1.0{raw.plane.id}/runs/one/details")[2]
        return str(json.loads(details)["logFiles"][name])

    @pytest.mark.parametrize("at_the_end", [206, 416])
    def test_a_log_is_read_by_range_and_ends_in_either_way(self, plane: Plane, at_the_end: int) -> None:
        plane.blobs.at_the_end = at_the_end
        raw, made = self.logged(plane)
        url = self.url(raw)
        assert raw("GET", url, Range="bytes=2-4")[::2] == (206, b"e\nt")
        assert raw("GET", url, Range="bytes=4-")[::2] == (206, b"two\n")
        status, _, data = raw("GET", url, Range="bytes=8-")
        assert (status, data == b"") == (at_the_end, at_the_end == 206)
        made.log(1).take("drei ü\n".encode())
        made.log(1).flush(whole=True)
        assert raw("GET", url, Range="bytes=8-")[::2] == (206, "drei ü\n".encode())

    def test_each_log_has_a_signature_that_expires(self, plane: Plane) -> None:
        plane.blobs.sas_seconds = 5.0
        raw, _ = self.logged(plane)
        url = self.url(raw)
        other = url.replace("process_1", "process_0")
        assert raw("GET", url)[0] == 200
        assert raw("GET", other)[0] == 403
        time.sleep(5.5)
        assert raw("GET", url)[0] == 403
        assert raw("GET", self.url(raw))[0] == 200

    def test_it_grows_slowly(self, plane: Plane) -> None:
        raw, made = self.logged(plane, b"")
        plane.log_lag, plane.log_bytes = 0.5, 3
        log: AppendLog = made.log(1)
        log.take(b"12345678")
        log.flush()
        assert raw("GET", self.url(raw))[2] == b""
        time.sleep(0.6)
        sizes = []
        for _ in range(4):
            log.flush()
            sizes.append(len(raw("GET", self.url(raw))[2]))
        assert sizes == [3, 6, 8, 8]


# -------------------------------------------------------------------------------------------------------- jobs that run


class Running:
    """A client that sends jobs by the SDK to a `Plane` with an engine."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.ml = plane, client(plane)

    def send(self, name: str, script: str, **more: Any) -> CommandJob:
        self.ml.jobs.create_or_update(job(name, script, **more))
        return self.plane.job(name)

    def keys(self, name: str) -> set[str]:
        return self.plane.blobs.names(f"{STORE}/{name}/live/")

    def await_line(self, made: CommandJob, text: str = "", nodes: int = 2) -> None:
        """Wait until every node has printed a line that contains ``text``."""
        Jobs.wait_for(lambda: made.over or sum(text in line for line in made.printed().splitlines()) >= nodes)
        assert not made.over, made.error


@pytest.fixture
def running(plane: Plane, engine: Any, images: Callable[[str], str], tmp_path: Path) -> Iterator[Running]:
    images("py313")
    before = left(engine, tmp_path)
    plane.engine, plane.no_capacity = engine, False
    yield Running(plane)
    plane.close()
    assert left(engine, tmp_path) == before


@pytest.mark.docker
@pytest.mark.remote
@pytest.mark.slow
class TestJobs:
    def test_a_job_completes(self, running: Running) -> None:
        running.plane.blobs.put(f"{STORE}/done/live/earlier", b"x")
        made = running.send("done", "done", tags={"team": "vision"})
        assert made.wait() == "Completed"
        assert made.history == [
            "NotStarted", "Starting", "Provisioning", "Preparing", "Running", "Finalizing", "Completed",
        ]  # fmt: skip
        views = [json.loads(line) for line in made.printed().splitlines()]
        assert sorted(item.pop("me") for item in views) == ["0", "1"]
        assert views == 2 * [
            {
                "word": "of the input",
                "env": "of the environment",
                "engine": ["CLOUDTRAIN_METADATA_URL"],  # a real node needs none: it has a metadata service
                "run": "done",
                "world": "2",
                "live": ["earlier"],
            }
        ]
        assert running.keys("done") == {"earlier", "checkpoint-0", "checkpoint-1"}
        job = running.ml.jobs.get("done")
        assert (job.status, job.tags) == ("Completed", {"team": "vision"})
        assert sorted(made.details()["logFiles"]) == [f"user_logs/std_log_process_{n}.txt" for n in range(2)]

    def test_a_failure_names_the_exit_code_and_the_log(self, running: Running) -> None:
        made = running.send("fail", "fail")
        assert made.wait() == "Failed"
        assert made.error is not None
        message = made.error["error"]["message"]
        assert "exited with status code 3" in message
        assert "user_logs/std_log_process_1.txt" in message

    def test_a_cancel_reaches_every_container(self, running: Running) -> None:
        made = running.send("stop", "hold")
        running.await_line(made)
        running.ml.jobs.begin_cancel("stop").result(60)
        assert made.wait() == "Canceled"
        assert running.keys("stop") == {"sigterm-0", "sigterm-1"}

    def test_an_unused_grace_ends_in_a_kill(self, running: Running) -> None:
        running.plane.grace = 1.0
        made = running.send("deaf", "deaf")
        running.await_line(made)
        made.stop()
        assert made.wait() == "Canceled"

    def test_the_time_limit_ends_it(self, running: Running) -> None:
        running.plane.paces["long"] = 600.0
        made = running.send("long", "hold")
        assert made.wait() == "Canceled"
        assert made.error is not None
        assert "limit of 600 seconds" in made.error["error"]["message"]

    @pytest.mark.parametrize("restarts", [False, True])
    def test_preempted_nodes_fail_the_job_or_restart_it(self, running: Running, restarts: bool) -> None:
        running.plane.restarts = restarts
        made = running.send("spot", "once", job_tier="spot")
        Jobs.wait_for(lambda: running.keys("spot") == {"seen-0", "seen-1"})
        made.preempt(1)
        assert made.wait() == ("Completed" if restarts else "Failed")
        assert made.history.count("Running") == 1 + restarts
        assert ("Queued" in made.history) == restarts
        assert restarts or (made.error and "PreemptionError" in made.error["error"]["message"])

    def test_a_lost_node_is_a_fault_of_the_service(self, running: Running) -> None:
        made = running.send("lost", "once")
        Jobs.wait_for(lambda: len(running.keys("lost")) == 2)
        made.lose(0)
        made.lose(1)
        assert made.wait() == "Failed"
        assert made.error is not None
        assert made.error["error"]["code"] == "ServiceError"

    def test_a_mounted_output_shows_the_peers_files(self, running: Running) -> None:
        made = running.send("peers", "peers")
        assert made.wait() == "Completed"
        assert made.printed().count("met") == 2

    def test_a_mounted_output_that_lags(self, running: Running) -> None:
        running.plane.sync_lag = 3.0
        made = running.send("lag", "once")
        running.await_line(made)
        assert running.keys("lag") == set()
        Jobs.wait_for(lambda: running.keys("lag") == {"seen-0", "seen-1"})
        made.stop()
        made.wait()

    def test_reasons_that_keep_a_job_from_running(self, running: Running) -> None:
        plane = running.plane
        plane.quotas["Standard_DS3_v2"] = 2
        made = running.send("quota", "done")
        assert made.wait() == "Failed"
        assert made.error is not None
        assert "vCPU quota of 2 and is less than the requested job node count of 2 which maps to 8" in str(made.error)
        plane.quotas.clear()
        plane.no_role = True
        made = running.send("role", "done")
        assert made.wait() == "Failed"
        assert "AuthorizationPermissionMismatch" in str(made.error)
        plane.no_role, plane.no_capacity = False, True
        made = running.send("queued", "done")
        Jobs.wait_for(lambda: made.status == "Queued")
        plane.no_capacity = False
        assert made.wait() == "Completed"

    def test_a_missing_image(self, running: Running) -> None:
        made = running.send("none", "done", nodes=1)
        made.wait()
        running.ml.jobs.create_or_update(
            command(name="image", command="true", environment=Environment(image="team/none:1"))
        )
        made = running.plane.job("image")
        assert made.wait() == "Failed"
        assert "FailedPullingImage" in str(made.error)

    def test_a_status_on_demand(self, running: Running) -> None:
        made = running.send("odd", "hold")
        running.await_line(made)
        for status in ("NotResponding", "Quiescing"):
            running.plane.unknown["odd"] = status
            assert running.ml.jobs.get("odd").status == status
        del running.plane.unknown["odd"]
        assert running.ml.jobs.get("odd").status == "Running"
        made.stop()
        assert made.wait() == "Canceled"
