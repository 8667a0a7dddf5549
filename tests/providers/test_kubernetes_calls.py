"""Provider ``kubernetes`` and an unreliable cluster: lost answers, half-made jobs, two clients, few rights."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_runs import Examiner
from servers import certificates
from websocket import WebSocketConnectionClosedException
from worlds.base import Fault
from worlds.kubernetes.cluster import Refusal
from worlds.kubernetes.world import KubernetesWorld, idle

from cloudtrain.errors import (
    AuthError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
)
from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.kubernetes import shell
from cloudtrain.providers.kubernetes.api import ExistsError, error_of

pytestmark = [pytest.mark.remote]

TWO = {"instance_count": 2, "secrets": {"TOKEN": "env:TOKEN"}}
VALUES = {"TOKEN": "geheim"}
DOWN = Refusal(503, "ServiceUnavailable", "the server is currently unable to handle the request")
IMAGE = ["--image", "registry.example/team/none:1"]


@pytest.fixture
def world(
    tmp_path_factory: pytest.TempPathFactory, examiner: Examiner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesWorld]:
    """Give a cluster that starts no container, with its settings in the examiner's folder."""
    with idle(tmp_path_factory.mktemp("world"), monkeypatch) as found:
        examiner.settings("kubernetes", found.store, found.settings)
        yield found


def two(world: KubernetesWorld, **more: Any) -> Request:
    """Return the request of a two-node job with a secret: a Job, a Service and a Secret."""
    made: Request = world.plan(TWO, more).request
    return made


def again(world: KubernetesWorld, **settings: Any) -> Any:
    """Return another client."""
    return find_provider("kubernetes")(**{**dataclasses.asdict(world.provider.settings), **settings})


def test_no_shell_without_a_running_pod(world: KubernetesWorld) -> None:
    request = two(world)
    native = world.provider.submit(request, VALUES)
    with pytest.raises(SpecError, match="no running pod now"):
        world.provider.shell(request, native, 1, [], tty=True)


@pytest.mark.parametrize(
    ("denied", "message", "code"),
    [(False, "error: open a shell: Handshake status 404", 2), (True, "error: open a shell: Handshake status 403", 3)],
)
def test_a_shell_that_is_refused_is_one_line(
    world: KubernetesWorld, capsys: pytest.CaptureFixture[str], denied: bool, message: str, code: int
) -> None:
    if denied:
        world.plane.wire.faults.append(Fault("GET pods/exec", error=Refusal(403, "Forbidden", "you may not exec")))
    own = {name: getattr(world.provider.settings, name) for name in ("kubeconfig", "context", "namespace")}
    assert shell.main(json.dumps({"settings": own, "pod": "gone", "tty": False}), "true") == code
    assert capsys.readouterr().err.startswith(message)


def test_a_shell_whose_connection_is_cut_is_one_line(
    world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = socket.socketpair()
    link = SimpleNamespace(sock=SimpleNamespace(sock=ours), is_open=lambda: True, read_channel=lambda channel: b"")

    def cut(timeout: float) -> None:
        raise WebSocketConnectionClosedException("it is cut")

    link.update = cut
    link.close_channel = link.write_channel = lambda *_: None
    monkeypatch.setattr(shell.Account, "exec", lambda *_, **__: link)
    wanted = {"settings": {"namespace": "team"}, "pod": "x", "tty": False}
    with ours, theirs, open(os.devnull) as nothing:
        monkeypatch.setattr(shell, "STDIN", nothing.fileno())
        assert shell.main(json.dumps(wanted), "true") == 7
    assert capsys.readouterr().err == "error: the shell ended: the connection was lost\n"


def kinds(world: KubernetesWorld) -> list[str]:
    """Return the kinds of the cluster's objects, with its Jobs."""
    return sorted(["jobs"] * len(world.plane.jobs) + [kind for kind, _, _ in world.plane.objects if kind[0] == "s"])


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("status", "reason", "message", "expected"),
    [
        (401, "Unauthorized", "Unauthorized", AuthError),
        (403, "Forbidden", 'jobs.batch is forbidden: User "me" cannot create resource "jobs"', AuthError),
        (403, "Forbidden", 'jobs.batch "x" is forbidden: exceeded quota: none, requested: pods=1', QuotaError),
        (403, "Forbidden", 'admission webhook "vjob.kb.io" denied the request: no queue', SpecError),
        (404, "NotFound", 'namespaces "team" not found', NotFoundError),
        (409, "AlreadyExists", 'jobs.batch "x" already exists', ExistsError),
        (409, "Conflict", "the object has been modified; please apply your changes", LostContactError),
        (400, "BadRequest", 'strict decoding error: unknown field "spec.maxFailedIndexes"', SpecError),
        (413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728", SpecError),
        (422, "Invalid", 'Job.batch "x" is invalid: spec.completions: Required value', SpecError),
        (429, "TooManyRequests", "Too many requests, please try again later.", LostContactError),
        (500, "InternalError", "etcdserver: request timed out", LostContactError),
        (503, "", "", LostContactError),
        (405, "MethodNotAllowed", "the server does not allow this method", PlatformError),
    ],
)  # fmt: skip
def test_the_error_of_an_answer(status: int, reason: str, message: str, expected: type[CloudtrainError]) -> None:
    found = error_of(status, reason, message, what="create the Job")
    assert type(found) is expected
    assert str(found).startswith("create the Job: ")
    assert (message or f"HTTP {status}") in str(found)
    assert ("kubectl get namespaces" in found.hint) == (status == 404)


def test_a_cluster_that_drops_fields_is_too_old() -> None:
    found = error_of(400, "BadRequest", 'strict decoding error: unknown field "spec.maxFailedIndexes"', what="create")
    assert "1.29" in found.with_hint()


def test_a_kubeconfig_without_its_form(world: KubernetesWorld, tmp_path: Path) -> None:
    for number, text in enumerate(("", "hello", "[1]", "a: [b", '{"contexts": [{}], "current-context": "x"}')):
        file = tmp_path / str(number)
        file.write_text(text)
        with pytest.raises(AuthError, match=f"no cluster in {file}: "):
            again(world, kubeconfig=str(file)).status("team/x")


def test_an_authority_that_python_3_13_refuses(
    world: KubernetesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check this because kubectl takes it, and EKS has one: it has no key identifier."""
    authority, server = certificates()
    (tmp_path / "server.pem").write_bytes(server)
    context, wire = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), world.plane.wire
    context.load_cert_chain(tmp_path / "server.pem")
    wire.server.socket = context.wrap_socket(wire.server.socket, server_side=True)
    found = json.loads(world.plane.kubeconfig.read_text().replace("http:", "https:"))
    data = base64.b64encode(authority).decode()
    found["clusters"][0]["cluster"]["certificate-authority-data"] = data
    (tmp_path / "kubeconfig").write_text(json.dumps(found))
    monkeypatch.setattr("urllib3.util.ssl_.sys", SimpleNamespace(version_info=(3, 13)))
    assert again(world, kubeconfig=str(tmp_path / "kubeconfig")).principal().startswith("me on https://127.0.0.1")
    found["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(certificates()[0]).decode()
    (tmp_path / "kubeconfig").write_text(json.dumps(found))
    with pytest.raises(AuthError, match="certificate verify failed"):  # no other try can change that
        again(world, kubeconfig=str(tmp_path / "kubeconfig")).principal()


def test_a_failed_plugin_of_a_kubeconfig_is_one_line(
    world: KubernetesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("logging.root.handlers", [])
    found = json.loads(world.plane.kubeconfig.read_text())
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "false", "interactiveMode": "Never"}
    found["users"][0]["user"] = {"exec": plugin}
    (tmp_path / "kubeconfig").write_text(json.dumps(found))
    with contextlib.suppress(AuthError):
        again(world, kubeconfig=str(tmp_path / "kubeconfig")).principal()
    assert capsys.readouterr().err == ""


def test_a_folder_in_place_of_a_kubeconfig(world: KubernetesWorld, tmp_path: Path) -> None:
    client = again(world, kubeconfig=str(tmp_path / "none"))
    with pytest.raises(AuthError) as caught:
        client.status("team/x")
    assert "kubernetes.context" in caught.value.with_hint()


def test_a_missing_context(world: KubernetesWorld) -> None:
    with pytest.raises(AuthError, match="other"):
        again(world, context="other").status("team/x")


def test_the_variable_of_kubectl_names_the_cluster(world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.plane.kubeconfig))
    assert again(world, kubeconfig="").principal().startswith("me on http://127.0.0.1")


def test_a_wrong_token(world: KubernetesWorld, tmp_path: Path) -> None:
    other = tmp_path / "kubeconfig"
    other.write_text(world.plane.kubeconfig.read_text().replace("a-token-of-the-fake", "another"))
    with pytest.raises(AuthError) as caught:
        again(world, kubeconfig=str(other)).status("team/x")
    assert "another" not in caught.value.with_hint(), "a token is a secret"


def test_a_server_that_does_not_answer(world: KubernetesWorld, tmp_path: Path) -> None:
    other = tmp_path / "kubeconfig"
    other.write_text(world.plane.kubeconfig.read_text().replace(world.plane.wire.url, "http://127.0.0.1:9"))
    with pytest.raises(LostContactError, match=r"127\.0\.0\.1:9"):
        again(world, kubeconfig=str(other)).status("team/x")


@pytest.mark.parametrize("native", ["x", "team/", "/x", "team/x/y"])
def test_an_id_of_another_platform(world: KubernetesWorld, native: str) -> None:
    with pytest.raises(NotFoundError, match="NAMESPACE/JOB"):
        world.provider.status(native)


@pytest.mark.parametrize("what", ["status", "logs", "cancel"])
def test_an_unknown_job(world: KubernetesWorld, what: str) -> None:
    with pytest.raises(NotFoundError):
        getattr(world.provider, what)("team/x")


# ------------------------------------------------------------------------------------------------------ created objects


def test_the_job_comes_first_and_owns_the_rest(world: KubernetesWorld) -> None:
    native = world.provider.submit(two(world), VALUES)
    posts = [call for call in world.plane.wire.calls if call.startswith("POST")]
    assert posts == ["POST jobs", "POST services", "POST secrets"]
    job = world.plane.jobs["team", native.partition("/")[2]]
    for key in (key for key in world.plane.objects if key[0] in ("services", "secrets")):
        (owner,) = world.plane.objects[key]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", job.name, job.made["metadata"]["uid"])
    assert "geheim" not in str(job.made)


@pytest.mark.parametrize("operation", ["POST jobs", "POST services", "POST secrets"])
@pytest.mark.parametrize("error", [None, DOWN], ids=["cut", "unavailable"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_call_without_an_answer(world: KubernetesWorld, operation: str, error: Exception | None, done: bool) -> None:
    """Check that another client, after the first one's death, completes a half-made job."""
    request = two(world)
    world.plane.wire.faults.append(Fault(operation, error=error, done=done))
    with pytest.raises(LostContactError):
        world.provider.submit(request, VALUES)
    other = again(world)
    complete = operation == "POST secrets" and done
    assert (other.find(request) is not None) == complete
    native = other.submit(request, VALUES)
    assert kinds(world) == ["jobs", "secrets", "services"]
    assert other.find(request) == native == other.submit(request, VALUES)


def test_clients_at_once_make_one_job(world: KubernetesWorld) -> None:
    request = two(world)
    clients = [again(world) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda client: client.submit(request, VALUES), clients))
    assert len(found) == 1
    assert kinds(world) == ["jobs", "secrets", "services"]


def test_one_client_from_several_threads(world: KubernetesWorld) -> None:
    request = two(world)
    native = world.provider.submit(request, VALUES)
    client = again(world)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: client.status(native).state, range(24)))
    assert set(found) == {"pending"}


def test_a_job_of_another_request_is_not_adopted(world: KubernetesWorld) -> None:
    first, second = two(world), two(world, memory_gb=2)
    world.provider.submit(first, VALUES)
    assert world.provider.find(second) is None
    with pytest.raises(ConflictError) as caught:
        world.provider.submit(second, VALUES)
    assert caught.value.field == "run_id"
    assert "--run-id" in caught.value.with_hint()


def test_a_job_that_has_ended_is_found_without_its_secret(world: KubernetesWorld) -> None:
    request = two(world)
    native = world.provider.submit(request, VALUES)
    world.provider.cancel(native)
    world.plane.jobs["team", native.partition("/")[2]].wait()
    world.plane.objects = {key: value for key, value in world.plane.objects.items() if key[0] != "secrets"}
    assert world.provider.find(request) == native == world.provider.submit(request, VALUES)
    assert "secrets" not in kinds(world)


def test_a_role_that_cannot_read_secrets(world: KubernetesWorld) -> None:
    world.plane.denied |= {"GET secrets", "GET services"}
    request = two(world)
    native = world.provider.submit(request, VALUES)
    assert world.provider.find(request) == native


@pytest.mark.parametrize("kind", ["jobs", "services", "secrets"])
def test_a_role_that_cannot_create(world: KubernetesWorld, kind: str) -> None:
    world.plane.denied.add(f"POST {kind}")
    with pytest.raises(AuthError) as caught:
        world.provider.submit(two(world), VALUES)
    assert "kubectl auth can-i --list -n NAMESPACE" in caught.value.with_hint()


# -------------------------------------------------------------------------------------------------------- existing jobs


@pytest.mark.parametrize("operation", ["GET jobs", "GET pods"])
@pytest.mark.parametrize("error", [None, DOWN], ids=["cut", "unavailable"])
def test_a_status_without_an_answer_passes(world: KubernetesWorld, operation: str, error: Exception | None) -> None:
    native = world.provider.submit(two(world), VALUES)
    world.plane.wire.faults.append(Fault(operation, error=error))
    with pytest.raises(LostContactError):
        world.provider.status(native)
    assert world.provider.status(native).state == "pending"


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_cancel_without_an_answer_is_repeated(world: KubernetesWorld, done: bool) -> None:
    native = world.provider.submit(two(world), VALUES)
    world.plane.wire.faults.append(Fault("PATCH jobs", done=done))
    with pytest.raises(LostContactError):
        world.provider.cancel(native)
    world.provider.cancel(native)
    world.provider.cancel(native)
    world.plane.jobs["team", native.partition("/")[2]].wait()
    assert world.provider.status(native).state == "cancelled"
    world.provider.cancel(native)
    assert world.provider.status(native).state == "cancelled"


def test_a_job_over_the_quota_is_ended_and_stays_so(world: KubernetesWorld) -> None:
    """Check this because the quota may be free a moment later, and must not start a job next to a later attempt's."""
    world.plane.quota = True
    native = world.provider.submit(two(world), VALUES)
    job = world.plane.jobs["team", native.partition("/")[2]]
    while not world.plane.events:
        time.sleep(0.05)
    first = world.provider.status(native)
    assert (first.state, first.category) == ("failed", "quota")
    job.wait()
    assert job.pods == []
    last = again(world).status(native)
    assert (last.state, last.category, last.reason) == (first.state, first.category, first.reason)


def test_machines_are_the_kinds_of_nodes(world: KubernetesWorld) -> None:
    (found,) = world.provider.machines()
    assert (found.instance_type, found.gpu_count, found.vcpus, found.memory_gib) == ("a2", 8, 95, 1000.0)
    assert found.gpus == "H100:8"


# -------------------------------------------------------------------------------------------------------------- doctor


def test_all_is_well(world: KubernetesWorld, examiner: Examiner) -> None:
    found = examiner(*IMAGE)
    assert {row["status"] for row in found.rows.values()} <= {"ok", "skipped"}, found.rows
    assert found.code == 0
    assert "v1.36.2, as me on http://127.0.0.1" in found.rows["cluster"]["detail"]
    assert "training is Bound" in found.rows["shared volume"]["detail"]
    assert "8" in found.rows["gpus"]["detail"]
    assert found.status("request") == "ok"
    assert world.plane.jobs == {}, "doctor must create nothing"


def test_a_right_that_is_missing(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.denied |= {"patch pods", "create secrets"}
    examiner(*IMAGE).failure("rights", "may not create secrets, patch pods", fix="Role", code=3)


def test_no_node_that_can_hold_the_job(world: KubernetesWorld, examiner: Examiner) -> None:
    for flags, settings, why in (
        (("--gpu", "H100:8"), {}, "1 of 1"),
        (("--gpu", "H100:16"), {}, "1 by nvidia.com/gpu"),
        (("--gpu", "A100:1"), {}, "1 by label nvidia.com/gpu.product, which is NVIDIA-H100-80GB-HBM3"),
        (("--gpu", "H100:1"), {"gpu_label": "cloud.google.com/gke-accelerator"}, "gke-accelerator, which is missing"),
        (("--instance-type", "a3"), {}, "1 by label node.kubernetes.io/instance-type, which is a2"),
        (("--memory-gb", "2000"), {}, "1 by memory"),
    ):
        examiner.settings("kubernetes", world.store, {**world.settings, **settings})
        found = examiner(*IMAGE, *flags)
        assert why in found.rows["nodes"]["detail"], found.rows["nodes"]
        assert (found.status("nodes"), found.code) == ("ok" if why == "1 of 1" else "unknown", 0)
    world.plane.node = {"taints": [{"key": "team", "value": "ml", "effect": "NoSchedule"}]}
    assert "1 by taint team" in examiner(*IMAGE).rows["nodes"]["detail"]
    accepted = json.dumps([{"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}])
    assert examiner(*IMAGE, "--set", f"tolerations={accepted}").status("nodes") == "ok"


def test_a_claim_that_is_missing(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.objects.clear()
    examiner(*IMAGE).failure("shared volume", "'training'", fix="kubectl get pvc -n team", code=2)


def test_a_claim_for_one_machine(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.objects["persistentvolumeclaims", "team", "training"]["spec"]["accessModes"] = ["ReadWriteOnce"]
    examiner(*IMAGE).failure("shared volume", "ReadWriteOnce", fix="ReadWriteMany", code=2)


def test_a_service_account_that_is_missing(world: KubernetesWorld, examiner: Examiner) -> None:
    examiner.settings("kubernetes", world.store, {**world.settings, "service_account": "trainer"})
    examiner(*IMAGE).failure("service account", "'trainer'", fix="kubectl get serviceaccounts -n team", code=2)
    world.plane.denied |= {"GET serviceaccounts"}
    assert examiner(*IMAGE).status("service account") == "unknown"


def test_the_identity_that_a_service_account_names(world: KubernetesWorld, examiner: Examiner) -> None:
    own = {**world.settings, "service_account": "trainer"}
    account: dict[str, Any] = {"metadata": {"name": "trainer"}}
    world.plane.objects["serviceaccounts", "team", "trainer"] = account
    examiner.settings("kubernetes", world.store, own)
    assert "names no identity of a cloud" in examiner(*IMAGE).rows["service account"]["detail"]
    account["metadata"]["annotations"] = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/t"}
    assert "AWS's role arn:aws:iam::1:role/t" in examiner(*IMAGE).rows["service account"]["detail"]
    account["metadata"]["annotations"] = {"azure.workload.identity/client-id": "1-2"}
    examiner(*IMAGE).failure("service account", "Azure's client 1-2", fix="azure.workload.identity/use", code=2)
    labels = {**own.get("labels", {}), "azure.workload.identity/use": "true"}
    examiner.settings("kubernetes", world.store, {**own, "labels": labels})
    assert examiner(*IMAGE).status("service account") == "ok"


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_a_queue_of_an_old_and_of_a_new_kueue(world: KubernetesWorld, examiner: Examiner, version: str) -> None:
    examiner.settings("kubernetes", world.store, {**world.settings, "queue": "research"})
    examiner(*IMAGE).failure("queue", "'research' is no LocalQueue", fix="kubectl get localqueues -n team", code=2)
    world.plane.queues[version, "team", "research"] = "gpus"
    assert "cluster queue gpus" in examiner(*IMAGE).rows["queue"]["detail"]


def test_facts_that_the_caller_may_not_read_are_unknown(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.denied |= {"GET persistentvolumeclaims", "GET nodes"}
    found = examiner(*IMAGE)
    assert [found.status(name) for name in ("shared volume", "gpus")] == ["unknown"] * 2, found.rows
    assert found.code == 0


def test_an_api_server_that_refuses_the_request(world: KubernetesWorld, examiner: Examiner) -> None:
    message = 'admission webhook "policy" denied the request: images come from registry.internal alone'
    world.plane.wire.faults.append(Fault("POST jobs", error=Refusal(403, "Forbidden", message)))
    examiner(*IMAGE).failure("request", "denied the request", fix="images come from registry.internal", code=2)


def test_a_cluster_that_does_not_answer(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.wire.faults.append(Fault("*", times=9))
    found = examiner(*IMAGE)
    found.failed("cluster", "does not answer", fix="kubectl get jobs", code=7)


def test_an_unknown_caller(world: KubernetesWorld, examiner: Examiner) -> None:
    world.plane.wire.faults.append(Fault("*", error=Refusal(401, "Unauthorized", "Unauthorized"), times=9))
    examiner(*IMAGE).failed("cluster", "Unauthorized", fix="log in to the cluster again", code=3)
