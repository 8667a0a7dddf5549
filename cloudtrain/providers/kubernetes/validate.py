"""Check a Job before it is sent, by the rules of a real API server. Pure.

Sources: the answers of Kubernetes 1.36.2 to 67 manifests, and its API reference. A field that is missing in the tables
here is a word that the server refuses too: requests are sent with ``fieldValidation=Strict``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import SpecError
from ...validate import near_or_all
from . import NAME

__all__ = ["check_body", "check_labels"]

LONGEST = 63
"""Characters of a label's value, and of the name part of a key."""
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+|[KMGTPE]i?|[numk])?")


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
    terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes workloadRef
    """
)
_CONTAINER = _words(
    """
    args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy
    resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath
    terminationMessagePolicy tty volumeDevices volumeMounts workingDir
    """
)


def check_labels(table: Any, where: str, *, values: bool = True) -> None:
    """Raise `SpecError` for a key or value that Kubernetes refuses. ``values``: they are a label's, not free text."""
    if not isinstance(table, Mapping):
        raise SpecError("must be a table", field=where)
    for key, value in table.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key) or len(key.rpartition("/")[2]) > LONGEST:
            raise SpecError("is not a label's name", field=f"{where}.{key}", hint="for example: team, example.com/team")
        if values and not (_VALUE.fullmatch(str(value)) and len(str(value)) <= LONGEST):
            why = f"{value!r} is not a label's value: at most {LONGEST} of letters, digits, dots, dashes, underscores"
            raise SpecError(why, field=f"{where}.{key}")


def check_body(job: Mapping[str, Any]) -> None:
    """Raise `SpecError` for what the API server would refuse, named by its place in a job's ``options``."""
    where = f"options.{NAME}.items.0"
    _known(job, frozenset(("apiVersion", "kind", "metadata", "spec")), where)
    spec = _known(job["spec"], _JOB, f"{where}.spec")
    _known(spec["template"], frozenset(("metadata", "spec")), f"{where}.spec.template")
    pod = _known(spec["template"]["spec"], _POD, f"{where}.spec.template.spec")
    meta = _known(spec["template"]["metadata"], frozenset(("labels", "annotations")), f"{where}.spec.template.metadata")
    check_labels(meta.get("labels", {}), f"{where}.spec.template.metadata.labels")
    names = [volume.get("name") for volume in _tables(pod["volumes"], f"{where}.spec.template.spec.volumes")]
    if len(set(names)) < len(names):
        raise SpecError("has one name twice", field=f"{where}.spec.template.spec.volumes")
    if "backoffLimit" in spec:
        raise SpecError("backoffLimitPerIndex is set", field=f"{where}.spec.backoffLimit", hint="leave it out")
    for kind in ("containers", "initContainers"):
        place = f"{where}.spec.template.spec.{kind}"
        for number, container in enumerate(_tables(pod.get(kind, []), place)):
            _check_container(container, names, f"{place}.{number}")


def _check_container(container: Mapping[str, Any], volumes: list[Any], where: str) -> None:
    _known(container, _CONTAINER, where)
    resources = container.get("resources", {})
    _check_resources(_known(resources, frozenset(("limits", "requests", "claims")), f"{where}.resources"), where)
    for mount in _tables(container.get("volumeMounts", []), f"{where}.volumeMounts"):
        if mount.get("name") not in volumes:
            raise SpecError(f"{mount.get('name')!r} is no volume of the pod", field=f"{where}.volumeMounts")
    for item in _tables(container.get("env", []), f"{where}.env"):
        if not isinstance(item.get("value", ""), str):
            raise SpecError(f"must be text, not {item['value']!r}", field=f"{where}.env", hint="put it in quotes")


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


def _check_resources(resources: Mapping[str, Any], where: str) -> None:
    for kind in ("limits", "requests"):
        if not isinstance(found := resources.get(kind, {}), Mapping):
            raise SpecError("must be a table", field=f"{where}.resources.{kind}")
        for name, value in found.items():
            field = f"{where}.resources.{kind}.{name}"
            if isinstance(value, bool) or not _QUANTITY.fullmatch(str(value)) or str(value).startswith("-"):
                raise SpecError(f"{value!r} is not a quantity, like 16 or 100Gi", field=field)
            if "/" in name and not str(value).isdecimal():
                raise SpecError(f"must be a whole number, not {value!r}", field=field)
            if "/" in name and kind == "requests" and dict(resources.get("limits", {})).get(name) != value:
                raise SpecError("must be equal to the limit", field=field)
