"""Check a Job before it is sent, by the rules of a real API server. Pure.

Sources: the answers of Kubernetes 1.36.2 to 67 manifests, and its API reference. A field that is missing in the tables
here is a word that the server refuses too: requests are sent with ``fieldValidation=Strict``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from ...errors import SpecError
from ...validate import choice_of, near_or_all, whole_number
from . import NAME

__all__ = [
    "INT32",
    "check_body",
    "check_key",
    "check_labels",
    "check_name",
    "check_tolerations",
    "check_volume",
    "label_text",
]

LONGEST = 63
"""Characters of a label's value, and of the name part of a key."""
INT32 = 2**31 - 1
"""Largest whole number of most fields."""
LONGEST_NAME, ANNOTATIONS = 253, 262_144
"""Characters of an object's name, and bytes of all annotations of one object."""
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([eE][+-]?\d+|k|Ki|[MGTPE]i?|[num])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LABEL_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[ -<>-~]+")
"""Name of an environment variable: printable ASCII without ``=``."""
_UNITS = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000) ** (power + 2) for power, unit in enumerate("MGTPE")}
_UNITS |= {f"{unit}i": Decimal(1024) ** (power + 1) for power, unit in enumerate("KMGTPE")}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_JOB = _words(
    """
    activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy manualSelector
    maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector successPolicy suspend template
    ttlSecondsAfterFinished scheduling
    """
)
_POD = _words(
    """
    activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks
    ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride imagePullSecrets
    initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName readinessGates
    resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates securityContext
    serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain
    terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes workloadRef schedulingGroup
    """
)
_CONTAINER = _words(
    """
    args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy
    resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath
    terminationMessagePolicy tty volumeDevices volumeMounts workingDir
    """
)

_SERVICE = _words(
    """
    allocateLoadBalancerNodePorts clusterIP clusterIPs externalIPs externalName externalTrafficPolicy
    healthCheckNodePort internalTrafficPolicy ipFamilies ipFamilyPolicy loadBalancerClass loadBalancerIP
    loadBalancerSourceRanges ports publishNotReadyAddresses selector sessionAffinity sessionAffinityConfig
    trafficDistribution type
    """
)
_SOURCES: Mapping[str, str] = {
    **dict.fromkeys(
        _words(
            """
            awsElasticBlockStore azureDisk azureFile cephfs cinder configMap downwardAPI emptyDir ephemeral fc
            flexVolume flocker gcePersistentDisk gitRepo glusterfs image iscsi photonPersistentDisk portworxVolume
            projected quobyte rbd scaleIO secret storageos vsphereVolume
            """
        ),
        "",
    ),
    "csi": "driver / readOnly fsType volumeAttributes nodePublishSecretRef",
    "hostPath": "path / type",
    "nfs": "server path / readOnly",
    "persistentVolumeClaim": "claimName / readOnly",
}
"""Kinds of a pod's volume: the texts that each needs, and behind the slash its other fields."""
_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(
        _words(
            """
            dnsPolicy hostname image imagePullPolicy nodeName preemptionPolicy priorityClassName runtimeClassName
            schedulerName serviceAccountName terminationMessagePath terminationMessagePolicy workingDir
            """
        ),
        (str, "text"),
    ),
    **dict.fromkeys(
        _words(
            """
            automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers setHostnameAsFQDN
            shareProcessNamespace stdin stdinOnce tty
            """
        ),
        (bool, "true or false"),
    ),
    "priority": (int, "a whole number"),
}
"""The types of a pod's and a container's plain fields."""
_META = _words("name namespace labels annotations finalizers ownerReferences")
_TOLERATION = _words("key operator value effect tolerationSeconds")
_EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
_OPERATORS = ("", "Equal", "Exists", "Lt", "Gt")


# ----------------------------------------------------------------------------------------------------- names and values


def label_text(value: Any) -> str:
    """Return the text that a setting's value has as a label: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_name(name: Any, where: str) -> None:
    """Raise `SpecError` for text that no object of Kubernetes can be called."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        hint = "use small letters, digits, dashes and dots"
        raise SpecError(f"{name!r} is not the name of an object", field=where, hint=hint)


def check_key(key: Any, where: str) -> None:
    """Raise `SpecError` for text that is no name of a label, an annotation or a resource."""
    if not isinstance(key, str) or not _KEY.fullmatch(key) or len(key.rpartition("/")[2]) > LONGEST:
        raise SpecError("is not a label's name", field=where, hint="for example: team, example.com/team")


def check_labels(table: Any, where: str, *, values: bool = True) -> None:
    """Raise `SpecError` for a key or value that Kubernetes refuses. ``values``: they are a label's, not free text."""
    if not isinstance(table, Mapping):
        raise SpecError("must be a table", field=where)
    for key, value in table.items():
        check_key(key, f"{where}.{key}")
        if not isinstance(value, (str, int, float)):
            raise SpecError(f"must be text, not {value!r}", field=f"{where}.{key}")
        text = label_text(value)
        if values and not (_VALUE.fullmatch(text) and len(text) <= LONGEST):
            why = f"{value!r} is not a label's value: at most {LONGEST} of letters, digits, dots, dashes, underscores"
            raise SpecError(why, field=f"{where}.{key}")
    size = sum(len(str(item).encode()) for pair in table.items() for item in pair)
    if not values and size > ANNOTATIONS:
        raise SpecError(f"has {size} bytes, and Kubernetes takes at most {ANNOTATIONS}", field=where)


def check_volume(volume: Any, where: str) -> None:
    """Raise `SpecError` for a pod's volume, without its name, that Kubernetes refuses."""
    hint = 'for example { nfs = { server = "nas.example", path = "/training" } }'
    if not isinstance(volume, Mapping) or len(volume) != 1:
        raise SpecError("must be a table with one kind of volume", field=where, hint=hint)
    for kind, source in volume.items():
        if kind not in _SOURCES:
            raise SpecError("is no kind of volume", field=f"{where}.{kind}", hint=near_or_all(kind, _SOURCES))
        if not isinstance(source, Mapping):
            raise SpecError("must be a table", field=f"{where}.{kind}", hint=hint)
        needed, slash, others = _SOURCES[kind].partition("/")
        if slash:
            _known(source, _words(needed + others), f"{where}.{kind}")
        for name in needed.split():
            if not isinstance(source.get(name), str) or not source[name]:
                raise SpecError("must be text", field=f"{where}.{kind}.{name}")
        if kind == "nfs" and not source["path"].startswith("/"):
            raise SpecError(f"{source['path']!r} does not begin with /", field=f"{where}.nfs.path")


def check_tolerations(found: Any, where: str) -> None:
    """Raise `SpecError` for a list of tolerations that Kubernetes refuses."""
    for number, item in enumerate(_tables(found, where)):
        place = f"{where}.{number}"
        _known(item, _TOLERATION, place)
        choice_of(item.get("operator", ""), _OPERATORS, f"{place}.operator")
        choice_of(item.get("effect", ""), _EFFECTS, f"{place}.effect")
        if item.get("key"):
            check_key(item["key"], f"{place}.key")
        elif item.get("operator") != "Exists":
            raise SpecError("is empty, which only operator Exists may have", field=f"{place}.key")
        _texts({"value": item.get("value", "")}, place)
        if item.get("operator") == "Exists" and item.get("value"):
            raise SpecError("must be empty with operator Exists", field=f"{place}.value")
        check_labels({"value": item.get("value", "")}, place)
        if "tolerationSeconds" in item:
            whole_number(item["tolerationSeconds"], f"{place}.tolerationSeconds", least=-INT32)
            if item.get("effect") != "NoExecute":
                raise SpecError("needs effect NoExecute", field=f"{place}.tolerationSeconds")


# ------------------------------------------------------------------------------------------------------------- the body


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError` for what the API server would refuse, named by its place in a job's ``options``."""
    where = f"options.{NAME}.items"
    for number, item in enumerate(body["items"]):
        _known(item, frozenset(("apiVersion", "kind", "metadata", "spec")), f"{where}.{number}")
        _check_meta(item["metadata"], _META, f"{where}.{number}.metadata")
    job, *services = body["items"]
    for number, service in enumerate(services, 1):
        _known(service["spec"], _SERVICE, f"{where}.{number}.spec")
    where = f"{where}.0.spec"
    spec = _known(job["spec"], _JOB, where)
    if "backoffLimit" in spec:
        raise SpecError("backoffLimitPerIndex is set", field=f"{where}.backoffLimit", hint="leave it out")
    whole_number(spec["ttlSecondsAfterFinished"], f"{where}.ttlSecondsAfterFinished", least=0, most=INT32)
    _known(spec["template"], frozenset(("metadata", "spec")), f"{where}.template")
    _check_meta(spec["template"]["metadata"], frozenset(("labels", "annotations")), f"{where}.template.metadata")
    _check_pod(_known(spec["template"]["spec"], _POD, f"{where}.template.spec"), f"{where}.template.spec")


def _check_meta(meta: Any, names: frozenset[str], where: str) -> None:
    _known(meta, names, where)
    for kind in ("labels", "annotations"):
        check_labels(meta.get(kind, {}), f"{where}.{kind}", values=kind == "labels")
        _texts(meta.get(kind, {}), f"{where}.{kind}")


def _check_types(table: Mapping[str, Any], where: str) -> None:
    for name, value in table.items():
        kind, words = _TYPES.get(name, (object, ""))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SpecError(f"must be {words}, not {value!r}", field=f"{where}.{name}")


def _check_pod(pod: Mapping[str, Any], where: str) -> None:
    _check_types(pod, where)
    _check_amounts(pod.get("overhead", {}), f"{where}.overhead")
    check_labels(pod.get("nodeSelector", {}), f"{where}.nodeSelector")
    _texts(pod.get("nodeSelector", {}), f"{where}.nodeSelector")
    check_tolerations(pod.get("tolerations", []), f"{where}.tolerations")
    volumes = _tables(pod["volumes"], f"{where}.volumes")
    for number, volume in enumerate(volumes):
        place = f"{where}.volumes.{number}"
        _check_label_name(volume.get("name"), place)
        check_volume({key: value for key, value in volume.items() if key != "name"}, place)
    named = {
        "volumes": [volume["name"] for volume in volumes],
        "resourceClaims": [item.get("name") for item in _tables(pod.get("resourceClaims", []), where)],
        "containers": [],
    }
    for kind in ("containers", "initContainers"):
        place = f"{where}.{kind}"
        for number, container in enumerate(_tables(pod.get(kind, []), place)):
            _check_container(container, named, f"{place}.{number}")
            named["containers"].append(container["name"])
    for kind, names in named.items():
        if len(set(names)) < len(names):
            raise SpecError("has one name twice", field=f"{where}.{kind}")


def _check_container(container: Mapping[str, Any], named: Mapping[str, list[Any]], where: str) -> None:
    _known(container, _CONTAINER, where)
    _check_label_name(container.get("name"), where)
    _check_types({"image": None, **container}, where)
    _check_resources(container.get("resources", {}), named["resourceClaims"], f"{where}.resources")
    paths = set()
    for mount in _tables(container.get("volumeMounts", []), f"{where}.volumeMounts"):
        if mount.get("name") not in named["volumes"]:
            raise SpecError(f"{mount.get('name')!r} is no volume of the pod", field=f"{where}.volumeMounts")
        path = mount.get("mountPath")
        if not path or path in paths:
            raise SpecError(f"must have a mountPath of its own, not {path!r}", field=f"{where}.volumeMounts")
        paths.add(path)
    for item in _tables(container.get("env", []), f"{where}.env"):
        if not isinstance(item.get("name"), str) or not _VARIABLE.fullmatch(item["name"]):
            raise SpecError(f"{item.get('name')!r} is not the name of a variable", field=f"{where}.env")
        if not isinstance(item.get("value", ""), str):
            raise SpecError(f"must be text, not {item['value']!r}", field=f"{where}.env", hint="put it in quotes")


def _check_label_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name):
        hint = "use at most 63 small letters, digits and dashes"
        raise SpecError(f"{name!r} is not the name of a container or volume", field=f"{where}.name", hint=hint)


def _texts(table: Mapping[str, Any], where: str) -> None:
    for name, value in table.items():
        if not isinstance(value, str):
            raise SpecError(f"must be text, not {value!r}", field=f"{where}.{name}", hint="put it in quotes")


def _tables(value: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise SpecError("must be a list of tables", field=where)
    return value


def _known(table: Any, names: frozenset[str], where: str) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise SpecError("must be a table", field=where)
    for name in table:
        if name not in names:
            raise SpecError("is no field of Kubernetes here", field=f"{where}.{name}", hint=near_or_all(name, [*names]))
    return table


def _check_resources(resources: Any, claims: list[Any], where: str) -> None:
    _known(resources, frozenset(("limits", "requests", "claims")), where)
    for claim in _tables(resources.get("claims", []), f"{where}.claims"):
        if claim.get("name") not in claims:
            raise SpecError(f"{claim.get('name')!r} is no resource claim of the pod", field=f"{where}.claims")
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for kind, found in (("limits", limits), ("requests", requests)):
        _check_amounts(found, f"{where}.{kind}")
    for name, value in requests.items():
        field = f"{where}.requests.{name}"
        if "/" in name or name.startswith("hugepages-"):  # these cannot be shared out twice
            if name not in limits or _number(limits[name]) != _number(value):
                raise SpecError("must be equal to the limit", field=field)
        elif name in limits and _number(value) > _number(limits[name]):
            raise SpecError(f"{value!r} is more than the limit, {limits[name]!r}", field=field)
    pages = next((name for name in (*limits, *requests) if name.startswith("hugepages-")), "")
    if pages and not {"cpu", "memory"} & {*limits, *requests}:
        raise SpecError("needs a limit of cpu or memory too", field=f"{where}.limits.{pages}")


def _check_amounts(found: Any, where: str) -> None:
    if not isinstance(found, Mapping):
        raise SpecError("must be a table", field=where)
    for name, value in found.items():
        _check_quantity(name, value, f"{where}.{name}")


def _check_quantity(name: str, value: Any, field: str) -> None:
    if "/" not in name and name not in ("cpu", "memory", "ephemeral-storage") and not name.startswith("hugepages-"):
        hint = "resources of a device have a domain, like nvidia.com/gpu"
        raise SpecError("is no resource of Kubernetes", field=field, hint=hint)
    check_key(name, field)
    if isinstance(value, bool) or not _QUANTITY.fullmatch(str(value)) or str(value).startswith("-"):
        raise SpecError(f"{value!r} is not a quantity, like 16 or 100Gi", field=field)
    if "/" in name and not str(value).isdecimal():
        raise SpecError(f"must be a whole number, not {value!r}", field=field)


def _number(quantity: Any) -> Decimal:
    """Return the number of a quantity that `_check_quantity` accepts."""
    match = _QUANTITY.fullmatch(str(quantity))
    assert match
    number, unit = Decimal(match[1]), match[2] or ""
    return number * (_UNITS[unit] if unit in _UNITS else Decimal(f"1{unit}"))
