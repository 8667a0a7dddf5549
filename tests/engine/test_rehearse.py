"""Rehearsals: the cloud's own request, its local substitutes, the reported differences, drills, and whole runs in
containers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import ipaddress
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import docker
import pytest
import requests
from jobs import Done, Jobs
from runtime.test_webhook import Hook

from cloudtrain.engine import NodeError
from cloudtrain.engine.docker_api import check_image, connect
from cloudtrain.engine.fault_injection import Injection, InjectionPlan
from cloudtrain.engine.node_folders import NodeFolders
from cloudtrain.engine.rehearse import plan_rehearsal
from cloudtrain.engine.supervisor import Supervisor, SupervisorLog, _Mounts
from cloudtrain.engine.url_map import stand_in_for
from cloudtrain.errors import SpecError, StorageError
from cloudtrain.estimator import Estimator
from cloudtrain.job.job import Job
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from cloudtrain.provider_api.registry import find_provider, provider_names
from cloudtrain.providers._rehearsal import DIRECT, EVERYWHERE, SECRETS
from cloudtrain.runs.submit import Plan, make_plan
from cloudtrain.runtime.node_check import address_towards
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.errors import FinalError
from cloudtrain.storage.files import Files, files
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store

CLOUDS = ("azureml", "sagemaker", "vertex")


class Site:
    """A folder with a script, and the settings of a cloud's account."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.target = folder, target
        self.sample = importlib.import_module(f"cloudtrain.providers.{target}").SAMPLE
        (folder / "train.py").write_text("print(1)\n")

    @property
    def settings(self) -> Settings:
        table = {self.target: self.sample["settings"]}
        return Settings(provider=self.target, store=self.sample["store"], tables=table)

    def job(self, **fields: Any) -> Job:
        return Job.make(**{"entry_point": "train.py", "instance_count": 2, **self.sample["job"], **fields})

    def rehearsed(self, job: Job | None = None, **given: Any) -> Plan:
        job = job or self.job()
        return plan_rehearsal(job, settings=self.settings, cwd=self.folder, run_id="r", **given)

    def refused(self, job: Job | None = None, **given: Any) -> SpecError:
        with pytest.raises(SpecError) as caught:
            self.rehearsed(job, **given)
        assert "\n" not in str(caught.value)
        return caught.value


@pytest.mark.parametrize("name", [*CLOUDS, "kubernetes", "modelarts", "slurm"])
def test_it_needs_no_settings_of_an_account(tmp_path: Path, name: str) -> None:
    """Made-up values stand for them, and a difference from the platform names them."""
    (tmp_path / "train.py").write_text("print(1)\n")
    sample = importlib.import_module(f"cloudtrain.providers.{name}").SAMPLE
    fields = {"entry_point": "train.py", **sample.get("job", {})}
    job = Job.make(**{key: value for key, value in fields.items() if key != "image"})

    def rehearsed(image: str) -> Plan:
        settings = Settings.load(environ={}, cwd=tmp_path, provider=name)
        return plan_rehearsal(job, settings=settings, cwd=tmp_path, run_id="r", store=str(tmp_path / "s"), image=image)

    plan = rehearsed("here:1")
    assert {node["image"] for node in plan.request.body["nodes"]} == {"here:1"}
    (line,) = [line for line in plan.request.body["differences"] if "made-up values" in line]
    assert line.startswith("settings that are not set have made-up values: store")
    assert plan.missing == ()
    assert plan.document()["request"] == plan.request.to_dict(), "they stay as they are"
    with pytest.raises(SpecError, match="image") as caught:
        rehearsed("")
    assert (caught.value.field, "--local-image IMAGE" in caught.value.hint) == ("local_image", True)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("sagemaker", "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1"),
        ("vertex", "us-central1-docker.pkg.dev/team/images/trainer:1"),
    ],
)
def test_an_image_of_the_job_may_hold_what_is_also_a_made_up_value(tmp_path: Path, name: str, image: str) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    sample = importlib.import_module(f"cloudtrain.providers.{name}").SAMPLE["job"]
    job = Job.make(**{"entry_point": "train.py", **sample, "image": image})
    settings = Settings.load(environ={}, cwd=tmp_path, provider=name)
    plan = plan_rehearsal(job, settings=settings, cwd=tmp_path, run_id="r", store=str(tmp_path / "s"))
    assert plan.request.body["nodes"][0]["image"] == image


def test_an_environment_of_a_platform_that_is_no_image_is_refused() -> None:
    """An engine answers with 400 that the name is no reference."""
    answer = requests.Response()
    answer.status_code = 400

    class Engine:
        def inspect_image(self, image: str) -> None:
            raise docker.errors.APIError("invalid reference format", response=answer)

    with pytest.raises(SpecError, match="image: azureml:torch:1 is not the name of an image") as caught:
        check_image(Engine(), "azureml:torch:1", None)
    assert "--local-image IMAGE" in caught.value.hint


@pytest.fixture(params=CLOUDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, request.param)


@pytest.fixture
def vertex(tmp_path: Path) -> Site:
    return Site(tmp_path, "vertex")


# ----------------------------------------------------------------------------------------------------- the same request


def test_the_request_is_the_very_one_that_plan_shows(site: Site) -> None:
    (site.folder / "data.csv").write_text("1\n")
    job = site.job(inputs={"train": str(site.folder / "data.csv")}, retries=1)
    real = make_plan(job, settings=site.settings, run_id="r", cwd=site.folder)
    plan = site.rehearsed(job)
    body = plan.request.body
    assert body["request"] == real.request.to_dict()
    assert (body["target"], plan.provider_name, plan.run_id) == (site.target, "rehearsal", real.run_id)
    assert plan.layout.code_digest == real.layout.code_digest
    assert plan.layout.runtime_digest == real.layout.runtime_digest
    theirs = real.provider.launch_spec(real.request)
    ours = plan.provider.launch_spec(plan.request)
    for one, other in zip(theirs.nodes, ours.nodes, strict=True):
        for name in ("command", "entrypoint", "env", "hostname", "workdir", "files", "image", "shm"):
            assert _plain(getattr(one, name)) == _plain(getattr(other, name)), name
        assert not [mount.url for mount in other.mounts if not mount.url.startswith(f"{plan.store.url}/")]
        places = [(mount.path, mount.kind) for mount in one.mounts]
        assert [(m.path, m.kind) for m in other.mounts] == [*places, (DIRECT, "sync")]
    wanted = {**_plain(dataclasses.asdict(theirs.rules)), "retries": 1}
    assert _plain(dataclasses.asdict(ours.rules)) == wanted
    told = {**real.request.context, "checkpoint_url": f"file://{DIRECT}"}
    assert plan.request.context == told


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_it_goes_on_from_what_is_recorded(site: Site) -> None:
    """Its supervisor starts the next attempt the same way, with settings and layout from run.json."""
    plan = site.rehearsed(site.job(retries=1), drills=[("kill", "node=1,after=3s")])
    settings = json.loads(json.dumps(plan.document()["settings"]))
    again = find_provider("rehearsal")(**settings)  # type: ignore[call-arg]
    assert again.plan(plan.job, plan.layout).to_dict() == plan.request.to_dict()
    following = again.plan(plan.job, plan.layout, attempt=1)
    assert following.body["request"]["attempt"] == following.attempt == 1


def test_nobody_chooses_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cloudtrain rehearse SCRIPT --provider NAME"):
        Settings(provider="rehearsal").make_provider()
    assert "rehearsal" not in provider_names()
    assert not [name for name in provider_names() if name.startswith("_")]


def test_a_local_input_is_staged_here_and_a_remote_one_needs_a_stand_in(vertex: Site) -> None:
    (vertex.folder / "data").mkdir()
    (vertex.folder / "data" / "a.csv").write_text("1\n")
    job = vertex.job(inputs={"train": str(vertex.folder / "data"), "val": "gs://elsewhere/val"})
    error = vertex.refused(job)
    assert error.field == "inputs.val"
    assert "--map gs://elsewhere/val=PATH" in error.hint
    plan = vertex.rehearsed(job, maps={"gs://elsewhere": "data", "gs://elsewhere/val/": "data"})
    assert [tree.digest in plan.layout.inputs["train"].url for tree in plan.upload.trees] == [True]
    urls = {mount.url for mount in plan.provider.launch_spec(plan.request).nodes[0].mounts}
    assert (vertex.folder / "data").as_uri() in urls, "the deepest one counts"
    assert any("stands in for gs://elsewhere/val" in line for line in plan.request.body["differences"])


def test_an_input_that_the_plan_would_copy_is_not_fetched_when_something_stands_for_it(vertex: Site) -> None:
    (vertex.folder / "set.csv").write_text("1\n")
    job = vertex.job(inputs={"train": "https://example.com/a/set.csv"})
    assert vertex.rehearsed(job).layout.inputs["train"].source == "https://example.com/a/set.csv"
    plan = vertex.rehearsed(job, maps={"https://example.com/a/set.csv": "set.csv"})
    assert plan.layout.inputs["train"].source is None
    assert (vertex.folder / "set.csv").as_uri() in {m.url for n in plan.request.body["nodes"] for m in _mounts(n)}
    real = make_plan(job, settings=vertex.settings, run_id="r", cwd=vertex.folder)
    assert plan.request.body["request"] == real.request.to_dict()


def _mounts(node: Mapping[str, Any]) -> list[Mount]:
    return [Mount(**mount) for mount in node["mounts"]]


def test_whoever_nodes_run_as_may_write_where_the_platform_lets_its_own(site: Site) -> None:
    plan = site.rehearsed()
    own = dataclasses.asdict(plan.provider.settings)
    folders = ("/opt/ml", "/opt/ml/cloudtrain", "/opt/ml/output") if site.target == "sagemaker" else ()
    for user, there in (("", {}), ("7:7", dict.fromkeys(folders, "mode=1777"))):
        request = type(plan.provider)(**{**own, "user": user}).plan(plan.job, plan.layout)
        assert {spec.user for spec in plan.provider.launch_spec(request).nodes} == {user or None}
        for spec in plan.provider.launch_spec(request).nodes:
            assert spec.container.get("HostConfig", {}).get("Tmpfs", {}) == there


@pytest.mark.parametrize(
    ("fields", "given", "field", "message", "hint"),
    [
        ({}, {"store": "gs://bucket/here"}, "local_store", "folder of this machine", ""),
        ({}, {"maps": {"gs://a/b": "nowhere"}}, "map", "there is no nowhere", ""),
        (
            {"resume_from": "earlier"},
            {},
            "resume_from",
            "stands for gs://contract-bucket/store/runs/earlier",
            "--map gs://contract-bucket/store/runs/earlier/live/checkpoints=PATH",
        ),
        (
            {"inputs": {"x": "gs://contract-bucket/store/x/"}},
            {},
            "inputs.x",
            "there is no",
            "--map gs://contract-bucket/store/x/=PATH",
        ),
        ({}, {"secrets": {"TOKEN": "env:T"}}, "secret_value", "has no secret 'TOKEN'", ""),
        (
            {"secrets": {"TOKEN": "gcp:projects/p/secrets/s/versions/1"}},
            {},
            "secrets.TOKEN",
            "has no value in a rehearsal",
            "--secret-value TOKEN=",
        ),
        ({}, {"drills": [("kill", "node=2,after=3s")]}, "kill", "0 to 1", ""),
        ({}, {"drills": [("preempt", "node=1")]}, "preempt", "must be node=NUMBER,after=TIME", ""),
        ({}, {"drills": [("kill", "node=1,after=chekpoint")]}, "kill", "30s, or after=checkpoint, not", ""),
        ({}, {"provider": "local"}, "provider", "already runs on this machine", "name a cloud"),
    ],
)
def test_refusals(
    vertex: Site, fields: Mapping[str, Any], given: Mapping[str, Any], field: str, message: str, hint: str
) -> None:
    local = given.get("provider") == "local"
    job = Job.make(entry_point="train.py") if local else vertex.job(**fields)
    error = vertex.refused(job, **given)
    assert error.field == field
    assert message in error.message
    assert hint in error.hint
    assert bool(hint) == bool(error.hint)


def test_what_is_not_here_is_told(vertex: Site) -> None:
    job = vertex.job(gpu="T4:4", secrets={"TOKEN": "gcp:projects/p/secrets/s/versions/1"}, node_check=True)
    plan = vertex.rehearsed(
        job,
        image="mine:1",
        secrets={"TOKEN": "env:MINE"},
        drills=[("preempt", "node=0,after=1m")],
    )
    own = dataclasses.replace(plan.provider.settings, gpus=0, cores=2, memory=4 << 30, user="7:7")
    request = type(plan.provider)(**dataclasses.asdict(own)).plan(plan.job, plan.layout)
    (node, _) = plan.provider.launch_spec(request).nodes
    assert (node.image, node.gpus, node.cpus, node.memory, node.platform, node.user) == (
        "mine:1",
        0,
        None,
        None,
        None,
        "7:7",
    )
    said = "\n".join(request.body["differences"])
    for words in ("mine:1 stands in for", "of 8 GPUs none are here", "cores", "GiB of memory", "7:7", "spot", "TOKEN"):
        assert words in said
    assert request.body["differences"][-1] == EVERYWHERE
    assert request.context["processes"] == 4, "as many ranks as there"
    assert plan.job.secrets == {"TOKEN": "env:MINE"}
    assert request.context["secrets"] == {}
    assert request.body["request"]["context"]["secrets"] == job.secrets
    large = dataclasses.replace(own, gpus=8, cores=256, memory=1 << 45)
    has = type(plan.provider)(**dataclasses.asdict(large)).plan(plan.job, plan.layout)
    assert (has.body["nodes"][0]["gpus"], bool(has.body["nodes"][0]["cpus"])) == (4, True)
    assert [plan.context["node_check"]["gpus"] for plan in (request, has)] == [None, 4]


def test_a_rehearsal_that_an_earlier_version_recorded_still_loads(site: Site) -> None:
    plan = site.rehearsed()
    made = type(plan.provider)(**{**dataclasses.asdict(plan.provider.settings), "no_objects": "no FUSE"})
    body = {**plan.request.body, "rules": {**plan.request.body["rules"], "objects": "/gcs"}}
    assert made.launch_spec(dataclasses.replace(plan.request, body=body)) == plan.provider.launch_spec(plan.request)


def test_secrets_come_by_standard_input_alone() -> None:
    shows = "import os; print(os.environ['TOKEN'], os.getpid())"
    words = [sys.executable, "-c", SECRETS, '{"TOKEN": "MINE"}', sys.executable, "-c", shows]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate('{"MINE": "s3cret", "OTHER": "x"}\n')
    assert out.split() == ["s3cret", str(process.pid)], "and it becomes the command, which gets the signals"


# --------------------------------------------------------------------------------------------------------------- drills


def test_a_drill_reads_as_it_is_told() -> None:
    drill = Injection.parse("kill", "after=1m30s, node=1", nodes=2)
    assert drill == Injection(kind="kill", node=1, after=90.0)
    assert Injection.parse("kill", drill.words.partition(" ")[2], nodes=2) == drill
    late = Injection.parse("preempt", "node=0,after=checkpoint", nodes=1)
    assert late.words == "--preempt node=0,after=checkpoint"
    with pytest.raises(SpecError, match="must be"):
        Injection.parse("kill", "node=1,node=1,after=3s", nodes=2)
    with pytest.raises(SpecError, match="no node 7: the only node is 0"):
        Injection.parse("kill", "node=7,after=3s", nodes=1)
    with pytest.raises(SpecError, match="leaves no machine"):
        Injection.parse("shortage", "node=0,after=3s", nodes=2)


def test_drills_come_in_their_time_and_once() -> None:
    given = [Injection.parse("kill", f"node=0,after={when}", nodes=1) for when in ("9s", "2s", "checkpoint")]
    drills = InjectionPlan(json.loads(json.dumps([dataclasses.asdict(drill) for drill in given])))

    def due(seconds: float, *, saved: bool = False) -> float | str | None:
        drill = drills.due(seconds, lambda: saved)
        return None if drill is None else "checkpoint" if drill.after is None else drill.after

    assert [due(1), due(2), due(3), due(3, saved=True), due(8, saved=True), due(9)] == [
        *(None, 2.0, None, "checkpoint", None, 9.0)
    ]
    assert not drills.left


# ----------------------------------------------------------------------------------------------------- platforms' rules


class Ended:
    """A node that has ended with an exit code, or by a signal (negative)."""

    trouble = None

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def signal(self, name: str) -> None:
        """Ignore it: the container has ended."""

    def kill(self) -> None:
        """Ignore it: the container has ended."""


@pytest.mark.parametrize(
    ("target", "codes", "stopped", "lost", "state", "category", "again"),
    [
        ("sagemaker", [0, 0], "", None, "succeeded", "", ""),
        ("sagemaker", [0, 0], "preempted", None, "failed", "preempted", "preempted"),
        ("sagemaker", [1, -9], "", 1, "failed", "infra", "lost"),
        ("sagemaker", [1, 0], "", None, "failed", "infra", ""),
        ("sagemaker", [0, 0], "cancelled", None, "cancelled", "cancelled", ""),
        ("sagemaker", [0, 0], "timeout", None, "failed", "timeout", ""),
        ("vertex", [0, -9], "", None, "succeeded", "", ""),
        ("vertex", [134, 134], "preempted", None, "failed", "preempted", "preempted"),
        ("vertex", [134, -9], "", 1, "failed", "infra", "lost"),
        ("vertex", [1, -9], "", 1, "failed", "infra", ""),
        ("vertex", [-6, 134], "", None, "failed", "preempted", "codes"),
        ("vertex", [139, 1], "", None, "failed", "infra", ""),
        ("azureml", [75, 75], "preempted", None, "failed", "preempted", "preempted"),
        ("azureml", [75, 75], "", None, "failed", "infra", ""),
        ("azureml", [1, -9], "timeout", None, "failed", "timeout", ""),
    ],
)
def test_what_a_platform_makes_of_its_nodes_ends(
    tmp_path: Path, target: str, codes: list[int], stopped: str, lost: int | None, state: str, category: str, again: str
) -> None:
    supervisor, rules = supervised(Site(tmp_path, target))
    supervisor.attempts.append({"number": "0.0"})
    supervisor._lost |= {lost} if lost is not None else set()
    ended = supervisor._judge([Ended(code) for code in codes], rules, stopped, [])
    assert (*ended[:2], supervisor._again) == (state, category, again)


@pytest.mark.parametrize("stopped", ["preempted", "cancelled"])
def test_work_that_was_done_before_the_stop_is_done(tmp_path: Path, stopped: str) -> None:
    supervisor, rules = supervised(Site(tmp_path, "sagemaker"))
    record = {"attempt": "0.0", "node": 0, "decided": True, "outcome": "succeeded", "reason": "", "failure": None}
    assert supervisor._judge([Ended(0), Ended(0)], rules, stopped, [record]) == ("succeeded", "", "")
    assert not supervisor._again


@pytest.mark.parametrize(("target", "starts"), [("azureml", 1), ("vertex", 7)])
def test_it_begins_again_as_often_as_the_platform_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, starts: int
) -> None:
    supervisor, rules = supervised(Site(tmp_path, target))
    monkeypatch.setattr(CLIENT_TIMINGS, "restart", 0.0)
    simulation = supervisor.provider.launch_spec(supervisor.request)

    class Taken:
        """An engine whose platform has taken all nodes back."""

        def prepare(self, *args: Any) -> None:
            supervisor.drills = InjectionPlan([{"kind": "preempt", "node": 0, "after": 0.0}])

        def start(self, *args: Any, **named: Any) -> list[Any]:
            return [Stopping(), Stopping()]

        def remarks(self) -> str:
            return ""

    class Stopping(Ended):
        def __init__(self) -> None:
            self.told = False

        def poll(self) -> Any:
            return 134 if self.told else None

        def signal(self, name: str) -> None:
            self.told = name == rules.stop_signal

    monkeypatch.setattr(CLIENT_TIMINGS, "stop_again", 0.0)
    monkeypatch.setattr(CLIENT_TIMINGS, "node_look", 0.0)
    supervisor.engine = Taken()  # type: ignore[assignment]
    mounts = _Mounts(folder=supervisor.folder, store=supervisor.store, run_id="r")
    state, category, reason = supervisor._attempt(supervisor.request, simulation, mounts)
    assert (state, category, len(supervisor.attempts)) == ("failed", "preempted", starts)
    assert reason.endswith("6 restarts are used up") is (starts > 1)


@pytest.mark.parametrize("files", ["rank_0.pt", "model.pt"])
def test_fewer_nodes_are_asked_for_only_if_they_can_restore_the_given_checkpoint(vertex: Site, files: str) -> None:
    """A user's folder stands for the cloud's ``resume_from``, until the run has its own checkpoint."""
    (vertex.folder / "given").mkdir()
    (vertex.folder / "given" / files).write_text("x")
    (vertex.folder / "train.py").write_text("# runtime.accumulation_steps()\n")
    job = vertex.job(instance_count="1:2", resume_from="gs://other/given")
    supervisor, _ = supervised(vertex, job, maps={"gs://other": str(vertex.folder)})
    mounts = _Mounts(folder=supervisor.folder, store=supervisor.store, run_id="r")
    found = supervisor._history(mounts, "failed", "capacity", supervisor.request)
    why = "checkpoint given has files of single ranks (rank_0.pt), and does not say how many nodes wrote it"
    own = files == "rank_0.pt"
    assert (found.node_counts, found.bound) == (((2,), f"{why}, so it needs 2 nodes") if own else ((2, 1), ""))


class _Removing:
    """A store, but the script removes the file ``victim`` while it is uploaded."""

    def __init__(self, whole: Files, victim: Path) -> None:
        self._whole, self._victim = whole, victim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def upload(self, path: Path, key: str) -> None:
        if path == self._victim:
            path.unlink()
        self._whole.upload(path, key)


@pytest.mark.parametrize("disk", [False, True], ids=["objects", "disk"])
def test_an_output_that_the_script_removes_leaves_a_remote_store_too(tmp_path: Path, disk: bool) -> None:
    url = f"memory://{uuid.uuid4().hex}/store"
    mounts = _Mounts(folder=tmp_path, store=Store(url), run_id="r")
    target = files(str(tmp_path / "there") if disk else f"{url}/runs/r/live")

    def sync(*names: str) -> list[str]:
        """Let ``live`` hold these files, sync it, and return the store's outputs."""
        shutil.rmtree(mounts.live / "outputs", ignore_errors=True)
        for name in ("logs/a", *(f"outputs/node-0/{name}" for name in names)):
            (mounts.live / name).parent.mkdir(parents=True, exist_ok=True)
            (mounts.live / name).write_text(name)
        mounts._sync(target)
        return [key.removeprefix("outputs/node-0/") for key in target.list() if key != "logs/a"]

    assert sync("a", "b") == ["a", "b"]
    assert sync("a") == ["a"]
    assert sync("a/b/c", "a/d") == ["a/b/c", "a/d"]  # a file that is a folder now
    assert sync("a") == ["a"]  # and a file again
    assert sync("new") == ["new"]  # renamed
    (mounts.live / "outputs/node-0/new").write_text("changed")
    mounts._sync(_Removing(target, mounts.live / "outputs/node-0/new"))  # type: ignore[arg-type]
    assert sync("other") == ["other"]
    (mounts.live / "logs/a").unlink()
    mounts._sync(target)
    assert sorted(target.list()) == ["logs/a", "outputs/node-0/other"]  # no other kind is removed
    shutil.rmtree(mounts.live)  # a disk that is gone
    mounts._sync(target)
    assert sorted(target.list()) == ["logs/a", "outputs/node-0/other"]


def test_remote_inputs_of_any_form_are_fetched(s3_url: str, tmp_path: Path) -> None:
    source = files(s3_url)
    for key in ("a/1", "b/2", "a/3.txt", "plain"):
        source.write(key, key.encode())
    mounts = _Mounts(folder=tmp_path, store=Store(f"{s3_url}/store"), run_id="r")
    urls = [f"{s3_url}/{path}" for path in ("a/", "b/", "a", "a/3.txt", "plain")]
    local = mounts.fetch(Mount(url=url, path="x", kind="copy") for url in urls)
    found = [sorted(os.listdir(path)) if path.is_dir() else path.read_text() for path in local.values()]
    assert found == [["1", "3.txt"], ["2"], ["1", "3.txt"], "a/3.txt", "plain"]
    with pytest.raises(NodeError, match=r"there is no file at .*/nope/$") as caught:
        mounts.fetch([Mount(url=f"{s3_url}/nope/", path="x", kind="copy")])
    assert caught.value.category == "spec"


def test_a_run_that_waits_for_its_store_says_why(vertex: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, _ = supervised(vertex)
    reasons: list[str] = []
    monkeypatch.setattr("cloudtrain.engine.supervisor.time.sleep", lambda _: reasons.append(supervisor.state["reason"]))
    work = Mock(side_effect=[StorageError("no such bucket"), StorageError("no such bucket"), "done"])
    assert supervisor._patiently(work) == "done"
    assert reasons == ["no such bucket; trying again"] * 2
    supervisor.state.update(finished=1.0, reason="rank 3 failed")
    supervisor._patiently(Mock(side_effect=[StorageError("full"), None]))
    assert supervisor.state["reason"] == "rank 3 failed"
    gone = FinalError("the bucket or container does not exist")
    work = Mock(side_effect=[gone])
    with pytest.raises(FinalError):
        supervisor._patiently(work, final=True)
    work.assert_called_once()
    assert supervisor._patiently(Mock(side_effect=[gone, "sent"])) == "sent"  # a proxy without its server says so too


def two_supervisors(tmp_path: Path, store: Store, outputs: tuple[str, ...]) -> list[_Mounts]:
    """Return the files of a supervisor that has these outputs of node 0, and those of the next one."""
    made = []
    for name in ("killed", "next"):
        (tmp_path / name).mkdir()
        made.append(_Mounts(folder=tmp_path / name, store=store, run_id="r"))
    (made[0].live / "outputs/node-0").mkdir(parents=True)
    for name in outputs:
        (made[0].live / "outputs/node-0" / name).write_text(name)
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_removed_while_no_supervisor_runs_leaves_a_remote_store_too(tmp_path: Path, fails: bool) -> None:
    """The last upload before the supervisor is killed may fail."""
    target, store = files(str(tmp_path / "there")), Store(f"memory://{uuid.uuid4().hex}/store")
    killed, following = two_supervisors(tmp_path, store, outputs=("kept", "removed", "third"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError) if fails else contextlib.nullcontext():
        end = StorageError("the service does not answer") if fails else DEFAULT
        patch.setattr(target, "upload", Mock(wraps=target.upload, side_effect=[DEFAULT, DEFAULT, end]))
        killed._sync(target)
    (killed.live / "outputs/node-0/removed").unlink()
    target.write("outputs/node-0/kept", b"not sent again")
    target.write("outputs/node-1/other", b"of another machine")
    following.take_over(tmp_path / "killed")
    following._sync(target)
    assert sorted(target.list()) == ["outputs/node-0/kept", "outputs/node-0/third", "outputs/node-1/other"]
    assert target.read("outputs/node-0/kept") == b"not sent again"


def test_a_supervisor_that_is_killed_as_it_clears_its_folder_costs_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/store")
    killed, following = two_supervisors(tmp_path, store, outputs=("a", "b"))
    killed.start_syncing()

    def kill(folder: Path, **_: Any) -> None:
        (folder / "outputs/node-0/a").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            killed.stop_syncing(lambda work: work())
    following.take_over(tmp_path / "killed")
    target = files(f"{store.url}/runs/r/live")
    following._sync(target)
    assert sorted(target.list()) == ["outputs/node-0/a", "outputs/node-0/b"]


def test_a_folder_that_is_an_output_now_is_removed_after_a_failure_of_the_store(tmp_path: Path) -> None:
    mounts = _Mounts(folder=tmp_path, store=Store(f"memory://{uuid.uuid4().hex}/store"), run_id="r")
    target, place = files(str(tmp_path / "there")), mounts.live / "outputs/node-0/a"
    (place / "b").mkdir(parents=True)
    (place / "b/c").write_text("in a folder")
    mounts._sync(target)
    shutil.rmtree(place)
    place.write_text("a file")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "remove", Mock(side_effect=StorageError("the service does not answer")))
        with pytest.raises(StorageError):
            mounts._sync(target)
    mounts._sync(target)
    assert target.read("outputs/node-0/a") == b"a file"


def supervised(site: Site, job: Job | None = None, **given: Any) -> tuple[Supervisor, LaunchRules]:
    """Return the supervisor of a recorded rehearsal that has not begun, and its platform's rules."""
    plan = site.rehearsed(job, **given)
    plan.store.create_run(plan.layout, {**plan.document(), "runtime": plan.layout.runtime_digest})
    folder = site.folder / "supervisor"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(plan.request.to_dict()))
    made = Supervisor(folder=folder, engine="processes", secrets={}, environ={})
    return made, plan.provider.launch_spec(plan.request).rules


# ---------------------------------------------------------------------------------------------- folders of a node's own


@pytest.fixture
def own(tmp_path: Path) -> tuple[NodeFolders, list[Path], list[Path], Path]:
    """Return two nodes' folders that are synced with ``live``, and their files."""
    live, left, shared = (tmp_path / name for name in ("live", "left", "shared"))
    for folder in (live, left, shared):
        folder.mkdir()
        (folder / "old").write_text("1")
    urls = [folder.as_uri() for folder in (live, left, shared)]
    mounts = [Mount(url=url, path=f"/{n}", kind="sync") for n, url in enumerate(urls)]
    node = NodeSpec(command=["x"], mounts=[*mounts, Mount(url=urls[0], path="/ro", kind="mount")])
    folders = NodeFolders(tmp_path / "own", live=urls[0], shared=urls[2], lag=0.0)
    simulation = LaunchSpec(nodes=[node, node], rules=LaunchRules(time_limit=1, sync_lag=0.0))
    wired, local = folders.wired(simulation, dict(zip(urls, (live, left, shared), strict=True)))
    lives, lefts, shares, reads = zip(*([local[m.url] for m in n.mounts] for n in wired.nodes), strict=True)
    assert set(shares) == {shared}
    assert set(reads) == {live}
    return folders, list(lives), list(lefts), live


def test_each_node_has_its_own_copy_and_peers_do_not_show(
    own: tuple[NodeFolders, list[Path], list[Path], Path], tmp_path: Path
) -> None:
    folders, (zero, one), (left, _), live = own
    assert (zero / "old").read_text() == (one / "old").read_text() == "1"
    assert not (left / "old").exists(), "restored here, but not in the cloud"
    folders.start()
    (zero / "deep").mkdir()
    (zero / "deep" / "new").write_text("2")
    (left / "model").write_text("3")
    os.mkfifo(zero / "a-pipe")  # of a user's debugger: no store can hold it
    Jobs.wait_for(lambda: (live / "deep" / "new").exists(), 10)
    assert not (one / "deep").exists()
    (zero / "deep" / "new").unlink()
    Jobs.wait_for(lambda: not (live / "deep").exists(), 10)
    assert not (tmp_path / "left" / "model").exists(), "that goes up in the end"
    folders.finish(outputs=True)
    assert (tmp_path / "left" / "model").read_text() == "3"
    assert not (tmp_path / "own").exists()


def test_a_log_on_a_full_disk_does_not_end_the_sync(
    own: tuple[NodeFolders, list[Path], list[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the thread after a failure that it cannot log: the log is on the same disk."""
    folders, (zero, _), _, live = own
    step, failures = folders._step, [OSError("No space left on device")]

    def fail_once(**how: bool) -> None:
        if failures:
            raise failures.pop()
        step(**how)

    monkeypatch.setattr(folders, "_step", fail_once)
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115  closing it fails
    monkeypatch.setattr(sys, "stderr", SupervisorLog(full))
    (zero / "new").write_text("2")
    folders.start()
    Jobs.wait_for(lambda: (live / "new").exists(), 10)
    folders.finish(outputs=False)
    assert failures == []
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_what_a_lost_machine_had_not_sent_is_gone(
    own: tuple[NodeFolders, list[Path], list[Path], Path], tmp_path: Path
) -> None:
    folders, (zero, one), (left, _), live = own
    folders.lose(1)
    for folder, text in ((zero, "0"), (one, "1")):
        (folder / f"of-{text}").write_text(text)
    (left / "model").write_text("3")
    folders.finish(outputs=False)
    assert sorted(path.name for path in live.iterdir()) == ["of-0", "old"]
    assert [path.name for path in (tmp_path / "left").iterdir()] == ["old"]


def test_the_deepest_place_counts() -> None:
    places = {"s3://b": "file:///all", "s3://b/data/": "file:///data"}
    assert stand_in_for("s3://b/data/x", places) == "file:///data/x"
    assert stand_in_for("s3://b/database", places) == "file:///all/database"
    with pytest.raises(SpecError, match="s3://bb/x=PATH"):
        stand_in_for("s3://bb/x", places)


# ----------------------------------------------------------------------------------------------------- whole rehearsals

TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

alone = "--alone" in sys.argv
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # or it would have all of the grace
rank, world, first = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["CLOUDTRAIN_ATTEMPT"] == "0.0"
if not alone:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weight = torch.zeros(2, requires_grad=True)
resumed = os.environ["CLOUDTRAIN_RESUME_FROM"]
step = int(Path(resumed, "step").read_text()) if resumed else 0
deadline = time.monotonic() + 120
while step < 12 or (first and "--held" in sys.argv):
    assert time.monotonic() < deadline, "nobody has ended it"
    step += 1
    loss = 1 / step
    if not alone:
        loss = ((weight - torch.tensor([1.0, float(rank)])) ** 2).sum()
        loss.backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 0.1 * weight.grad / world
            weight.grad.zero_()
    if rank == 0:
        with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as out:
            out.write(json.dumps({"step": step, "epoch": 0, "time": time.time(), "loss": float(loss)}) + "\\n")
    if rank == 0 and step == 10:
        folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step-10")
        folder.mkdir()
        (folder / "step").write_text(str(step))
    time.sleep(0.05)
known = ("SM_", "AIP_", "AZUREML_", "CLUSTER_", "NODE", "MASTER_", "CLOUDTRAIN_", "TOKEN")
seen = {name: value for name, value in os.environ.items() if name.startswith(known)}
print("the token is", os.environ.get("TOKEN"), flush=True)
seen |= {"world": world, "data": Path(os.environ["CLOUDTRAIN_INPUT_TRAIN"], "rows").read_text()}
if "SM_MODEL_DIR" in os.environ:
    Path(os.environ["SM_MODEL_DIR"], f"model-{rank}").write_text("weights")
Path(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], f"seen-{rank}.json").write_text(json.dumps(seen))
if not alone:
    dist.destroy_process_group()
"""


class Rehearsals:
    """The command line on a test's image, with data that stands for the cloud's."""

    def __init__(self, jobs: Jobs, image: str) -> None:
        self.jobs, self.image = jobs, image
        jobs.write("train.py", TRAIN)
        (jobs.tmp / "rows").mkdir()
        (jobs.tmp / "rows" / "rows").write_text("1 2 3")

    def run(self, target: str, *flags: str, data: str, **environ: str) -> Done:
        words = ["--nodes", "2", "--input", f"train={data}", "--map", f"{data}={self.jobs.tmp / 'rows'}"]
        return self.script("train.py", target, *words, *flags, **environ)

    def script(self, script: str, target: str, *flags: str, **environ: str) -> Done:
        sample = importlib.import_module(f"cloudtrain.providers.{target}").SAMPLE
        words = ["--provider", target, "--store", sample.get("store", str(self.jobs.tmp / "shared")), "--run-id", "r"]
        words += ["--local-image", self.image, "--local-store", str(self.jobs.store), "--max-runtime", "10m", "--json"]
        for name, value in sample.get("job", {}).items():
            words += [f"--{name}", value]
        for name, value in sample["settings"].items():
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return self.jobs.cli("rehearse", script, *words, *flags, timeout=240, **environ)

    def seen(self, rank: int) -> dict[str, Any]:
        (path,) = (self.jobs.store / "runs" / "r" / "live" / "artifacts").rglob(f"seen-{rank}.json")
        context: dict[str, Any] = json.loads(path.read_text())
        assert (context["world"], context["data"]) == (2, "1 2 3")
        assert not [name for name in context if name.startswith("CLOUDTRAIN_ENGINE")]
        return context


@pytest.fixture
def rehearsals(
    tmp_path: Path, images: Callable[[str], str], nothing_left: None, request: pytest.FixtureRequest
) -> Iterator[Rehearsals]:
    jobs = Jobs(tmp_path)
    yield Rehearsals(jobs, images(getattr(request, "param", "torch")))
    jobs.close()


def _attempts(result: Mapping[str, Any]) -> list[tuple[str, str | None, str, bool]]:
    """Return each attempt's number, category, checkpoint, and True if it lost work."""
    return [(a["number"], a["category"], a["resumed_from"], a["lost"] is not None) for a in result["attempts"]]


@pytest.fixture
def hook() -> Iterator[Hook]:
    """Yield a webhook at an address of this machine that every container can reach."""
    (bridge,) = connect().inspect_network("bridge")["IPAM"]["Config"]
    with Hook(address_towards(str(ipaddress.ip_network(bridge["Subnet"])[-2]))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("rehearsals", ["py313", pytest.param("torch", marks=pytest.mark.proof)], indirect=True)
def test_sagemaker_loses_a_machine(rehearsals: Rehearsals, hook: Hook) -> None:
    """Each node has its own copy of the checkpoints, which the service's restart downloads again. Node 0 posts the end
    of each start to the webhook."""
    flags = ["--webhook", hook.url, "--kill", "node=1,after=checkpoint", "--", "--held"]
    if not rehearsals.image.endswith(":torch"):  # importing torch takes both cores for seconds, in each of four starts
        flags = ["--launcher", "python", *flags, "--alone"]
    done = rehearsals.run("sagemaker", *flags, data="s3://data-bucket/rows/")
    assert done.code == 0, done.err
    assert _attempts(done.json) == [("0.0", "infra", "", True), ("0.1", None, "step-10", False)]
    assert "node 1 was lost" in done.json["attempts"][0]["reason"]
    posts = [(body["attempt"], body["state"], body["over"]) for _, _, body in hook.posts]
    assert posts == [("0.0", "failed", False), ("0.1", "succeeded", True)]
    assert done.json["provider"] == "rehearsal"
    hosts = [rehearsals.seen(rank)["SM_CURRENT_HOST"] for rank in (0, 1)]
    assert hosts == ["algo-1", "algo-2"]
    assert rehearsals.seen(0)["SM_CHANNEL_TRAIN"] == "/opt/ml/input/data/train"
    run = rehearsals.jobs.store / "runs" / "r"
    models = [path.relative_to(run / "native").as_posix() for path in sorted((run / "native").rglob("model-*"))]
    assert [path.partition("/")[2] for path in models] == ["output/model/model-0", "output/model/model-1"]
    assert not (run / "supervisor" / "folders").exists()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "azureml",
        "vertex",
        *(pytest.param(name, marks=pytest.mark.proof) for name in ("kubernetes", "modelarts", "slurm")),
    ],
)
@pytest.mark.parametrize("rehearsals", ["py313"], indirect=True)
def test_node_0_posts_both_ends_on_each_other_platform(rehearsals: Rehearsals, hook: Hook, target: str) -> None:
    rehearsals.jobs.write("once.py", "import os\nraise SystemExit(os.environ['CLOUDTRAIN_ATTEMPT'] == '0.0')\n")
    flags = ["--launcher", "python", "--retries", "1", "--webhook", hook.url]
    done = rehearsals.script("once.py", target, *flags)
    assert done.code == 0, done.err
    ends = [(body["provider"], body["state"], body["category"], body["over"]) for _, _, body in hook.posts]
    assert ends == [(target, "failed", "user_error", False), (target, "succeeded", None, True)]
    assert [body["attempt"] for _, _, body in hook.posts] == [row["number"] for row in done.json["attempts"]]


@pytest.mark.docker
@pytest.mark.proof
def test_vertex_takes_a_machine_back(rehearsals: Rehearsals) -> None:
    secret = "gcp:projects/contract/secrets/contract/versions/1"
    done = rehearsals.run(
        *("vertex", "--spot", "--preempt", "node=1,after=checkpoint", "--secret", f"TOKEN={secret}"),
        *("--secret-value", "TOKEN=env:MINE", "--", "--held"),
        data="gs://data-bucket/rows",
        MINE="s3cret-value",
    )
    assert done.code == 0, done.err
    assert _attempts(done.json) == [("0.0", "preempted", "", True), ("0.1", None, "step-10", False)]
    lost = done.json["attempts"][0]["lost"]
    assert lost["steps"] > 0
    assert lost["seconds"] > 0
    seen = rehearsals.seen(1)
    assert json.loads(seen["CLUSTER_SPEC"])["task"] == {"type": "workerpool1", "index": 0}
    assert seen["AIP_MODEL_DIR"].startswith("gs://contract-bucket/store/runs/r/native/")
    assert seen["TOKEN"] == "s3cret-value"
    kept = [
        path for path in rehearsals.jobs.store.rglob("*") if path.is_file() and b"s3cret-value" in path.read_bytes()
    ]
    assert {path.name for path in kept} == {"seen-0.json", "seen-1.json"}
    assert "the token is ***TOKEN***" in done.err
    assert "stands in for" in done.err


@pytest.mark.docker
@pytest.mark.proof
def test_azureml_takes_a_machine_back_and_a_waiting_client_goes_on(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test it from Python."""
    sample = importlib.import_module("cloudtrain.providers.azureml").SAMPLE
    monkeypatch.chdir(rehearsals.jobs.code)
    data = "abfs://data@contractstore.dfs.core.windows.net/rows"
    estimator = Estimator(
        entry_point="train.py",
        args=["--held"],
        instance_count=2,
        spot=True,
        retries=1,
        max_runtime="10m",
        provider="azureml",
        store=sample["store"],
        settings=sample["settings"],
        **sample["job"],
    )
    run = estimator.rehearse(
        data,
        preempt="node=0,after=checkpoint",
        maps={data: str(rehearsals.jobs.tmp / "rows")},
        local_image=rehearsals.image,
        local_store=str(rehearsals.jobs.store),
        logs=False,
        run_id="r",
    )
    assert run is estimator.latest_run
    assert _attempts(run.result()) == [("0.0", "preempted", "", True), ("1.0", None, "step-10", False)]
    seen = rehearsals.seen(1)
    assert (seen["NODE_RANK"], seen["MASTER_ADDR"]) == ("1", "node-0")
    assert seen["AZUREML_RUN_ID"]
    recorded = run.store.attempt_request("r", 1)
    assert recorded is not None
    assert recorded.body["request"]["provider"] == "azureml"
