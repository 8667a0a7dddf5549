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

__all__ = ["check_job", "check_labels"]

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


def check_job(job: Mapping[str, Any]) -> None:
    """Raise `SpecError` for what the API server would refuse, named by its place in a job's ``options``."""
    where = f"options.{NAME}"
    spec = job["spec"]
    pod = spec["template"]["spec"]
    _known(job, frozenset(("apiVersion", "kind", "metadata", "spec")), where)
    _known(spec, _JOB, f"{where}.spec")
    _known(pod, _POD, f"{where}.spec.template.spec")
    check_labels(spec["template"]["metadata"].get("labels", {}), f"{where}.spec.template.metadata.labels")
    names = [volume.get("name") for volume in pod["volumes"]]
    for number, container in enumerate([*pod["containers"], *pod.get("initContainers", ())]):
        place = f"{where}.spec.template.spec.containers.{number}"
        _known(container, _CONTAINER, place)
        _check_resources(container.get("resources", {}), f"{place}.resources")
        for mount in container.get("volumeMounts", ()):
            if mount.get("name") not in names:
                raise SpecError(f"{mount.get('name')!r} is no volume of the pod", field=f"{place}.volumeMounts")
    if "backoffLimit" in spec:
        raise SpecError("backoffLimitPerIndex is set", field=f"{where}.spec.backoffLimit", hint="leave it out")
    if len(set(names)) < len(names):
        raise SpecError("has one name twice", field=f"{where}.spec.template.spec.volumes")


def _known(table: Any, names: frozenset[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise SpecError("must be a table", field=where)
    for name in table:
        if name not in names:
            raise SpecError("is no field of Kubernetes here", field=f"{where}.{name}", hint=near_or_all(name, [*names]))


def _check_resources(resources: Mapping[str, Any], where: str) -> None:
    for kind in ("limits", "requests"):
        for name, value in resources.get(kind, {}).items():
            field = f"{where}.{kind}.{name}"
            if isinstance(value, bool) or not _QUANTITY.fullmatch(str(value)) or str(value).startswith("-"):
                raise SpecError(f"{value!r} is not a quantity, like 16 or 100Gi", field=field)
            if "/" in name and not str(value).isdecimal():
                raise SpecError(f"must be a whole number, not {value!r}", field=field)
            if "/" in name and kind == "requests" and resources.get("limits", {}).get(name) != value:
                raise SpecError("must be equal to the limit", field=field)
