"""Plans of provider ``kubernetes`` without a cluster: the exact manifest, refusals, the node half, its clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.errors import SpecError, StorageError, UnsupportedError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, LayoutInput, Request
from cloudtrain.providers._cloud import Clock
from cloudtrain.providers.kubernetes import Provider, node
from cloudtrain.providers.kubernetes.request import job_object
from cloudtrain.providers.kubernetes.validate import known_fields

ANSWERS = json.loads((Path(__file__).parents[1] / "data" / "kubernetes-answers.json").read_bytes())
OWN: Mapping[str, Any] = {"namespace": "team", "claim": "training", "root": "/srv"}


def layout(**change: Any) -> Layout:
    given: dict[str, Any] = {
        "store": "file:///srv/s",
        "run_id": "20261126-x",
        "code_digest": "c",
        "runtime_digest": "d",
    }
    return Layout(**{**given, **change})


def planned(settings: Mapping[str, Any] = {}, at: Layout | None = None, attempt: int = 0, **job: Any) -> Request:
    made = Provider(**{**OWN, **settings})
    fields = {"entry_point": "train.py", "name": "x", "image": "team/image:1", **job}
    return made.plan(Job.make(**fields), at or layout(), attempt)


def pod_of(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = job_object(request)["spec"]["template"]["spec"]
    return found


def container_of(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = pod_of(request)["containers"][0]
    return found


# ------------------------------------------------------------------------------------------------------------- the plan


def test_one_node_is_a_job_alone_and_two_have_a_service() -> None:
    assert [item["kind"] for item in planned().body["items"]] == ["Job"]
    request = planned(instance_count=2)
    job, service = request.body["items"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], pod_of(request)["subdomain"]) == ("None", service["metadata"]["name"])
    env = {item["name"]: item.get("value") for item in container_of(request)["env"]}
    assert env[node.HOST] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    assert request.operation == "kubectl create -n team -f -"


@pytest.mark.parametrize(("gpu", "arch"), [("GB200:4", ["arm64"]), ("B200:8", [])])
def test_a_gpu_beside_an_arm_cpu_accepts_the_taint_of_arm_nodes(gpu: str, arch: list[str]) -> None:
    """Otherwise no such node on GKE takes the pods."""
    found = [item for item in pod_of(planned(gpu=(gpu,)))["tolerations"] if item["key"] == "kubernetes.io/arch"]
    assert [item["value"] for item in found] == arch


@pytest.mark.parametrize("run_id", ["r", "a" * 40, "20261126-235959-train-abcd"])
def test_names_fit_into_those_of_pods(run_id: str) -> None:
    request = planned(at=layout(run_id=run_id), attempt=12, instance_count=4096)
    job, service = (item["metadata"]["name"] for item in request.body["items"])
    assert len(f"{job}-4095") <= 63
    assert service[0].isalpha()
    assert len(service) <= 63
    assert job != planned(at=layout(run_id=run_id), attempt=11).body["items"][0]["metadata"]["name"]


def test_a_job_s_fields_are_the_pod_s() -> None:
    request = planned(
        {"spot": "gke", "queue": "lq", "priority_class": "high", "user": 1000, "security": "restricted",
         "image_pull_secrets": ("reg",), "service_account": "trainer", "labels": {"team": "a"}},
        gpu=("H100:8",), cpus=16, memory_gb=64, disk_gb=100, shm_gb=16, spot=True, instance_type="a3", max_runtime=3600,
        tags={"Key": "two words"},
    )  # fmt: skip
    pod, container, meta = pod_of(request), container_of(request), job_object(request)["metadata"]
    limits = {"cpu": "16", "memory": "64G", "ephemeral-storage": "100G", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"limits": limits, "requests": limits}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-spot": "true", "node.kubernetes.io/instance-type": "a3",
    }  # fmt: skip
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"][0] == "NVIDIA-H100-80GB-HBM3"
    keys = [item["key"] for item in pod["tolerations"]]
    assert keys[2:] == ["nvidia.com/gpu", "cloud.google.com/gke-spot"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["volumes"][2] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16G"}}
    assert (meta["labels"]["team"], meta["labels"]["kueue.x-k8s.io/queue-name"]) == ("a", "lq")
    assert json.loads(meta["annotations"]["cloudtrain.dev/tags"]) == {"Key": "two words"}
    assert job_object(request)["spec"]["activeDeadlineSeconds"] == 3600 + 7 * 86400
    assert "limit=3600" in container["args"]
    assert not any(item["name"] == "NVIDIA_VISIBLE_DEVICES" for item in container["env"])


def test_a_secret_is_named_and_its_value_is_not_in_the_manifest() -> None:
    request = planned(secrets={"TOKEN": "env:HF_TOKEN"})
    name = job_object(request)["metadata"]["name"]
    assert pod_of(request)["volumes"][-1] == {"name": "secrets", "secret": {"secretName": name, "defaultMode": 0o444}}
    assert any("creates the Secret" in note for note in request.notes)


def test_money_becomes_seconds() -> None:
    request = planned({"prices": {"a3": 10.0}}, instance_type="a3", instance_count=2, max_cost=10)
    assert "limit=1800" in container_of(request)["args"]


def test_another_request_has_another_label() -> None:
    labels = [
        job_object(planned(**job))["metadata"]["labels"]["cloudtrain.dev/request"]  # type: ignore[arg-type]
        for job in ({}, {"cpus": 2}, {"tags": {"a": "b"}}, {})
    ]
    assert labels[0] == labels[3]
    assert len(set(labels)) == 3


@for_each(
    ("label", "gpu", "values"),
    [
        ("nvidia.com/gpu.product", "A100:1", 4),
        ("nvidia.com/gpu.product", "A100-80GB:1", 2),
        ("nvidia.com/gpu.product", "B200:8", 1),
        ("nvidia.com/gpu.product", "GB200:4", 1),
        ("nvidia.com/gpu.product", "RTXPRO6000:1", 1),
        ("nvidia.com/gpu.product", "H200:8", 2),
        ("cloud.google.com/gke-accelerator", "GB200:4", 1),
        ("cloud.google.com/gke-accelerator", "RTXPRO6000:1", 1),
        ("cloud.google.com/gke-accelerator", "H100:8", 2),
        ("karpenter.k8s.aws/instance-gpu-name", "A10G:1", 1),
        ("karpenter.k8s.aws/instance-gpu-name", "B300:8", 1),
        ("karpenter.k8s.aws/instance-gpu-name", "RTXPRO6000:8", 1),
        ("karpenter.k8s.aws/instance-gpu-name", "RTXPRO4500:8", 1),
        ("gpu.nvidia.com/class", "H200:8", 1),
    ],
)
def test_the_kind_of_a_gpu_is_a_label_s_value(label: str, gpu: str, values: int) -> None:
    affinity = pod_of(planned({"gpu_label": label}, gpu=(gpu,)))["affinity"]["nodeAffinity"]
    (expression,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0][
        "matchExpressions"
    ]
    assert (expression["key"], len(expression["values"])) == (label, values)


def test_own_names_of_gpus_win_and_no_label_asks_for_any() -> None:
    own = {"gpu_names": {"H100": "big"}, "gpu_label": "team/gpu"}
    affinity = pod_of(planned(own, gpu=("H100:1",)))["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"] == [{"key": "team/gpu", "operator": "In", "values": ["big"]}]
    assert "affinity" not in pod_of(planned({"gpu_label": ""}, gpu=("H100:1",)))
    with pytest.raises(UnsupportedError, match="known for H100-80GB"):  # an H100 may have more or less
        planned(own, gpu=("H100-80GB:1",))


# ------------------------------------------------------------------------------------------------------------ refusals


@for_each(
    ("settings", "job", "field"),
    [
        ({"claim": ""}, {}, "kubernetes.claim"),
        ({"root": "/usr"}, {}, "kubernetes.root"),
        ({"root": "srv"}, {}, "kubernetes.root"),
        ({"root": "/srv/../etc"}, {}, "kubernetes.root"),
        ({"volume": {"nfs": {}}}, {}, "kubernetes.volume"),
        ({"namespace": "Team"}, {}, "kubernetes.namespace"),
        ({"spot": "gce"}, {}, "kubernetes.spot"),
        ({"security": "strict"}, {}, "kubernetes.security"),
        ({"ttl": 1}, {}, "kubernetes.ttl"),
        ({"ttl": 2**31}, {}, "kubernetes.ttl"),
        ({"pending": 2**40}, {}, "kubernetes.pending"),
        ({"host_network": "yes"}, {}, "kubernetes.host_network"),
        ({"root": "/dev/shm"}, {}, "kubernetes.root"),
        ({"claim": "My claim"}, {}, "kubernetes.claim"),
        ({"service_account": "My_SA"}, {}, "kubernetes.service_account"),
        ({"priority_class": "High"}, {}, "kubernetes.priority_class"),
        ({"queue": "a queue"}, {}, "kubernetes.queue"),
        ({"image_pull_secrets": "reg"}, {}, "kubernetes.image_pull_secrets"),
        ({"image_pull_secrets": ("a b",)}, {}, "kubernetes.image_pull_secrets[0]"),
        ({"claim": "", "volume": "nfs"}, {}, "kubernetes.volume"),
        ({"claim": "", "volume": {"nfs": {}, "hostPath": {}}}, {}, "kubernetes.volume"),
        ({"claim": "", "volume": {"nsf": {}}}, {}, "kubernetes.volume.nsf"),
        ({"claim": "", "volume": {"nfs": {"server": "nas"}}}, {}, "kubernetes.volume.nfs.path"),
        ({"claim": "", "volume": {"nfs": {"server": "nas", "path": "srv"}}}, {}, "kubernetes.volume.nfs.path"),
        (
            {"claim": "", "volume": {"nfs": {"server": "a", "path": "/b", "sever": "c"}}},
            {},
            "kubernetes.volume.nfs.sever",
        ),
        ({"annotations": {"a": {"b": "c"}}}, {}, "kubernetes.annotations.a"),
        ({"annotations": {"a": "x" * 262_144}}, {}, "kubernetes.annotations"),
        ({"tolerations": "x"}, {}, "kubernetes.tolerations"),
        ({"tolerations": ({"kay": "a"},)}, {}, "kubernetes.tolerations.0.kay"),
        ({"tolerations": ({"value": "a"},)}, {}, "kubernetes.tolerations.0.key"),
        ({"tolerations": ({"key": "a", "value": 1},)}, {}, "kubernetes.tolerations.0.value"),
        ({"tolerations": ({"key": "a", "operator": "Is"},)}, {}, "kubernetes.tolerations.0.operator"),
        ({"tolerations": ({"key": "a", "effect": "NoRun"},)}, {}, "kubernetes.tolerations.0.effect"),
        ({"tolerations": ({"key": "a", "operator": "Exists", "value": "b"},)}, {}, "kubernetes.tolerations.0.value"),
        ({"tolerations": ({"key": "a", "tolerationSeconds": 9},)}, {}, "kubernetes.tolerations.0.tolerationSeconds"),
        ({"gpu_resource": "gpu"}, {}, "kubernetes.gpu_resource"),
        ({"gpu_label": "a b"}, {}, "kubernetes.gpu_label"),
        ({"gpu_names": "x"}, {}, "kubernetes.gpu_names"),
        ({"gpu_names": {"H100": 1}}, {}, "kubernetes.gpu_names.H100"),
        ({"gpu_names": {"H100": ["a b"]}}, {}, "kubernetes.gpu_names.H100"),
        ({"labels": {"a b": "c"}}, {}, "kubernetes.labels.a b"),
        ({"labels": {"a": "two words"}}, {}, "kubernetes.labels.a"),
        ({"node_selector": {"a": "x" * 64}}, {}, "kubernetes.node_selector.a"),
        ({"hami": {"gpumem": "3Gi"}}, {}, "kubernetes.hami.gpumem"),
        ({"hami": {"gpumem_percentage": 101}}, {}, "kubernetes.hami.gpumem_percentage"),
        ({"hami": {"gpucores": -1}}, {}, "kubernetes.hami.gpucores"),
        ({"hami": {"priority": 2}}, {}, "kubernetes.hami.priority"),
        ({"hami": {"vgpu_mode": "fast"}}, {}, "kubernetes.hami.vgpu_mode"),
        ({"hami": {"gpumen": 1}}, {}, "kubernetes.hami.gpumen"),
        ({"hami": {"gpumem": 1, "gpumem_percentage": 1}}, {}, "kubernetes.hami.gpumem"),
        (
            {"hami": {"use_gputype": ["A100"], "nouse_gputype": ["V100", "A100"]}},
            {"gpu": ("A100:1",)},
            "kubernetes.hami.use_gputype",
        ),
        (
            {"hami": {"use_gputype": "A100", "nouse_gputype": "V100,A100"}},
            {"gpu": ("A100:1",)},
            "kubernetes.hami.use_gputype",
        ),
        ({"hami": {"resources": {"gpu": 1}}}, {}, "kubernetes.hami.resources.gpu"),
        ({"hami": {"resources": {"nvidia.com/gpu": 2}}}, {}, "kubernetes.hami.resources.nvidia.com/gpu"),
        ({}, {"gpu": ("K80:1",)}, "resources.gpu"),
        ({}, {"instance_type": "a b"}, "resources.instance_type"),
        ({}, {"spot": True}, "resources.spot"),
        ({}, {"shm_gb": 8, "memory_gb": 4}, "resources.shm_gb"),
        ({}, {"max_cost": 1}, "max_cost"),
        ({}, {"image": None}, "image"),
        ({}, {"secrets": {"A": "aws:x"}}, "secrets.A"),
        ({}, {"tags": {"cloudtrain.run": "x"}}, "tags.cloudtrain.run"),
    ],
)
def test_refused_before_anything_is_sent(settings: Mapping[str, Any], job: Mapping[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        planned(settings, **job)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_rules_of_hami_may_share_letters() -> None:
    planned({"hami": {"use_gputype": "A10", "nouse_gputype": "A100"}}, gpu=("A100:1",))


@for_each(
    ("at", "field"),
    [
        (layout(store="s3://bucket/x"), "store"),
        (layout(store="file:///home/me"), "store"),
        (layout(store="file:///missing/elsewhere"), "store"),
        (layout(inputs={"data": LayoutInput(url="file:///data")}), "inputs.data"),
        (layout(resume="file:///old/runs/a"), "resume_from"),
    ],
)
def test_a_url_outside_the_shared_volume_is_refused(at: Layout, field: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        planned(at=at, inputs={"data": "/data"} if at.inputs else {})
    assert caught.value.field == field
    assert caught.value.hint == "choose a folder below /srv, which nodes and this machine share"


# ------------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("bucket", "store"),
    [
        ("gs://data", "gs://data/s"),
        ("s3://data/team/", "s3://data/team/s"),
        ("abfs://data@account.dfs.core.windows.net", "abfs://data@account.dfs.core.windows.net/s"),
    ],
)
def test_nodes_see_a_bucket_where_it_is_mounted(bucket: str, store: str) -> None:
    place = layout(store=store, inputs={"data": LayoutInput(url=f"{bucket.rstrip('/')}/set")}, resume=f"{store}/old")
    request = planned({"bucket": bucket}, place, inputs={"data": f"{bucket.rstrip('/')}/set"})
    words = container_of(request)["args"]
    assert words[1] == "/srv/s/runtime/d/cloudtrain.pyz"
    assert {"code=/srv/s/code/c/code.tar.gz", "live=/srv/s/runs/20261126-x/live", "input.data=/srv/set"} <= set(words)
    assert {"resume=/srv/s/old", "flush=30"} <= set(words)
    assert not any(word.startswith("direct=") for word in words), (
        "a mount cannot rename, so a script must write by the URL"
    )
    assert request.context["checkpoint_url"] == f"{store}/runs/20261126-x/checkpoints"
    (spec,) = Provider(**{**OWN, "bucket": bucket}).launch_spec(request).nodes
    assert {mount.url.partition("://")[0] for mount in spec.mounts} == {store.partition("://")[0]}
    assert f"{store}/runs/20261126-x/live" in {mount.url for mount in spec.mounts if mount.kind == "sync"}
    annotations = job_object(request)["spec"]["template"]["metadata"]["annotations"]
    assert ("gke-gcsfuse/volumes" in annotations) == bucket.startswith("gs:")


def test_a_local_input_is_staged_if_the_volume_is_a_bucket() -> None:
    assert Provider(**OWN).schemes == {"file"}
    assert Provider(**OWN, bucket="s3://data").schemes == {"s3"}


@pytest.mark.parametrize("store", ["gs://data2/s", "gs://other", "s3://data/team", "file:///srv/s", "gs://data"])
def test_a_store_that_is_not_in_the_mounted_bucket_is_refused(store: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        planned({"bucket": "gs://data/team"}, layout(store=store))
    assert (caught.value.field, caught.value.hint) == ("store", "choose a folder below gs://data/team")


@pytest.mark.parametrize(
    "bucket", ["data", "file:///srv", "https://data", "gs://", "gs://data?x=1", "GS://data", "nfs://a"]
)
def test_an_invalid_bucket_is_refused(bucket: str) -> None:
    with pytest.raises(SpecError) as caught:
        planned({"bucket": bucket})
    assert caught.value.field == "kubernetes.bucket"


def test_gcsfuse_without_implicit_dirs_is_noted() -> None:
    csi: dict[str, Any] = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "data"}}
    own = {"claim": "", "volume": {"csi": csi}, "bucket": "gs://data"}
    assert any("implicit-dirs" in note for note in planned(own, layout(store="gs://data/s")).notes)
    csi["volumeAttributes"]["mountOptions"] = "implicit-dirs,uid=1000"
    assert not planned(own, layout(store="gs://data/s")).notes


def test_a_node_writes_less_often_to_a_mounted_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file, environ = tmp_path / "used", {node.NODES: "1", node.INDEX: "0"}
    paths = {"live": "/l", "limit": "600", "clock": str(file), "flush": "30"}
    found = node.node_environment(environ, paths)
    assert (found.flush_seconds, found.paths) == (30.0, {"live": "/l"})
    (clock,) = found.notices
    written = set()
    for _ in range(90):
        assert clock() == ""
        written.add(file.read_text())
        now[0] += 1
    assert written == {"30.0", "60.0", "90.0"}, "each value must be the time up to the next write, less one call"


POD = ("items", "0", "spec", "template", "spec")
NODE = (*POD, "containers", "0")


@for_each(
    ("path", "value", "field"),
    [
        ((*POD, "contianers"), [], "contianers"),
        (("items", "0", "spec", "complettions"), 2, "complettions"),
        (("items", "0", "spec", "backoffLimit"), 2, "backoffLimit"),
        (("items", "0", "sepc"), {}, "sepc"),
        ((*POD, "containers", "0", "imagePullPolcy"), "Always", "imagePullPolcy"),
        ((*POD, "containers", "0", "resources", "limits", "nvidia.com/gpu"), "1.5", "nvidia.com/gpu"),
        ((*POD, "containers", "0", "resources", "limits", "cpu"), "-1", "cpu"),
        ((*POD, "containers", "0", "resources", "limits", "cpu"), "two", "cpu"),
        ((*POD, "containers", "0", "volumeMounts", "3"), {"name": "none", "mountPath": "/x"}, "volumeMounts"),
        ((*POD, "containers", "0", "env", "2"), {"name": "A", "value": 1}, "env.2.value"),
        ((*NODE, "lifecycle"), {"preStop": {"exec": {"comand": []}}}, "lifecycle.preStop.exec.comand"),
        ((*NODE, "livenessProbe"), {"periodSeconds": "5"}, "livenessProbe.periodSeconds"),
        ((*POD, "affinity"), {"podAntiAffinity": {"preferred": []}}, "podAntiAffinity.preferred"),
        ((*POD, "hostAliases"), [{"ip": "10.0.0.1", "hostnames": "a"}], "hostAliases.0.hostnames"),
        ((*POD, "containers", "0", "volumeMounts", "0", "mountPath"), "/x", "volumeMounts"),
        ((*POD, "volumes", "1", "emptyDir"), "x", "volumes.1.emptyDir"),
        ((*POD, "volumes"), [], "volumeMounts"),
        (("items", "0", "spec", "template", "metadata", "labels", "a"), "b c", "a"),
        (("items", "0", "spec", "podFailurePolicy"), {}, "podFailurePolicy"),
        (("items", "0", "spec", "completions"), 3, "completions"),
        ((*POD, "restartPolicy"), "OnFailure", "restartPolicy"),
        (("items", "0", "metadata", "name"), "x.y", "name"),
        (("items", "0", "metadata", "anotations"), {}, "anotations"),
        (("items", "0", "spec", "successPolicy"), {}, "successPolicy"),
        (("items", "0", "spec", "ttlSecondsAfterFinished"), 2**31, "ttlSecondsAfterFinished"),
        (("items", "0", "spec", "template", "metadata", "labels", "a"), 1, "labels.a"),
        (("items", "0", "metadata", "annotations", "a"), 1, "annotations.a"),
        ((*POD, "nodeSelector"), {"a": 1}, "nodeSelector.a"),
        ((*POD, "tolerations", "2"), {"key": "a", "operator": "Exists", "value": "b"}, "tolerations.2.value"),
        ((*POD, "volumes", "3"), {"nfs": {"server": "a", "path": "/b"}}, "volumes.3.name"),
        ((*POD, "initContainers"), [{"name": "node", "image": "x"}], "containers"),
        ((*POD, "initContainers"), [{"name": "a"}], "initContainers.0.image"),
        ((*NODE, "volumeMounts", "3"), {"name": "scratch", "mountPath": "/srv"}, "volumeMounts"),
        ((*NODE, "env", "3"), {"name": "A=B", "value": "x"}, "env"),
        ((*NODE, "resources", "claims"), [{"name": "gpu"}], "claims"),
        ((*NODE, "resources", "limits", "gpu"), "1", "limits.gpu"),
        ((*NODE, "resources", "limits", "memory"), "1K", "limits.memory"),
        ((*NODE, "workingDir"), 7, "containers.0.workingDir"),
        ((*NODE, "tty"), "yes", "containers.0.tty"),
        ((*POD, "priority"), "10", "spec.priority"),
        ((*POD, "priority"), True, "spec.priority"),
        ((*POD, "overhead"), {"cpu": "much"}, "overhead.cpu"),
        ((*POD, "overhead"), "1", "overhead"),
        ((*NODE, "resources", "limits", "hugepages-2Mi"), "512Mi", "limits.hugepages-2Mi"),
        ((*NODE, "resources", "limits", "nvidia.com/gpu"), "1", "limits.nvidia.com/gpu"),
        ((*NODE, "resources"), {"limits": {"memory": "1Gi"}, "requests": {"memory": "2G"}}, "requests.memory"),
        ((*NODE, "resources"), {"limits": {"cpu": "1500m"}, "requests": {"cpu": "1.6"}}, "requests.cpu"),
        ((*NODE, "resources"), {"requests": {"rdma/ib": "1"}}, "requests.rdma/ib"),
    ],
)
def test_a_wrong_manifest_is_refused(path: tuple[str, ...], value: Any, field: str) -> None:
    options: Any = value
    for key in reversed(path):
        options = {key: options}
    with pytest.raises(SpecError) as caught:
        planned(options={"kubernetes": options}, instance_count=1)
    assert caught.value.field.endswith(field)
    assert caught.value.field.startswith("options.kubernetes.items.")


@pytest.mark.slow
def test_the_table_of_fields_is_the_installed_client_s() -> None:
    done = [sys.executable, "-c", "import json, kubernetes_tables as t; print(json.dumps(t.fields()))"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "tools")}
    assert json.loads(subprocess.run(done, env=env, stdout=subprocess.PIPE, check=True).stdout) == known_fields()


@for_each("case", [name for name, row in ANSWERS["cases"].items() if row["code"] != 201])
def test_refusals_of_a_real_server_come_before_sending(case: str) -> None:
    options: dict[str, Any] = {}
    for path, value in ANSWERS["cases"][case]["set"]:
        at = options
        for key in ("items", "0", *path[:-1]):
            at = at.setdefault(str(key), {})
        at[str(path[-1])] = {"x": "a" * 262144} if value == {"x": "a*262144"} else value
    with pytest.raises(SpecError, match=r"options\.kubernetes\."):
        planned(options={"kubernetes": options}, instance_count=2)


@pytest.mark.parametrize("path", [("sepc",), ("spec", "typo"), ("metadata", "typo")])
def test_a_wrong_service_is_refused(path: tuple[str, ...]) -> None:
    options: Any = {}
    for key in reversed(("items", "1", *path)):
        options = {key: options}
    with pytest.raises(SpecError) as caught:
        planned(options={"kubernetes": options}, instance_count=2)
    assert caught.value.field == ".".join(("options.kubernetes.items.1", *path))


def test_requests_up_to_their_limit_and_other_valid_fields_pass() -> None:
    """Check cases that a real API server of 1.36.2 accepted."""
    resources = {"limits": {"memory": "1Gi", "cpu": "2"}, "requests": {"memory": "1073741824", "cpu": "1"}}
    pod = {
        "tolerations": {"2": {"key": "a", "operator": "Equal"}},
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}],
        "containers": {"0": {"resources": {**resources, "claims": [{"name": "gpu"}]}}},
        "volumes": {"3": {"name": "g", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}}},
    }
    change: Any = {"ttlSecondsAfterFinished": 0, "template": {"spec": pod}}
    request = planned(options={"kubernetes": {"items": {"0": {"spec": change}}}})
    assert job_object(request)["spec"]["ttlSecondsAfterFinished"] == 0
    assert pod_of(request)["resourceClaims"][0]["name"] == "gpu"


def test_numbers_and_switches_of_settings_become_texts() -> None:
    request = planned({"node_selector": {"pool": 1, "fast": True}, "labels": {"a": True}, "annotations": {"b": 2}})
    assert pod_of(request)["nodeSelector"] == {"pool": "1", "fast": "true"}
    meta = job_object(request)["spec"]["template"]["metadata"]
    assert (meta["labels"]["a"], meta["annotations"]["b"]) == ("true", "2")


def test_a_long_limit_fits_into_a_pod_s_deadline() -> None:
    assert pod_of(planned(max_runtime=2**31 - 1))["activeDeadlineSeconds"] == 2**31 - 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"security": "restricted", "host_network": True}, "host_network"),
        ({"security": "restricted", "claim": "", "volume": {"nfs": {"server": "a", "path": "/b"}}}, "nfs"),
        ({"hami": {"gpumem": 1}, "scheduler_name": "volcano"}, "volcano"),
    ],
)
def test_a_setting_that_keeps_pods_from_a_start_is_noted(settings: Mapping[str, Any], word: str) -> None:
    assert any(word in note for note in planned(settings, gpu=("A100:1",)).notes)


def test_a_rehearsal_has_the_size_that_options_ask_for() -> None:
    change = {"containers": {"0": {"resources": {"limits": {"memory": "1Gi", "cpu": "1500m"}}}}}
    made = Provider(**OWN)
    request = planned(options={"kubernetes": {"items": {"0": {"spec": {"template": {"spec": change}}}}}})
    (node_spec,) = made.launch_spec(request).nodes
    assert (node_spec.memory, node_spec.cpus) == (1 << 30, 2)


def test_options_reach_the_manifest() -> None:
    """Check also further volumes, after cloudtrain's own."""
    extra = {"rdma/ib": "1"}
    mount = {"volumeMounts": {"3": {"name": "data", "mountPath": "/data"}}}
    change = {
        "containers": {"0": {"resources": {"limits": extra, "requests": extra}, **mount}},
        "hostIPC": True,
        "volumes": {"3": {"name": "data", "nfs": {"server": "nas", "path": "/data"}}},
    }
    request = planned(options={"kubernetes": {"items": {"0": {"spec": {"template": {"spec": change}}}}}})
    assert pod_of(request)["hostIPC"] is True
    assert container_of(request)["resources"]["limits"]["rdma/ib"] == "1"
    assert pod_of(request)["volumes"][-1]["name"] == container_of(request)["volumeMounts"][-1]["name"] == "data"


# ---------------------------------------------------------------------------------------------------------------- HAMi


def test_a_share_of_a_gpu_is_hami_s_resources_and_annotations() -> None:
    rules = {
        "gpumem": 8000, "gpucores": 50, "priority": 1, "use_gputype": ["A100", "V100"], "numa_bind": True,
        "node_scheduler_policy": "spread", "vgpu_mode": "hami-core", "resources": {"huawei.com/Ascend910B3-memory": 4},
    }  # fmt: skip
    request = planned({"hami": rules}, gpu=("A100:1",), instance_count=2)
    limits = container_of(request)["resources"]["limits"]
    assert limits == {
        "nvidia.com/gpu": "1", "nvidia.com/gpumem": "8000", "nvidia.com/gpucores": "50", "nvidia.com/priority": "1",
        "huawei.com/Ascend910B3-memory": "4",
    }  # fmt: skip
    annotations = job_object(request)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["nvidia.com/use-gputype"] == "A100,V100"
    assert (annotations["nvidia.com/numa-bind"], annotations["hami.io/node-scheduler-policy"]) == ("true", "spread")
    assert any("shares of one GPU" in note for note in request.notes)
    plain = planned({"hami": rules})
    assert container_of(plain)["resources"]["limits"] == {}
    assert "nvidia.com/use-gputype" not in job_object(plain)["spec"]["template"]["metadata"]["annotations"]


@pytest.mark.parametrize("rule", [{"gpu_scheduler_policy": "spread"}, {"gpumem": 5}, {"gpumem_percentage": 50}])
def test_a_job_asks_for_a_part_of_a_gpu(rule: Mapping[str, Any]) -> None:
    """Check whole MiB. The job's own share replaces that of the settings."""
    limits = container_of(planned({"hami": rule}, gpu=("A100:2",), gpu_memory="8GB"))["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "2", "nvidia.com/gpumem": str(8 * 10**9 // 2**20)}
    notes = planned({"hami": rule}, gpu=("A100:1",), gpu_memory="8GB", instance_count=2).notes
    assert any("shares of one GPU" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "job"),
    [
        ({}, {"gpu": ("A100:1",)}),
        ({"hami": {"gpucores": 50}}, {}),
        ({"hami": {"gpucores": 50}, "gpu_resource": "nvidia.com/mig-3g.20gb"}, {"gpu": ("A100:1",)}),
        ({"hami": {"gpucores": 50}}, {"gpu": ("A100:1",), "gpu_memory": 1000}),
    ],
)
def test_a_part_of_a_gpu_without_hami_or_a_gpu_is_refused(settings: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        planned(settings, **{"gpu_memory": "8GB", **job})
    assert caught.value.field == "resources.gpu_memory"
    assert caught.value.hint


# ------------------------------------------------------------------------------------------------------------ the node


def test_a_pod_knows_its_rank_and_node_0() -> None:
    environ = {node.NODES: "2", node.HOST: "r-0.ct-r", node.INDEX: "1"}
    found = node.node_environment(environ, {"live": "/srv/l", "grace": "20", "limit": "60", "clock": "/srv/used"})
    assert (found.topology.nodes, found.topology.node_rank, found.topology.master_addr) == (2, 1, "r-0.ct-r")
    assert (found.stop_grace, found.paths, found.notices) == (20.0, {"live": "/srv/l"}, ())
    assert found.exit_code == {"succeeded": 0, "failed": 1, "preempted": 75, "lost": 75}
    with pytest.raises(SpecError, match="no pod of an indexed Job"):
        node.node_environment({}, {})
    with pytest.raises(SpecError, match="the nodes cannot find node 0"):
        node.node_environment({node.NODES: "2", node.INDEX: "1"}, {})


def test_the_clock_sums_all_starts_and_changes_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file = tmp_path / "native" / "used"
    environ = {node.NODES: "1", node.INDEX: "0"}
    paths = {"live": "/l", "limit": "60", "clock": str(file)}
    (first,) = (one := node.node_environment(environ, paths)).notices
    assert first() == ""
    now[0] += 38
    assert first() == ""
    assert float(file.read_text()) == 40
    assert one.exit_code["preempted"] == node.AGAIN
    now[0] += 1000  # the job waits for machines
    (second,) = (other := node.node_environment(environ, paths)).notices
    assert second() == ""
    now[0] += 19
    assert second() == ""
    now[0] += 1
    assert second() == "the time limit is used up"
    assert other.exit_code == {"succeeded": 0, "failed": 1, "preempted": node.TIME_UP, "lost": node.TIME_UP}
    assert float(file.read_text()) == 60


def test_the_time_is_written_for_a_tenth_of_the_limit_at_most_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, file, before = [0.0], tmp_path / "used", tmp_path / "before"
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(file, 10, {}, node.TIME_UP, 60)
    assert clock() == ""
    os.link(file, before)
    now[0] += 1
    assert clock() == ""
    assert (before.read_text(), file.read_text()) == ("1.0", "2.0"), "a write must not change the file in place"


def test_starts_that_are_cut_off_at_once_use_up_the_limit(tmp_path: Path) -> None:
    """Check a mounted bucket, where each write is an object: such a start writes nothing while it lasts."""
    environ = {node.NODES: "1", node.INDEX: "0"}
    paths = {"live": "/l", "limit": "600", "clock": str(tmp_path / "used"), "flush": "30"}
    for start in range(20):
        (clock,) = node.node_environment(environ, paths).notices
        assert clock() == "", start
    (clock,) = (last := node.node_environment(environ, paths)).notices
    assert clock() == "the time limit is used up"
    assert last.exit_code["preempted"] == node.TIME_UP


def test_a_volume_that_does_not_answer_stops_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock(tmp_path / "file" / "used", 60, {}, node.TIME_UP, node.WRITTEN)
    assert clock() == ""


def test_a_missing_secret_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node, "SECRETS", str(tmp_path))
    (tmp_path / "TOKEN").write_text("value")
    assert node.secret("TOKEN") == "value"
    with pytest.raises(StorageError, match="secret env:NONE cannot be read from"):
        node.secret("NONE")


def test_excluded_nodes_get_no_pod() -> None:
    plain = planned(gpu=("H100:1",))
    other = Provider(**{**OWN, "exclude": ["n7"]}).without_machines(["n2", "n7"])
    assert other.settings.exclude == ("n7", "n2")
    job = {"entry_point": "train.py", "name": "x", "image": "team/image:1", "gpu": ("H100:1",)}
    request = other.plan(Job.make(**job), layout(), 1)
    [rules] = pod_of(plain)["affinity"]["nodeAffinity"].values()
    [more] = pod_of(request)["affinity"]["nodeAffinity"].values()
    left_out = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n7", "n2")]
    [term] = rules["nodeSelectorTerms"]
    assert more["nodeSelectorTerms"] == [{**term, "matchFields": left_out}]  # in one term: both must hold
    with pytest.raises(SpecError, match=r"kubernetes\.exclude"):
        Provider(**{**OWN, "exclude": ["a b"]})


def test_a_pod_knows_the_cluster_s_node() -> None:
    [item] = [item for item in container_of(planned())["env"] if item["name"] == node.MACHINE]
    assert item == {"name": node.MACHINE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    found = node.node_environment({node.NODES: "1", node.INDEX: "0", node.MACHINE: "worker-3"}, {})
    assert found.machine == "worker-3"
