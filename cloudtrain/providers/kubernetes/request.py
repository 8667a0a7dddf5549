"""Make the manifest of a Job. Pure: no network, no credentials, no client library."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import run_tag
from ...provider_api.protocol import Request, check_inputs, python_command
from ...validate import choice_of, texts_of
from .._cloud import Planned, bucket_url, check_shared, digest_of, shared_arguments, shared_path
from . import EXTRA_GRACE, NAME, Provider, devices, validate
from .node import AGAIN, CLOCK_PATH, HOST, LIMIT_PATH, MACHINE, NODES, SCRATCH, SECRETS

if TYPE_CHECKING:
    from ...job.job import Gpu, Job
    from . import Settings

LABEL_RUN, LABEL_REQUEST = "cloudtrain.dev/run", "cloudtrain.dev/request"
MANAGED_BY, RUN_URL = "app.kubernetes.io/managed-by", "cloudtrain.dev/run-url"
CANCELLED = "cloudtrain.dev/cancelled"
"""Annotation of a Job that a user has cancelled by cloudtrain."""
ENDED = "cloudtrain.dev/ended"
"""Annotation of a Job that cloudtrain has ended because it cannot start: ``CATEGORY: REASON``."""
POD_INDEX = "batch.kubernetes.io/job-completion-index"
"""Label of a pod with its number in the Job: the node rank."""
CONTAINER = "node"
"""Label of the cluster's nodes with their name, by which pods keep off some of them."""
QUEUE, JOBSETS = "kueue.x-k8s.io/queue-name", "jobset.x-k8s.io"
OF_SET = "-node-0"
"""End of the name of the Job that a JobSet makes. The name of any other Job ends with the digits of its run."""
_POD_SPEC = "items.*.spec.template.spec."
OWNED = {
    "": "apiVersion kind metadata",
    "items.*.": "apiVersion kind status metadata.name metadata.namespace metadata.labels",
    "items.*.spec.": "clusterIP publishNotReadyAddresses completionMode completions parallelism activeDeadlineSeconds"
    " podFailurePolicy suspend backoffLimitPerIndex maxFailedIndexes manualSelector selector podReplacementPolicy"
    " managedBy successPolicy",
    _POD_SPEC: "restartPolicy subdomain hostname activeDeadlineSeconds terminationGracePeriodSeconds hostNetwork",
    f"{_POD_SPEC}containers.*.": "name image command args",
}
"""Fields of the manifest that `options` cannot change: a field or setting sets them, or the run relies on them."""
LONGEST_NAME = 57
"""Characters of a Job's name: its pods are named ``NAME-INDEX``, with 63 at most, for up to 100,000 nodes."""
JOIN = 3600
"""Seconds beyond its limit after which a pod is stopped in any case: it may wait for its image and its peers."""
SHM = "/dev/shm"
_OBJECTS = ("namespace", "claim", "service_account", "priority_class", "runtime_class", "scheduler_name")
"""Settings that are names of objects in the cluster."""
_BAD_PATH = re.compile(r"[\x00-\x1f\x7f:]")
"""Characters that a mount's path cannot have."""
_ROOTS = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/root", "/sbin", "/sys", "/usr")
"""Folders whose content in an image a volume would hide."""


def checked(settings: Settings) -> Settings:
    """Return ``settings``, checked. Raises `SpecError`."""
    own = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    if own["kind"] == "trainjob":
        why = "a TrainJob takes the rules of restarts and failures from a runtime object of the cluster"
        raise UnsupportedError(NAME, f"{NAME}.kind", why, hint='set kind = "jobset", which a TrainJob makes in the end')
    choice_of(own["kind"], ("job", "jobset"), f"{NAME}.kind")
    validate.check_fields(own["host_network"], "bool", f"{NAME}.host_network")
    own["root"] = _checked_root(settings)
    own["bucket"] = bucket_url(settings.bucket, f"{NAME}.bucket") if settings.bucket else ""
    for name in _OBJECTS:
        if own[name] or name == "namespace":
            validate.check_name(own[name], f"{NAME}.{name}", label=name == "namespace")
    for name in ("image_pull_secrets", "exclude"):
        own[name] = texts_of(own[name], f"{NAME}.{name}")
        for number, item in enumerate(own[name]):
            validate.check_name(item, f"{NAME}.{name}[{number}]")
    for name in ("labels", "annotations", "node_selector"):
        validate.check_labels(own[name], f"{NAME}.{name}", values=name != "annotations")
        own[name] = {key: validate.label_text(value) for key, value in own[name].items()}
    validate.check_labels({"queue": settings.queue}, NAME)
    validate.check_tolerations(settings.tolerations, f"{NAME}.tolerations")
    if "/" not in settings.gpu_resource:
        raise SpecError("must be a resource with a domain, like nvidia.com/gpu", field=f"{NAME}.gpu_resource")
    for name in filter(own.get, ("gpu_resource", "gpu_label")):
        validate.check_key(own[name], f"{NAME}.{name}")
    devices.check_gpu_names(settings.gpu_names)
    devices.check_hami(settings.hami, settings.gpu_resource)
    own["tolerations"] = tuple(dict(item) for item in settings.tolerations)
    return dataclasses.replace(settings, **own)


def _checked_root(settings: Settings) -> str:
    """Return the root without a slash at its end. Raises `SpecError` for it and for the volume there."""
    if settings.claim and settings.volume:
        raise SpecError("excludes claim", field=f"{NAME}.volume", hint="keep one of them")
    if settings.volume or not isinstance(settings.volume, Mapping):
        validate.check_volume(settings.volume, f"{NAME}.volume")
    root, taken = settings.root.rstrip("/") or settings.root, (*_ROOTS, SCRATCH, SECRETS, SHM)
    plain = root.startswith("/") and not _BAD_PATH.search(root) and posixpath.normpath(root) == root
    if root and not (plain and root not in taken):
        hint = "use the folder where the volume is mounted here, like /mnt/training"
        raise SpecError(f"{root!r} cannot be a volume's folder on the nodes", field=f"{NAME}.root", hint=hint)
    return root


def job_object(request: Request) -> Mapping[str, Any]:
    """Return the Job of a request, also of one that the JobSet of a request makes."""
    return job_of_set(request.body["items"][0])


def job_of_set(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Job that a JobSet makes, as it is before its controller has seen it; of a Job, the Job itself."""
    if found["kind"] == "Job":
        return found
    meta, made = found["metadata"], found["spec"]["replicatedJobs"][0]["template"]
    own = {**made["metadata"], "name": meta["name"] + OF_SET, "namespace": meta["namespace"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": own, "spec": made["spec"]}


def marks_of(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the annotations of an object."""
    return item["metadata"].get("annotations") or {}


def native_id_of(job: Mapping[str, Any]) -> str:
    """Return ``namespace/name`` of a Job."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(planned: Planned) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    job = planned.job
    check_inputs(Provider, planned.layout.inputs)
    _refuse(job)
    settings = devices.with_gpu_memory(planned.settings, job)
    planned = planned._replace(settings=settings).on(job.resources.instance_type or "node")
    name, service = _names(planned)
    made = _job(planned, name, _pod(planned, name=name, service=service))
    items = [made, *([_service(made, service)] if job.resources.instance_count > 1 and settings.kind == "job" else [])]
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": items}
    body = planned.with_options(body, OWNED)
    validate.check_body(body)
    _check_kept(body["items"][0], items[0], settings.gpu_resource)
    if settings.kind == "jobset":
        body["items"][0] = _jobset(body["items"][0])
    # A run's id may return for another job after its records are gone, so a label has a digest of the objects.
    unique = digest_of(body)
    for item in body["items"]:
        item["metadata"]["labels"][LABEL_REQUEST] = unique
    if job.secrets:
        made_too = f"submit also creates the Secret {name} from this machine's variables; it goes with the Job"
        planned.notes.append(made_too)
    planned.notes.extend(_warnings(planned))
    return planned.request(f"kubectl create -n {settings.namespace} -f -", body)


def _warnings(planned: Planned) -> list[str]:
    """Return notes on settings that the cluster takes, and that keep the pods from a start all the same."""
    settings = planned.settings
    volume, shared = str(settings.volume), planned.gpu is not None and bool(settings.hami)
    lacks, restricted = "gcsfuse" in volume and "implicit-dirs" not in volume, settings.security == "restricted"
    found = {
        "the volume's mountOptions lack implicit-dirs: without it, nodes do not see the store's folders": lacks,
        "Pod Security's restricted level forbids host_network, and volumes of kind nfs and hostPath": restricted
        and (settings.host_network or bool({"nfs", "hostPath"} & {*settings.volume})),
        f"HAMi leaves pods alone whose scheduler_name, {settings.scheduler_name}, is not its own": shared
        and settings.scheduler_name,
        "two nodes of this run may get shares of one GPU by HAMi, which NCCL refuses": shared
        and planned.job.resources.instance_count > 1
        and devices.is_shared(settings),
    }
    return [note for note, holds in found.items() if holds]


def _check_kept(job: Mapping[str, Any], ours: Mapping[str, Any], gpu: str) -> None:
    """Raise `SpecError` if ``job`` lacks one of our volumes, mounts or variables, or has another number of ``gpu``.

    `options` may add others of the former.
    """
    where = f"options.{NAME}.items.0.spec.template.spec"
    pods = [item["spec"]["template"]["spec"] for item in (job, ours)]
    nodes = [pod["containers"][0] for pod in pods]
    found, kept = [node["resources"]["limits"].get(gpu) for node in nodes]
    if found != kept:
        field = f"{where}.containers.0.resources.limits.{gpu}"
        raise SpecError("is not the number of GPUs of the job", field=field, hint="set resources.gpu")
    lists = {f"containers.0.{name}": [node[name] for node in nodes] for name in ("env", "volumeMounts")}
    for name, (found, kept) in {"volumes": [pod["volumes"] for pod in pods], **lists}.items():
        if found[: len(kept)] != kept:
            why, hint = "cloudtrain itself sets this part of the request", "add items after ours"
            raise SpecError(why, field=f"{where}.{name}", hint=hint)


def _names(planned: Planned) -> tuple[str, str]:
    """Return the names of Job and Service. A Service's name begins with a letter, and a run id with a digit.

    So do the names of a JobSet's Jobs and pods, and the latter have five characters more, which its webhook counts.
    """
    tail = planned.name[planned.name.rindex(run_tag(planned.layout.run)) - 1 :]
    head, longest, end = planned.name.removesuffix(tail), LONGEST_NAME - len(tail), ""
    if planned.settings.kind == "jobset":
        head, longest, end = f"ct-{head}", longest - len(OF_SET) - 6, OF_SET
    return head[:longest].rstrip("-") + tail + end, f"ct{tail}"


def _refuse(job: Job) -> None:
    wanted = job.resources
    if wanted.shm_gb and wanted.memory_gb and wanted.shm_gb > wanted.memory_gb:
        raise SpecError(f"is more than memory_gb, {wanted.memory_gb}, which holds it", field="resources.shm_gb")
    if wanted.instance_type:
        validate.check_labels({"instance_type": wanted.instance_type}, "resources")
    check_shared(NAME, job, where="on their volume", secrets="the value travels in a Secret of the namespace")


def volume_url(settings: Settings) -> str:
    """Return the URL that the nodes see at `Settings.root`."""
    return settings.bucket or f"file://{settings.root}"


def mounts(settings: Settings) -> Mapping[str, str]:
    """Return the nodes' one folder by the URL that it shows."""
    return {volume_url(settings): settings.root}


def _path(settings: Settings, url: str, field: str) -> str:
    """Return the nodes' path of ``url``. Raises `UnsupportedError` if it is not on their volume."""
    if (path := shared_path(mounts(settings), url)) is not None:
        return path
    what = settings.bucket or f"{settings.root}, which nodes and this machine share"
    hint = f"choose a folder below {what}"
    raise UnsupportedError(NAME, field, f"its nodes see one volume, and {url} is not on it", hint=hint)


def _words(planned: Planned) -> list[str]:
    """Return the runtime's command line, without Python."""
    path = partial(_path, planned.settings)
    folder = f"{path(planned.layout.native, 'store')}/{NAME}-{planned.attempt}-{planned.gpu_index}"
    return shared_arguments(planned, path, {LIMIT_PATH: str(planned.seconds), CLOCK_PATH: f"{folder}/used"})


# ---------------------------------------------------------------------------------------------------------- the objects


def _job(planned: Planned, name: str, pod: Mapping[str, Any]) -> dict[str, Any]:
    settings, job, layout = planned.settings, planned.job, planned.layout
    nodes = job.resources.instance_count
    for key in job.tags:
        if key.startswith("cloudtrain."):
            raise SpecError("tags that begin with cloudtrain. are not yours to set", field=f"tags.{key}")
    labels = {
        **settings.labels,
        MANAGED_BY: "cloudtrain",
        LABEL_RUN: run_tag(layout.run),
        "cloudtrain.dev/run-id": layout.run_id,
        "cloudtrain.dev/attempt": str(planned.attempt),
        **({QUEUE: settings.queue} if settings.queue else {}),
    }
    annotations = {
        RUN_URL: layout.run,
        "cloudtrain.dev/name": job.name,
        "cloudtrain.dev/tags": json.dumps(dict(sorted(job.tags.items()))),
        "cloudtrain.dev/origin": json.dumps(dict(layout.origin)),
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [AGAIN]}},
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": [AGAIN]}},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": dict(labels),
            "annotations": annotations,
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimitPerIndex": 3,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": planned.seconds + settings.pending,
            "ttlSecondsAfterFinished": settings.ttl,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": dict(labels), "annotations": _pod_annotations(settings, planned.gpu)},
                "spec": pod,
            },
        },
    }


def _jobset(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JobSet that makes ``job`` once and never again, and a headless Service.

    The Job's own ttl is left out: a Job that is deleted before the controller has seen its end would be made again.
    """
    meta, spec = job["metadata"], {**job["spec"]}
    own = {key: value for key, value in meta["labels"].items() if key != QUEUE}  # Kueue holds the JobSet, not its Job
    network = {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": spec["template"]["spec"]["subdomain"],
    }
    ttl = spec.pop("ttlSecondsAfterFinished")
    template = {"metadata": {"labels": own, "annotations": dict(meta["annotations"])}, "spec": spec}
    return {
        "apiVersion": f"{JOBSETS}/v1alpha2",
        "kind": "JobSet",
        "metadata": {**meta, "name": meta["name"].removesuffix(OF_SET)},
        "spec": {
            "network": network,
            "ttlSecondsAfterFinished": ttl,
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
        },
    }


def _pod_annotations(settings: Settings, gpu: Gpu | None) -> dict[str, str]:
    """Return the annotations that keep other programs from taking or changing a training node, and the user's."""
    return {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "sidecar.istio.io/inject": "false",
        **({"gke-gcsfuse/volumes": "true"} if settings.bucket.startswith("gs:") else {}),
        **settings.annotations,
        **(devices.hami_annotations(settings) if gpu is not None else {}),
    }


def _pod(planned: Planned, *, name: str, service: str) -> dict[str, Any]:
    s, job, gpu = planned.settings, planned.job, planned.gpu
    wanted = job.resources
    machine = {"node.kubernetes.io/instance-type": wanted.instance_type} if wanted.instance_type else {}
    expressions = devices.gpu_selector(s, gpu)
    # By name, one value each: the label kubernetes.io/hostname may differ from the name.
    names = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in s.exclude]
    term = {key: rules for key, rules in (("matchExpressions", expressions), ("matchFields", names)) if rules}
    terms = {"nodeSelectorTerms": [term]}
    shm = {"sizeLimit": f"{wanted.shm_gb}G"} if wanted.shm_gb else {}
    disk = {"sizeLimit": f"{wanted.disk_gb}G"} if wanted.disk_gb else {}
    volume = {"persistentVolumeClaim": {"claimName": s.claim}} if s.claim else dict(s.volume)
    secrets = {"name": "secrets", "secret": {"secretName": name, "defaultMode": 0o444}}
    optional: dict[str, Any] = {
        "serviceAccountName": s.service_account,
        "imagePullSecrets": [{"name": item} for item in s.image_pull_secrets],
        "nodeSelector": {**s.node_selector, **devices.spot_selector(s, wanted.spot), **machine},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}} if term else {},
        "tolerations": devices.tolerations(s, gpu, wanted.spot),
        "priorityClassName": s.priority_class,
        "runtimeClassName": s.runtime_class,
        "schedulerName": s.scheduler_name,
        "hostNetwork": s.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if s.host_network else "",
        "securityContext": {
            **({"runAsUser": s.user, "fsGroup": s.user} if s.user else {}),
            **({"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}} if s.security else {}),
        },
    }
    return {
        "restartPolicy": "Never",
        "subdomain": service,
        "enableServiceLinks": False,
        "automountServiceAccountToken": bool(s.service_account),
        "terminationGracePeriodSeconds": s.stop_grace + EXTRA_GRACE,
        "activeDeadlineSeconds": min(planned.seconds + JOIN, validate.INT32),
        **{key: value for key, value in optional.items() if value},
        "volumes": [
            {"name": "shared", **volume},
            {"name": "scratch", "emptyDir": disk},
            {"name": "shm", "emptyDir": {"medium": "Memory", **shm}},
            *([secrets] if job.secrets else []),
        ],
        "containers": [_container(planned, host=f"{name}-0.{service}")],
    }


def _container(planned: Planned, *, host: str) -> dict[str, Any]:
    settings, job, gpu = planned.settings, planned.job, planned.gpu
    wanted = job.resources
    limits = {
        **({"cpu": str(wanted.cpus)} if wanted.cpus else {}),
        **({"memory": f"{wanted.memory_gb}G"} if wanted.memory_gb else {}),
        **({"ephemeral-storage": f"{wanted.disk_gb}G"} if wanted.disk_gb else {}),
        **devices.gpu_limits(settings, gpu),
    }
    env = {NODES: str(wanted.instance_count), HOST: host if wanted.instance_count > 1 else "127.0.0.1"}
    if gpu is None:
        env["NVIDIA_VISIBLE_DEVICES"] = "void"  # else a CUDA image sees every GPU on some clusters
    command = python_command(_words(planned))
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts = [("shared", settings.root), ("scratch", SCRATCH), ("shm", SHM)]
    mounts += [("secrets", SECRETS)] if job.secrets else []
    return {
        "name": CONTAINER,
        "image": job.image,
        **({"imagePullPolicy": settings.image_pull_policy} if settings.image_pull_policy else {}),
        "command": command[:3],
        "args": command[3:],
        "env": [
            *({"name": key, "value": value} for key, value in env.items()),
            {"name": MACHINE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"limits": limits, "requests": dict(limits)},
        **({"securityContext": closed} if settings.security else {}),
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts],
    }


def _service(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the headless Service that gives each pod a name: ``JOB-INDEX.NAME``."""
    meta = job["metadata"]
    annotations = {RUN_URL: meta["annotations"][RUN_URL]}
    own = {"namespace": meta["namespace"], "labels": dict(meta["labels"]), "annotations": annotations}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, **own},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": meta["name"]},
        },
    }
