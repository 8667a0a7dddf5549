"""The fake cluster compared with a real 1.36.2: its answers to 67 Jobs, and its Jobs and pods in each scene.

tests/data/kubernetes-answers.json has a Job, a change of it for each case, and the answer's HTTP status and message,
cut to 300 characters. tests/data/kubernetes-scenes.json has the scenes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import PATIENCE
from jobs import Jobs
from rows import for_each
from worlds.kubernetes.life import Job
from worlds.kubernetes.strict import Refusal, check_job
from worlds.kubernetes.world import KubernetesWorld

from cloudtrain.providers.kubernetes.api import Account

DATA = Path(__file__).parents[1] / "data"
ANSWERS = json.loads((DATA / "kubernetes-answers.json").read_text())
SCENES = json.loads((DATA / "kubernetes-scenes.json").read_text())


def changed(case: str) -> dict[str, Any]:
    """Return the Job of a case."""
    job: dict[str, Any] = copy.deepcopy(ANSWERS["base"])
    for path, value in ANSWERS["cases"][case]["set"]:
        at: Any = job
        for key in path[:-1]:
            at = at[key]
        if value is None:
            del at[path[-1]]
        else:
            at[path[-1]] = value
    if case == "annotation 262144":
        job["metadata"]["annotations"] = {"x": "a" * 262144}
    return job


@for_each("case", ANSWERS["cases"])
def test_the_answer_to_a_job(case: str) -> None:
    try:
        check_job(changed(case))
        found = (201, "")
    except Refusal as exc:
        found = (exc.status, exc.message[:300])
    assert found == (ANSWERS["cases"][case]["code"], ANSWERS["cases"][case]["message"])


@pytest.mark.costly
def test_a_field_that_is_not_known_is_dropped_without_strictness() -> None:
    check_job(changed("unknown field in Job"), strict=False)


# -------------------------------------------------------------------------------------------------------------- scenes

HOLD = """
import os, signal, sys, time
def stop(*_):
    print("got SIGTERM", flush=True)
    time.sleep(3)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("start", os.environ["JOB_COMPLETION_INDEX"], flush=True)
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("start", flush=True)
time.sleep(600)
"""
FAIL = """
import os, sys, time
time.sleep(1)
sys.exit("ValueError: bad") if os.environ["JOB_COMPLETION_INDEX"] == "1" else time.sleep(600)
"""
MEMORY = "found = bytearray(2 << 30)"


def comparable(job: Any, pods: Any) -> dict[str, Any]:
    """Return the fields of a Job and its pods that two clusters share, with names and numbers made equal."""

    def alike(text: Any) -> str:
        text = re.sub(r"\S*sc-\w+-(\d)-[a-z0-9]{5}", r"POD-\1", str(text or ""))
        return re.sub(r"(ErrImagePull: failed to pull).*", r"\1", re.sub(r'image "[^"]+"', "image", text))

    def condition(item: Any) -> tuple[str, ...]:
        return tuple(alike(item.get(name)) for name in ("type", "status", "reason", "message"))

    def state(pod: Any) -> list[tuple[str, Any, Any]]:
        found = []
        for item in pod["status"].get("containerStatuses") or ():
            ((kind, rest),) = item["state"].items()
            message = "" if kind == "terminated" else alike(rest.get("message"))
            began = rest.get("startedAt") == "1970-01-01T00:00:00Z"
            found.append((kind, (rest.get("reason"), rest.get("exitCode"), began), message))
        return found

    return {
        "marks": sorted(job["metadata"].get("annotations") or {}),
        "conditions": [condition(item) for item in job["status"].get("conditions") or ()],
        "started": bool(job["status"].get("startTime")),
        "completed": bool(job["status"].get("completionTime")),
        "pods": [
            {
                "index": pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"],
                "counts": sorted(item for item in pod["metadata"]["annotations"].items() if "batch" in item[0]),
                "deleted": bool(pod["metadata"].get("deletionTimestamp")),
                "machine": bool(pod["spec"].get("nodeName")),
                "status": [alike(pod["status"].get(name)) for name in ("phase", "reason", "message")],
                "conditions": sorted(condition(item) for item in pod["status"].get("conditions") or ()),
                "containers": state(pod),
            }
            for pod in pods
        ],
    }


@pytest.fixture(scope="module")
def world(kubernetes: Any) -> Iterator[KubernetesWorld]:
    with kubernetes("py313") as found:
        yield found


class Stage:
    """A Job of the fake cluster, made by hand like the recorded ones, and read over the wire."""

    def __init__(self, world: KubernetesWorld, name: str, program: str, *, nodes: int = 1, **change: Any) -> None:
        self.world, self.name = world, f"sc-{name}"
        made = copy.deepcopy(ANSWERS["base"])
        made["metadata"] = {"name": self.name, "namespace": "team", "labels": {}, "annotations": {}}
        made["spec"] |= {"completions": nodes, "parallelism": nodes, **change.pop("spec", {})}
        template = made["spec"]["template"]
        template["metadata"] = {"labels": {}}
        template["spec"] |= {"terminationGracePeriodSeconds": 20, **change.pop("pod", {})}
        container = template["spec"]["containers"][0]
        container |= {"image": world.image, "command": ["python3", "-c"], "args": [program]}
        container |= {"resources": {"limits": {"memory": "1G"}}, **change}
        provider: Any = world.provider
        self.account: Account = provider.account
        path = "/apis/batch/v1/namespaces/team/jobs"
        self.account.call("POST", path, what="create", body=made, fieldValidation="Strict")
        self.job: Job = world.plane.jobs["team", self.name]

    def comparable(self) -> dict[str, Any]:
        return comparable(*self.account.describe(f"team/{self.name}"))

    def await_scene(self, scene: str) -> None:
        """Wait until the Job and its pods are as in the scene."""
        wanted = comparable(SCENES[scene]["job"], SCENES[scene]["pods"])
        newest: list[Any] = []

        def there() -> bool:
            newest[:] = [self.comparable()]
            return bool(newest[0] == wanted)

        with contextlib.suppress(AssertionError):
            Jobs.wait_for(there, 30)
        assert newest[0] == wanted

    def until(self, text: str, nodes: int = 1) -> None:
        Jobs.wait_for(lambda: self.job.printed().count(text) >= nodes, PATIENCE)

    def cancel(self) -> None:
        self.world.provider.cancel(f"team/{self.name}")


@pytest.mark.worlds
@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
class TestScenes:
    def test_success(self, world: KubernetesWorld) -> None:
        Stage(world, "ok", "import time; time.sleep(1)", nodes=2).await_scene("ok")

    def test_a_failed_script_ends_the_other_pod(self, world: KubernetesWorld) -> None:
        Stage(world, "fail", FAIL, nodes=2, pod={"terminationGracePeriodSeconds": 2}).await_scene("fail")

    def test_too_much_memory(self, world: KubernetesWorld) -> None:
        Stage(world, "oom", MEMORY, resources={"limits": {"memory": "1G"}}).await_scene("oom")

    def test_a_shell_without_the_program(self, world: KubernetesWorld) -> None:
        Stage(world, "127", "exec nonsuch", command=["sh", "-c"]).await_scene("127")

    def test_a_missing_program(self, world: KubernetesWorld) -> None:
        Stage(world, "noexec", "", command=["/nonsuch"]).await_scene("noexec")

    def test_a_missing_image(self, world: KubernetesWorld) -> None:
        stage = Stage(world, "img", "", image="registry.invalid/none:1")
        stage.await_scene("img")
        stage.cancel()

    def test_no_machine(self, world: KubernetesWorld) -> None:
        world.plane.no_capacity = True
        try:
            stage = Stage(world, "gpu", "")
            stage.await_scene("gpu")
        finally:
            world.plane.no_capacity = False
        stage.job.wait()

    def test_a_quota(self, world: KubernetesWorld) -> None:
        world.plane.quota = True
        try:
            stage = Stage(world, "quota", "")
            Jobs.wait_for(lambda: bool(world.plane.events), 10)
            stage.await_scene("quota")
            events = stage.account.events("Job", stage.account.job("team/sc-quota"), ["FailedCreate"])
        finally:
            world.plane.quota = False
        stage.job.wait()
        messages = {re.sub(r"sc-quota-0-\w{5}", "POD", str(event["message"])) for event in events}
        wanted = {re.sub(r"sc-quota-0-\w{5}", "POD", str(event["message"])) for event in SCENES["quota"]["events"]}
        assert messages == wanted
        assert {event["reason"] for event in events} == {event["reason"] for event in SCENES["quota"]["events"]}

    def test_a_deadline_deletes_the_pods(self, world: KubernetesWorld) -> None:
        Stage(world, "dead", HOLD, spec={"activeDeadlineSeconds": 4}).await_scene("dead")

    def test_a_missing_volume(self, world: KubernetesWorld) -> None:
        volume = {"name": "secrets", "secret": {"secretName": "none"}}
        volumes = [*ANSWERS["base"]["spec"]["template"]["spec"]["volumes"], volume]
        stage = Stage(world, "cm", "", pod={"volumes": volumes})
        stage.await_scene("cm")
        stage.cancel()

    def test_an_eviction_starts_that_index_alone_again(self, world: KubernetesWorld) -> None:
        """Check that the other pod continues: a node may start again while its peer still saves."""
        stage = Stage(world, "evict", HOLD, nodes=2)
        stage.until("start", 2)
        stage.await_scene("evict running")
        stage.job.evict(1)
        stage.await_scene("evict terminating")
        stage.await_scene("evict again")
        stage.until("start", 3)
        stage.await_scene("evict restarted")
        stage.cancel()

    def test_a_cancel(self, world: KubernetesWorld) -> None:
        stage = Stage(world, "can", HOLD, nodes=2)
        stage.until("start", 2)
        stage.await_scene("cancel running")
        stage.cancel()
        stage.await_scene("cancel stopping")
        stage.await_scene("cancel pods over")
        stage.await_scene("cancel ended")

    def test_a_cancelled_pod_that_stops_late_is_deleted(self, world: KubernetesWorld) -> None:
        """Check that the Job's deadline passes while the pod stops. No recording: from the Job controller's source."""
        stage = Stage(world, "deaf", DEAF, pod={"terminationGracePeriodSeconds": 10})
        stage.until("start")
        stage.cancel()
        stage.job.wait()
        assert stage.comparable()["pods"] == []
        assert world.provider.status("team/sc-deaf").state == "cancelled"
