"""The testing kit, as a user's tests use it: real plans of every provider, jobs that are scripted or really run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import Estimator, cli
from cloudtrain.errors import AuthError, QuotaError, SpecError, UnsupportedError
from cloudtrain.estimator import RunFailedError
from cloudtrain.provider_api.registry import find_provider, provider_names
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Plan
from cloudtrain.testing import plugin
from cloudtrain.testing.fake_cloud import FakeCloud
from cloudtrain.testing.places import Places
from cloudtrain.testing.requests import assert_request, stable
from cloudtrain.testing.running import Jobs as ContractJobs
from cloudtrain.validate import toml_loads

# The fixtures themselves, also where this package was installed before it had a plugin.
cloudtrain_offline, cloudtrain_store = plugin.cloudtrain_offline, plugin.cloudtrain_store
fake_cloud, cloudtrain_snapshot = plugin.fake_cloud, plugin.cloudtrain_snapshot

ROOT = Path(__file__).parents[2]
AWS = {"region": "eu-west-1", "role": "arn:aws:iam::123456789012:role/training"}
FOLDERS = {"slurm": "shared", "kubernetes": "shared"}
"""Providers whose store is a folder: the kit keeps only buckets in memory."""
SCRIPT = """
import json, os, time
start = os.environ["CLOUDTRAIN_RESUME_FROM"]
step = int(open(f"{start}/step.txt").read()) if start else 0
data = open(os.environ["CLOUDTRAIN_INPUT_TRAIN"]).read() if "CLOUDTRAIN_INPUT_TRAIN" in os.environ else ""
if os.environ["CLOUDTRAIN_ATTEMPT"] == "0.1":
    raise ValueError("a bad moment")
while step < 12 and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    step += 1
    if os.environ["RANK"] == "0":
        with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as stream:
            stream.write(json.dumps({"step": step, "loss": 1 / step}) + chr(10))
    time.sleep(0.05)
# One rank alone writes: the nodes here are not in step, and two would write checkpoints of different steps.
if os.environ["RANK"] == "0":
    folder = f"{os.environ['CLOUDTRAIN_CHECKPOINT_DIR']}/step-{step}"
    os.makedirs(folder)
    open(f"{folder}/step.txt", "w").write(str(step))
print("at", step, os.environ.get("TOKEN", "")[::-1], data, flush=True)
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the user's folder."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    return folder


def of(provider: str, **more: Any) -> Estimator:
    """Return an estimator for ``provider`` as in its author's sample."""
    sample = sys.modules[find_provider(provider).__module__].SAMPLE  # type: ignore[attr-defined]
    job = {**sample.get("job", {}), **more}
    return Estimator(
        entry_point="train.py",
        provider=provider,
        settings=sample.get("settings"),
        store=sample.get("store") or FOLDERS.get(provider),
        write=lambda _: None,
        **job,
    )


def on_aws(**more: Any) -> Estimator:
    given = {"instance_type": "ml.g5.xlarge", "instance_count": 2, "launcher": "python", **more}
    return Estimator(
        entry_point="train.py", provider="sagemaker", store="s3://b/ct", settings=AWS, write=lambda _: None, **given
    )


def attempts(run: Run, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(row[field] for field in ("number", *fields)) for row in run.result()["attempts"]]


# ------------------------------------------------------------------------------------------------------------- requests


@pytest.mark.slow
@pytest.mark.parametrize("name", provider_names())
def test_every_provider_plans_for_real_and_a_run_ends_well(fake_cloud: FakeCloud, name: str, tmp_path: Path) -> None:
    fake_cloud.succeed(
        logs=["hello"],
        metrics=[{"step": 1, "loss": 2.0}],
        artifacts={"plots/loss.txt": "down"},
        checkpoints={"step-1": {"state.pt": b"1"}, "last.pt": b"2"},
    )
    estimator = of(name)
    planned = estimator.plan(run_id="mine-1")
    run = estimator.fit(run_id="mine-1")
    assert fake_cloud.requests == [planned.request]
    assert [(line.node, line.rank, line.text) for line in run.logs()] == [(0, 0, "hello")]
    pulled = tmp_path / "out"
    run.pull(pulled)
    assert (pulled / "checkpoints/step-1/state.pt").read_bytes() == b"1"
    assert (pulled / "checkpoints/last.pt").read_bytes() == b"2"
    assert (pulled / "artifacts/plots/loss.txt").read_text() == "down"
    assert json.loads((pulled / "metrics.jsonl").read_text())["loss"] == 2.0
    again = Estimator.attach(run.url).result()
    assert (again["state"], again["attempts"][0]["number"]) == ("succeeded", "0.0")


def test_refusals_are_the_providers_own_and_send_nothing(fake_cloud: FakeCloud) -> None:
    with pytest.raises(UnsupportedError, match=r"its nodes read s3:// only"):
        Estimator(entry_point="train.py", provider="sagemaker", settings=AWS).fit()
    assert fake_cloud.requests == []


@pytest.mark.costly
def test_the_same_submission_is_one_job(fake_cloud: FakeCloud) -> None:
    fake_cloud.hold()
    first, second = (on_aws().fit(wait=False, run_id="mine-1") for _ in range(2))
    assert (len(fake_cloud.requests), first.status().state, second.status().state) == (1, "running", "running")


def test_the_command_line_in_this_process_is_faked_too(
    fake_cloud: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_cloud.fail(ValueError("lr is nan"), rank=1)
    words = ["submit", "train.py", "--provider", "local", "--nproc-per-node", "2", "--run-id", "mine-1", "--json"]
    assert cli.main(words) == 1
    output = json.loads(capsys.readouterr().out)
    assert (output["run"], output["reason"]) == (
        "memory://cloudtrain/runs/mine-1",
        "rank 1 on node 0 raised ValueError: lr is nan",
    )
    assert cli.main(["status", "mine-1"]) == 0


# ---------------------------------------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("exception", "category", "exit_code"),
    [(ValueError("lr is nan"), "user_error", 1), ("RuntimeError: CUDA out of memory", "oom", 1)],
)
def test_a_rank_fails(fake_cloud: FakeCloud, exception: Any, category: str, exit_code: int) -> None:
    fake_cloud.fail(exception, rank=1, node=1)
    with pytest.raises(RunFailedError, match=r"rank 1 on node 1 raised \w+: ") as caught:
        on_aws().fit()
    assert (caught.value.result["category"], caught.value.exit_code) == (category, exit_code)
    assert caught.value.result["failure"]["node"] == 1


def test_where_an_exception_was_raised_is_told(fake_cloud: FakeCloud) -> None:
    try:
        json.loads("{")
    except ValueError as exc:
        fake_cloud.fail(exc)
    with pytest.raises(RunFailedError) as caught:
        on_aws().fit()
    failure = caught.value.result["failure"]
    assert (failure["file"], failure["exception"].split(":")[0]) == ("decoder.py", "JSONDecodeError")
    assert "Traceback" in failure["traceback"]


@pytest.mark.parametrize("name", ["sagemaker", "local"])
def test_a_failure_is_retried_by_whoever_does_that_there(fake_cloud: FakeCloud, name: str) -> None:
    fake_cloud.fail("ValueError: once", checkpoints={"step-3": b""}, metrics=[{"step": 5}]).succeed()
    run = of(name, retries=1).fit()
    assert attempts(run, "category", "resumed_step", "lost") == [
        ("0.0", "user_error", None, {"seconds": None, "steps": 2}),
        ("1.0", None, 3, None),
    ]
    assert len(fake_cloud.requests) == {"sagemaker": 2, "local": 1}[name]


def test_a_preemption_is_the_platforms_to_repair(fake_cloud: FakeCloud) -> None:
    fake_cloud.preempt(checkpoints={"step-3": b""}).preempt().succeed()
    run = on_aws().fit()
    assert attempts(run, "category", "resumed_step", "node") == [
        ("0.0", "preempted", None, 0),
        ("0.1", "preempted", 3, 0),
        ("0.2", None, 3, None),
    ]


@pytest.mark.costly
def test_no_capacity_means_the_next_gpu_of_the_list(fake_cloud: FakeCloud) -> None:
    fake_cloud.capacity().succeed()
    run = of("vertex", gpu=["H100:8", "A100:8"], instance_type=None, cpus=None, memory_gb=None).fit()
    assert attempts(run, "category") == [("0.0", "capacity"), ("1.0", None)]
    kinds = [
        assert_request(sent, "jobSpec.workerPoolSpecs.0.machineSpec.acceleratorType") for sent in fake_cloud.requests
    ]
    assert kinds == ["NVIDIA_H100_80GB", "NVIDIA_TESLA_A100"]


@pytest.mark.parametrize(("error", "kind"), [("no quota", QuotaError), (AuthError("no credentials"), AuthError)])
def test_a_request_is_refused(fake_cloud: FakeCloud, error: Any, kind: type[Exception]) -> None:
    fake_cloud.refuse(error)
    with pytest.raises(kind, match=str(error)):
        on_aws().fit(run_id="mine-1")
    result = Estimator.attach("mine-1", store="s3://b/ct").wait()
    assert (result["state"], result["exit_code"]) == ("failed", kind.exit_code)


@pytest.mark.costly
def test_a_held_job_is_cancelled_or_released(fake_cloud: FakeCloud) -> None:
    fake_cloud.hold("pending", "waiting for machines").hold()
    first, second = on_aws().fit(wait=False), on_aws().fit(wait=False)
    assert (first.status().reason, second.status().state) == ("waiting for machines", "running")
    first.cancel()
    fake_cloud.release()
    assert [run.wait()["state"] for run in (first, second)] == ["cancelled", "succeeded"]


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda cloud: cloud.hold("done"), "held pending or running"),
        (lambda cloud: cloud.refuse(OSError("x")), "errors of cloudtrain.errors"),
        (lambda cloud: cloud.fail(category="ooom"), "no category of a run is called 'ooom'"),
        (lambda cloud: cloud.succeed(logs="one"), "logs: must be a list of lines"),
        (lambda cloud: cloud.succeed(logs=["one\ntwo"]), "logs: must be a list of lines"),
        (lambda cloud: cloud.succeed(metrics={"step": 1}), "metrics: must be a list of rows"),
        (lambda cloud: cloud.succeed(checkpoints={"../x": b""}), "relative path"),
        (lambda cloud: cloud.run_locally(preempt_at_step=1, preempt_after=1), "not both"),
    ],
)
def test_a_script_that_cannot_be_is_refused(
    fake_cloud: FakeCloud, say: Callable[[FakeCloud], object], message: str
) -> None:
    with pytest.raises((ValueError, TypeError, SpecError), match=message):
        say(fake_cloud)


# ---------------------------------------------------------------------------------------------------------- really run


@pytest.mark.slow
def test_a_job_of_a_cloud_is_run_here_preempted_retried_and_resumed(
    fake_cloud: FakeCloud, cloudtrain_store: Places, tmp_path: Path
) -> None:
    cloudtrain_store.write("numbers.txt", "42", "s3://b/data")
    fake_cloud.run_locally(preempt_at_step=3, secrets={"TOKEN": "secret-word"})
    secret = {"TOKEN": "aws:arn:aws:secretsmanager:eu-west-1:123456789012:secret:token-AbCdEf"}
    limits = {"gpu": "A10G:1", "max_gpu_hours": 8, "instance_type": None}
    run = on_aws(secrets=secret, retries=1, **limits).fit({"train": "s3://b/data/numbers.txt"})
    assert fake_cloud.assert_request("ResourceConfig.InstanceCount", equals=2) == 2
    assert [sent.attempt for sent in fake_cloud.requests] == [0, 1]
    assert attempts(run, "category") == [("0.0", "preempted"), ("0.1", "user_error"), ("1.0", None)]
    assert run.result()["attempts"][0]["node"] == 0
    steps = [row["resumed_step"] for row in run.result()["attempts"]]
    assert steps[0] is None
    assert steps[1] == steps[2]
    assert 3 <= steps[2] < 12
    assert {line.text for line in run.logs() if line.text.startswith("at 12")} == {"at 12 drow-terces 42"}
    run.pull(tmp_path / "out")
    assert (tmp_path / "out/checkpoints/step-12/step.txt").read_text() == "12"
    assert "secret-word" not in str([cloudtrain_store.read(key, "s3://b") for key in cloudtrain_store.files("s3://b")])


@pytest.mark.costly
def test_what_only_a_platform_can_read_is_asked_for(fake_cloud: FakeCloud) -> None:
    fake_cloud.run_locally()
    secret = {"TOKEN": "aws:arn:aws:secretsmanager:eu-west-1:123456789012:secret:token-AbCdEf"}
    with pytest.raises(SpecError, match=r"secrets\.TOKEN: .*run_locally\(secrets="):
        on_aws(secrets=secret).fit()
    with pytest.raises(SpecError, match=r"inputs\.train: .*run_locally\(inputs="):
        of("azureml").fit({"train": "azureml:numbers@latest"})
    fake_cloud.run_locally(inputs={"train": "nowhere"})
    with pytest.raises(SpecError, match=r"inputs\.train: there is no "):
        on_aws().fit({"train": "s3://b/data"})


# ---------------------------------------------------------------------------------------------------- stores, settings


@pytest.mark.parametrize("scheme", ["s3", "gs", "abfs", "memory"])
def test_a_file_in_memory_is_replaced_in_one_version_only(cloudtrain_store: Places, scheme: str) -> None:
    from cloudtrain.storage.files import files

    tree = files(f"{scheme}://b/x")
    first = tree.swap("record", None, b"1")
    second = tree.swap("record", first, b"2")
    for version in (first, None):
        with pytest.raises(FileExistsError):
            tree.swap("record", version, b"3")
    assert tree.load("record")[:2] == (b"2", second)  # type: ignore[index]


def test_one_of_several_creates_a_file_in_memory(cloudtrain_store: Places) -> None:
    from cloudtrain.storage.files import files

    wins: list[bool] = []
    gate = threading.Barrier(8)

    def create(number: int) -> None:
        gate.wait()
        wins.append(files("s3://b/x").create("record", str(number).encode()))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == [False] * 7 + [True]
    assert cloudtrain_store.files("s3://b/x") == ["record"]
    assert cloudtrain_store.files("gs://b/x") == []


def test_a_file_of_settings_counts_where_the_test_says_so(
    fake_cloud: FakeCloud, cloudtrain_store: Places, code: Path
) -> None:
    own = 'provider = "sagemaker"\nstore = "s3://prod/ct"\n[sagemaker]\nregion = "eu-west-1"\nrole = "{role}"\n'
    (code / "cloudtrain.toml").write_text(own.format(**AWS))
    assert Estimator(entry_point="train.py").plan().provider_name == "local"
    assert cloudtrain_store.url == "memory://cloudtrain"
    cloudtrain_store.read_settings(code)
    assert Estimator(entry_point="train.py", instance_type="ml.g5.xlarge").fit().url.startswith("s3://prod/ct/runs/")
    assert any(key.endswith("run.json") for key in cloudtrain_store.files())
    cloudtrain_store.use("s3://other/ct")
    assert cloudtrain_store.url == "s3://other/ct"


# ---------------------------------------------------------------------------------------------- assertions, snapshots


@pytest.mark.parametrize(
    ("path", "equals", "message"),
    [
        ("ResourceConfig.InstanceCount", 3, "planned: 2\n  wanted:  3"),
        ("ResourceConfig", {"InstanceCount": 3}, '-  "InstanceCount": 3\n+  "InstanceCount": 2,'),
        ("ResourceConfig.InstanceCuont", 2, "no 'InstanceCuont' (did you mean 'InstanceCount'?)"),
        ("InputDataConfig.9.ChannelName", "x", "is a list of 3, of which '9' is no index"),
        ("RoleArn.name", "x", "with nothing below it"),
    ],
)
def test_a_request_that_is_not_as_expected(fake_cloud: FakeCloud, path: str, equals: Any, message: str) -> None:
    plan = on_aws().plan()
    with pytest.raises(AssertionError) as caught:
        assert_request(plan, path, equals=equals)
    assert message in str(caught.value)
    with pytest.raises(AssertionError, match="nothing has been sent"):
        fake_cloud.assert_request("RoleArn")
    fake_cloud.assert_request("InputDataConfig.-1.ChannelName", equals="cloudtrain-code", request=plan.request)


@pytest.fixture
def snapshots(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the fixture as a test in ``tmp_path`` gets it."""
    monkeypatch.setattr(request.node, "path", tmp_path / "test_mine.py")
    check: Callable[..., None] = request.getfixturevalue("cloudtrain_snapshot")
    return check


def test_a_golden_file_of_a_plan(
    snapshots: Callable[..., None], code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = tmp_path / "snapshots/aws.json"
    with pytest.raises(AssertionError, match=r"there is no .*aws\.json .*CLOUDTRAIN_SNAPSHOTS=write"):
        snapshots(on_aws().plan(), "aws")
    with monkeypatch.context() as writing:
        writing.setenv("CLOUDTRAIN_SNAPSHOTS", "write")
        snapshots(on_aws().plan(run_id="one"), "aws")
    assert json.loads(golden.read_text())["request"]["body"]["ResourceConfig"]["InstanceCount"] == 2
    (code / "train.py").write_text("print('another script')")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")  # the golden file is committed, and compared in CI
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    monkeypatch.setenv("GITHUB_RUN_ATTEMPT", "1")
    author = ("-c", "user.name=x", "-c", "user.email=x@y")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=code, check=True, stdin=subprocess.DEVNULL)
    again = on_aws().plan(run_id="another-2")
    assert "cloudtrain:revision" in str(again.document()["request"])
    snapshots(again, "aws")
    with pytest.raises(AssertionError, match=r'-\s+"InstanceCount": 2,\n\+\s+"InstanceCount": 4,'):
        snapshots(on_aws(instance_count=4).plan(), "aws")


@pytest.mark.parametrize("name", provider_names())
def test_a_plan_is_stable_but_for_what_it_says(
    cloudtrain_store: Places, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare another run of other code, from another folder: as an object and as the command line's output."""

    def plan(folder: str, run_id: str) -> Plan:
        place = tmp_path / folder
        place.mkdir()
        (place / "train.py").write_text(f"print({run_id!r})")
        (place / "data.txt").write_text("1")
        monkeypatch.chdir(place)
        return of(name).plan({"train": "data.txt"}, run_id=run_id)

    first = stable(plan("a", "one"))
    assert first == stable(json.loads(json.dumps(plan("b", "another-2").document())))
    assert first["request"]["context"]["run_id"] == "<run>"
    assert str(tmp_path) not in json.dumps(first)


# ---------------------------------------------------------------------------------------- a user's pytest, as it is run

INNER = """
import os, socket, sys, threading
import pytest
from cloudtrain.settings.settings import Settings

def test_without_us_nothing_is_loaded():
    ours = {name for name in sys.modules if name.split(".")[0] == "cloudtrain"}
    assert ours <= {"cloudtrain", "cloudtrain._version", "cloudtrain.testing", "cloudtrain.testing.plugin",
                    *LOADED_BY_US}
    assert "fsspec" not in sys.modules

def test_a_name(cloudtrain_offline):
    socket.create_connection(("example.com", 443), timeout=1)

def test_swallowed(cloudtrain_offline):
    try:
        socket.socket().connect(("203.0.113.7", 80))
    except BaseException:
        pass

def test_a_datagram_of_a_thread(cloudtrain_offline):
    def send():
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as out:
            try:
                out.sendto(b"x", 0, ("2001:db8::1", 53))
            except BaseException:
                pass
    thread = threading.Thread(target=send)
    thread.start()
    thread.join()

def test_loopback_is_allowed(cloudtrain_offline):
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5).close()

def test_after_it_nothing_stands_in_the_way():
    assert "guarded" not in repr(socket.socket.connect) + repr(socket.getaddrinfo)

def test_variables_from_before_do_not_count(cloudtrain_store):
    assert Settings.load().provider == "local"
    assert Settings.load().store == "memory://cloudtrain"

def test_but_those_of_a_test_do(cloudtrain_store, monkeypatch):
    monkeypatch.setenv("CLOUDTRAIN_PROVIDER", "vertex")
    assert Settings.load().provider == "vertex"

def test_without_the_fixtures_they_do():
    assert Settings.load().provider == "sagemaker"
"""


@pytest.mark.slow
def test_as_a_plugin_it_guards_the_network_and_leaves_others_alone(tmp_path: Path) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, cloudtrain.settings.settings; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = [name for name in loaded if name.startswith("cloudtrain.")]
    (tmp_path / "test_inner.py").write_text(f"LOADED_BY_US = {ours!r}\n{textwrap.dedent(INNER)}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "cloudtrain.testing.plugin", "-p", "no:cacheprovider", "-q", "-rfE"],
        cwd=tmp_path,
        # Where CI is set, pytest repeats every message in full in its summary.
        env={
            **{name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")},
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CLOUDTRAIN_PROVIDER": "sagemaker",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = "cloudtrain: the test reached for the network, which it may not"
    short = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert [line.split("::")[1].split(" ")[0] for line in short] == [
        "test_a_name",
        "test_swallowed",
        "test_a_datagram_of_a_thread",
    ], done.stdout
    for place in ("example.com:443", "203.0.113.7:80", "[2001:db8::1]:53"):
        assert done.stdout.count(f"{said}: {place}\n") == 1, done.stdout
    assert "3 failed, 6 passed" in done.stdout


def test_the_package_brings_the_plugin() -> None:
    project = toml_loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"), where="pyproject.toml")["project"]
    assert project["entry-points"]["pytest11"] == {"cloudtrain": plugin.__name__}


# ------------------------------------------------------------------------------------------------- the contract's jobs


def test_a_job_that_fails_its_platform_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one broken platform would cost each test of the contract the whole wait."""
    waited: list[str] = []

    def seen(run: str) -> None:
        waited.append(run)
        raise TimeoutError(f"{run} did not end")

    world = types.SimpleNamespace(seen=seen, plan=lambda *_, run_id: run_id, send=lambda plan: plan)
    world.place = types.SimpleNamespace(clear_earlier=lambda: None)
    monkeypatch.setattr(ContractJobs, "_changes", lambda *_: [])
    jobs = ContractJobs(world)  # type: ignore[arg-type]
    for name in ("torchrun", "user_error", "torchrun"):
        with pytest.raises(TimeoutError, match="earlier did not end"):
            jobs.seen(name)
    assert waited == ["earlier"]
