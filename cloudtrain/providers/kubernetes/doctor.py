"""Check a cluster for ``doctor``: caller, rights, version, volume, identity, GPUs, nodes, Kueue, the request.

Nothing is created. ``doctor --job`` looks at the volume from a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import AuthError, NotFoundError, SpecError
from ...provider_api.checks import Check, failed, installed, ok, passed, skipped, tried, unknown
from .._cloud import check_gpus, check_request
from . import NAME
from .api import HELP
from .request import JOBSETS, job_object, marks_of, volume_url
from .validate import quantity_of

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from .api import Account

RIGHTS = (
    *(("batch", "jobs", verb) for verb in ("get", "patch")),
    ("", "services", "create"),
    ("", "secrets", "create"),
    *(("", "pods", verb) for verb in ("list", "patch")),
    ("", "pods/log", "get"),
    ("", "events", "list"),
)
"""The (group, resource, verb) that a run needs: the smallest Role with which one ran."""
_OWN = {
    "job": (("batch", "jobs", "create"),),
    "jobset": tuple((JOBSETS, "jobsets", verb) for verb in ("create", "get", "patch")),
}
"""The further ones, by `Settings.kind`."""
IDENTITIES = {
    "iam.gke.io/gcp-service-account": "Google's",
    "eks.amazonaws.com/role-arn": "AWS's role",
    "azure.workload.identity/client-id": "Azure's client",
}
"""Annotations of a ServiceAccount that name its identity. EKS Pod Identity, and a principal of GKE, need none.

Source: the page on labels and annotations of azure-workload-identity, and guides on IRSA and GKE's Workload Identity.
"""
AZURE_LABEL = "azure.workload.identity/use"
KUEUE = ("v1beta2", "v1beta1")
"""Versions of Kueue's API: 0.20 serves no v1beta1 (its issue #13957), and those before 0.15 have no v1beta2."""
OLDEST = 29
"""The oldest minor version of Kubernetes 1 whose Jobs have ``backoffLimitPerIndex`` by default."""


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """Yield the checks of `doctor`."""
    needed: list[Iterable[Check]] = [
        [installed(("kubernetes",), extra=NAME)],
        tried("cluster", lambda: _cluster(account)),
    ]
    if account.settings.kind == "jobset":
        needed.append(tried("jobset", lambda: _jobset(account)))
    if not (yield from passed(*needed)):
        return
    yield from tried("rights", lambda: _rights(account))
    yield from tried("shared volume", lambda: _volume(account, store), extra=True)
    if account.settings.service_account:
        yield from tried("service account", lambda: _service_account(account), extra=True)
    none = f"no node has {account.settings.gpu_resource} now; an autoscaler may add one"
    yield from tried("gpus", lambda: check_gpus(account, none=none), extra=True)
    yield from tried("nodes", lambda: _nodes(account, request), extra=True)
    yield from tried("queue", lambda: _queue(account), extra=True)
    yield from tried("request", lambda: check_request(request, account.test))


def _cluster(account: Account) -> Check:
    found = account.call("GET", "/version", what="ask for the version")
    minor = int("".join(filter(str.isdigit, str(found.get("minor", "")))) or 0)
    said = f"{found.get('gitVersion')}, as {account.principal()}, namespace {account.settings.namespace}"
    if minor < OLDEST:
        return failed("cluster", said, fix=f"use a cluster of version 1.{OLDEST} or newer", code=2)
    return ok("cluster", said)


def _jobset(account: Account) -> Check:
    try:
        account.call("GET", f"/apis/{JOBSETS}/v1alpha2", what="look for JobSet")
    except NotFoundError:
        return failed("jobset", "the cluster has no JobSet", fix=HELP["jobset"], code=SpecError.exit_code)
    return ok("jobset", f"{JOBSETS}/v1alpha2 is installed")


def _rights(account: Account) -> Check:
    namespace, wanted = account.settings.namespace, (*_OWN[account.settings.kind], *RIGHTS)
    lacking = [
        f"{verb} {resource}"
        for group, resource, verb in wanted
        if not account.may(verb, group, resource, namespace=namespace)
    ]
    if lacking:
        text = f"in namespace {namespace} you may not {', '.join(lacking)}"
        fix = "ask the cluster's administrator for a Role with these: the page on Kubernetes has one"
        return failed("rights", text, fix=fix, code=AuthError.exit_code)
    return ok("rights", f"all {len(wanted)} that a run needs in namespace {namespace}")


def _volume(account: Account, store: str) -> Check:
    """Check that the claim is bound, and that the store is on the volume."""
    own = account.settings
    if store and own.root and not f"{store}/".startswith(f"{volume_url(own)}/"):
        raise SpecError(f"{store} is not on the nodes' volume, {volume_url(own)}", field="store")
    if not own.claim:
        return skipped("shared volume", "kubernetes.claim is not set")
    found = _get(account, "PersistentVolumeClaim", own.claim, field="claim", listed="pvc")
    phase, modes = found["status"].get("phase"), found["spec"].get("accessModes") or ()
    if "ReadWriteMany" not in modes:
        fix = "choose a claim with the access mode ReadWriteMany"
        text = f"{own.claim} is {', '.join(modes)}: only one machine can use it"
        return failed("shared volume", text, fix=fix, code=2)
    return ok("shared volume", f"{own.claim} is {phase}; doctor --job looks at it from a node")


def _get(account: Account, kind: str, name: str, *, field: str, listed: str) -> Mapping[str, Any]:
    """Return an object of the namespace that a setting names. Raises `SpecError` if it is missing."""
    namespace = account.settings.namespace
    try:
        return account.get(kind, namespace, name)
    except NotFoundError:
        hint = f"to list them, run: kubectl get {listed} -n {namespace}"
        raise SpecError(f"{name!r} is no {kind} in {namespace}", field=f"{NAME}.{field}", hint=hint) from None


def _service_account(account: Account) -> Check:
    """Check that the pods' ServiceAccount exists, and say which identity it names. Without it no pod starts."""
    own, what = account.settings, "service account"
    found = _get(account, "ServiceAccount", own.service_account, field="service_account", listed="serviceaccounts")
    given = marks_of(found)
    named = [f"{words} {given[name]}" for name, words in IDENTITIES.items() if name in given]
    if "azure.workload.identity/client-id" in given and own.labels.get(AZURE_LABEL) != "true":
        fix = f'set {NAME}.labels to {{"{AZURE_LABEL}" = "true"}}'
        return failed(what, f"{own.service_account} is {named[-1]}, but the pods lack Azure's label", fix=fix, code=2)
    return ok(what, f"{own.service_account}, {', '.join(named) or 'which names no identity of a cloud'}")


def _nodes(account: Account, request: Request | None) -> Check:
    """Check that a node of the cluster, while no other pod is on it, can hold one of the job's."""
    if request is None:
        return skipped("nodes", "there is no plan")
    pod = job_object(request)["spec"]["template"]["spec"]
    lacks = [_lack(node, pod, account.settings.gpu_resource) for node in account.nodes()]
    if "" in lacks:
        return ok("nodes", f"{lacks.count('')} of {len(lacks)} can hold a node of the job while they are empty")
    why = ", ".join(f"{count} by {lack}" for lack, count in Counter(lacks).most_common())
    return unknown("nodes", f"none of {len(lacks)} can hold a node of the job ({why}); an autoscaler may add one")


def _lack(node: Mapping[str, Any], pod: Mapping[str, Any], gpu: str) -> str:
    """Return what keeps a pod off a node without other pods: a label, a taint or a resource; empty if nothing does."""
    labels, size = node["metadata"].get("labels") or {}, node["status"].get("allocatable") or {}
    affinity = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [rule for term in affinity.get("nodeSelectorTerms", ()) for rule in term.get("matchExpressions", ())]
    wanted = {rule["key"]: rule["values"] for rule in terms if rule["operator"] == "In"}
    for key, values in {**wanted, **{key: [value] for key, value in pod.get("nodeSelector", {}).items()}}.items():
        if labels.get(key) not in values:
            return f"label {key}, which is {labels.get(key, 'missing')}"
    for taint in node["spec"].get("taints") or ():
        if taint["effect"] != "PreferNoSchedule" and not any(_accepts(item, taint) for item in pod["tolerations"]):
            return f"taint {taint['key']}"
    limits = pod["containers"][0]["resources"]["limits"]  # HAMi's other resources are not a node's
    sizes = {name: limits[name] for name in ("cpu", "memory", "ephemeral-storage", gpu) if name in limits}
    return next(
        (name for name, value in sizes.items() if quantity_of(size.get(name, 0), "") < quantity_of(value, "")), ""
    )


def _accepts(item: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Return whether a toleration accepts a taint."""
    same = item.get("operator") == "Exists" or item.get("value", "") == taint.get("value", "")
    return item.get("key") in (None, "", taint["key"]) and item.get("effect") in (None, "", taint["effect"]) and same


def _queue(account: Account) -> Check:
    own = account.settings
    if not own.queue:
        return skipped("queue", "kubernetes.queue is not set")
    for version in KUEUE:
        path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{own.namespace}/localqueues/{own.queue}"
        with suppress(NotFoundError):
            found = account.call("GET", path, what="look for the LocalQueue")
            return ok("queue", f"{own.queue} of cluster queue {found['spec'].get('clusterQueue')}")
    hint = f"to list them, run: kubectl get localqueues -n {own.namespace}"
    raise SpecError(f"{own.queue!r} is no LocalQueue of Kueue in {own.namespace}", field=f"{NAME}.queue", hint=hint)
