"""Provider ``kubernetes`` with ``kind = "jobset"``: the manifest, and clusters with and without JobSet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from doctor_runs import Examiner
from jobs import Jobs
from worlds.kubernetes.cluster import Refusal
from worlds.kubernetes.strict import check_jobset
from worlds.kubernetes.world import KubernetesWorld, idle

from cloudtrain.errors import ConflictError, NotFoundError, SpecError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.providers.kubernetes import Provider
from cloudtrain.providers.kubernetes.request import QUEUE, job_object

pytestmark = [pytest.mark.remote]

OWN: Mapping[str, Any] = {"namespace": "team", "claim": "training", "root": "/srv"}
IMAGE = ["--image", "registry.example/team/none:1"]


def planned(
    run_id: str = "20261126-x", attempt: int = 0, *, kind: str = "jobset", own: Mapping[str, Any] = {}, **job: Any
) -> Request:
    layout = Layout(store="file:///srv/s", run_id=run_id, code_digest="c", runtime_digest="d")
    fields = {"entry_point": "train.py", "name": "x", "image": "team/image:1", "instance_count": 2, **job}
    return Provider(**{**OWN, "kind": kind, **own}).plan(Job.make(**fields), layout, attempt)


@pytest.fixture
def world(
    tmp_path_factory: pytest.TempPathFactory, examiner: Examiner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesWorld]:
    with idle(tmp_path_factory.mktemp("world"), monkeypatch, kind="jobset") as found:
        examiner.settings("kubernetes", found.store, found.settings)
        yield found


def two(world: KubernetesWorld) -> Request:
    made: Request = world.plan({"instance_count": 2}).request
    return made


# -------------------------------------------------------------------------------------------------------- the manifest


def test_a_jobset_holds_the_same_job() -> None:
    plain, (made,) = planned(kind="job"), planned().body["items"]
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, own = job_object(planned()), job_object(plain)
    network = made["spec"]["network"]
    assert network["subdomain"] == plain.body["items"][1]["metadata"]["name"]
    assert network["publishNotReadyAddresses"] is network["enableDNSHostnames"] is True
    assert made["spec"]["ttlSecondsAfterFinished"] == own["spec"]["ttlSecondsAfterFinished"]
    assert "failurePolicy" not in made["spec"], "a failurePolicy would start a failed Job again"
    differing = {key for key in own["spec"] if own["spec"][key] != job["spec"].get(key)}
    assert differing == {"ttlSecondsAfterFinished", "template"}
    pod, known = job["spec"]["template"]["spec"], own["spec"]["template"]["spec"]
    assert {key for key in known if known[key] != pod[key]} == {"containers"}
    env = {item["name"]: item.get("value", "node-a") for item in pod["containers"][0]["env"]}
    assert env["CLOUDTRAIN_KUBERNETES_HOST"] == f"{job['metadata']['name']}-0.{network['subdomain']}"


@pytest.mark.parametrize("run_id", ["1", "20261126-" + "x" * 50, "a" * 60])
@pytest.mark.parametrize("nodes", [1, 2, 4096])
def test_the_webhook_accepts_the_names(run_id: str, nodes: int) -> None:
    request = planned(run_id, 11, instance_count=nodes)
    assert job_object(request)["metadata"]["name"] == check_jobset(request.body["items"][0])["metadata"]["name"]


def test_the_fake_refuses_what_the_webhook_refuses() -> None:
    (made,) = planned().body["items"]
    for field in ("name", "network"):
        wrong = {**made, "metadata": {**made["metadata"], "name": "1-x"}, "spec": {**made["spec"]}}
        if field == "network":
            wrong = {**made, "spec": {**made["spec"], "network": {**made["spec"]["network"], "subdomain": "1x"}}}
        with pytest.raises(Refusal, match="is invalid"):
            check_jobset(wrong)
    with pytest.raises(Refusal, match="unknown field"):
        check_jobset({**made, "spec": {**made["spec"], "backoffLimit": 3}})


def test_a_queue_holds_the_jobset_and_not_its_job() -> None:
    request = planned(own={"queue": "research"})
    assert request.body["items"][0]["metadata"]["labels"][QUEUE] == "research"
    assert QUEUE not in job_object(request)["metadata"]["labels"]


def test_options_name_the_fields_of_the_job() -> None:
    options = {"kubernetes": {"items": {"0": {"spec": {"template": {"spec": {"priority": 10}}}}}}}
    assert job_object(planned(options=options))["spec"]["template"]["spec"]["priority"] == 10


def test_a_trainjob_is_refused_with_its_reason() -> None:
    with pytest.raises(SpecError, match="runtime object of the cluster") as caught:
        planned(kind="trainjob")
    assert caught.value.field == "kubernetes.kind"
    assert "jobset" in caught.value.with_hint()
    with pytest.raises(SpecError, match=r"kubernetes\.kind"):
        planned(kind="jobsets")


# --------------------------------------------------------------------------------------------------------- the cluster


def test_a_jobset_that_has_no_job_yet_waits(world: KubernetesWorld) -> None:
    native = world.provider.submit(two(world))
    assert world.plane.jobs == {}
    assert world.provider.status(native).state == "pending"
    assert world.provider.logs(native).lines == ()
    assert world.provider.find(two(world)) == native == world.provider.submit(two(world))
    time.sleep(0.4)
    assert world.provider.status(native).state == "pending"
    assert [f"{namespace}/{name}" for namespace, name in world.plane.jobs] == [native]


def test_a_jobset_is_cancelled_by_its_job(world: KubernetesWorld) -> None:
    native = world.provider.submit(two(world))
    time.sleep(0.4)
    assert world.provider.status(native).reason != "stopping"
    world.provider.cancel(native)
    world.plane.jobs["team", native.partition("/")[2]].wait()
    assert world.provider.status(native).state == "cancelled"
    assert world.provider.find(two(world)) == native


@pytest.mark.parametrize("controller", [None, True], ids=["that does nothing", "that is slow"])
def test_a_jobset_that_has_no_job_is_cancelled(world: KubernetesWorld, controller: bool | None) -> None:
    """Check that its Job is created suspended, or is suspended if it came meanwhile. Neither has pods."""
    world.plane.jobset, world.plane.no_capacity = controller, False
    native = world.provider.submit(two(world))
    for _ in range(2):
        world.provider.cancel(native)
        assert (world.provider.status(native).state, world.provider.find(two(world))) == ("cancelled", native)
    world.plane.jobset = True
    time.sleep(0.4)
    for _ in range(2):
        assert world.provider.status(native).state == "cancelled"
        world.provider.cancel(native)
    (job,) = world.plane.jobs.values()
    assert (job.pods, job.made["spec"]["suspend"]) == ([], True)
    assert [(item.kind, item.run) for item in world.provider.objects()] == [("jobset", two(world).run)]


def test_a_job_that_is_made_while_its_jobset_is_cancelled_loses_its_pods(
    world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = world.provider.submit(two(world))
    call = world.provider.account.call

    def late(method: str, path: str, **more: Any) -> Any:
        if method == "PATCH" and "/jobsets/" in path:
            time.sleep(0.4)
            world.plane.handle("GET", "/version", {}, None)  # its controller acts at any call
            Jobs.wait_for(lambda: [pod for job in world.plane.jobs.values() for pod in job.pods])
        return call(method, path, **more)

    monkeypatch.setattr(world.provider.account, "call", late)
    world.provider.cancel(native)
    (job,) = world.plane.jobs.values()
    Jobs.wait_for(lambda: not job.pods)
    assert world.provider.status(native).state == "cancelled"


def test_a_jobset_of_another_request_is_not_adopted(world: KubernetesWorld) -> None:
    other = world.plan({"instance_count": 2, "memory_gb": 2}).request
    world.provider.submit(two(world))
    assert world.provider.find(other) is None
    with pytest.raises(ConflictError, match="JobSet team/ct-"):
        world.provider.submit(other)


def test_a_cluster_without_jobset(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.jobset = False
    with pytest.raises(SpecError, match="has no JobSet") as caught:
        world.provider.submit(two(world))
    assert caught.value.field == "kubernetes.kind"
    examiner(*IMAGE).failure("jobset", "the cluster has no JobSet", fix="jobset.sigs.k8s.io", code=2)


def test_a_namespace_that_is_missing_is_not_a_missing_jobset(world: KubernetesWorld) -> None:
    settings = {**world.settings, "namespace": "other"}
    with pytest.raises(NotFoundError, match="namespaces"):
        Provider(**settings).submit(two_in(world, settings))


def two_in(world: KubernetesWorld, settings: Mapping[str, Any]) -> Request:
    layout = Layout(store=world.store, run_id="r", code_digest="c", runtime_digest="d")
    fields = {"entry_point": "train.py", "name": "x", "image": "team/none:1"}
    return Provider(**settings).plan(Job.make(**fields), layout)


def test_all_is_well(world: KubernetesWorld, examiner: Examiner) -> None:
    found = examiner(*IMAGE)
    assert {row["status"] for row in found.rows.values()} <= {"ok", "skipped"}, found.rows
    assert "takes the JobSet" in found.rows["request"]["detail"]
    assert [kind for kind, _, _ in world.plane.objects if kind == "jobsets"] == [], "doctor must create nothing"


def test_a_right_that_is_missing(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.denied |= {"create jobsets"}
    examiner(*IMAGE).failure("rights", "may not create jobsets", fix="Role", code=3)
