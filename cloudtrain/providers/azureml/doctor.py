"""Check a workspace for ``doctor``: caller, datastore, compute, permissions, quota, environment.

Nothing is created. The calls are documented. The answers of a real workspace are unverified, above all the names that
join its usages to its machine sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ...errors import AuthError, NotFoundError, QuotaError, SpecError
from ...provider_api.checks import Check, failed, installed, ok, passed, skipped, tried, unknown
from ...validate import url_scheme
from .api import HELP, claims_of, named, translated
from .request import LONGEST_LOW
from .sdk import check_datastore, short_idle
from .urls import FSSPEC

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from .api import Account

_KIND = "Microsoft.MachineLearningServices"
ACTIONS = (
    f"{_KIND}/workspaces/read",
    *(f"{_KIND}/workspaces/jobs/{word}" for word in ("read", "write", "cancel/action")),
    f"{_KIND}/workspaces/datastores/read",
)
IMAGE_ACTIONS = tuple(f"{_KIND}/workspaces/environments/{word}" for word in ("read", "write"))
"""Actions of the SDK for a job with an image: it first makes an anonymous environment of it."""
PERMISSIONS = "2022-04-01"
"""Version of Microsoft.Authorization's API of permissions."""
_REGISTRY = re.compile(r"azureml://registries/", re.IGNORECASE)
_OWN = re.compile(r"azureml:(?P<name>[^:@/]+)(?::(?P<version>[^:@/]+)|@(?P<label>\w+))")
_WORDS = re.compile(r"family|clusterdedicatedvcpus|dedicatedvcpus|vcpus|cores|[^a-z0-9]")
_SPOT = re.compile(r"low.?priority", re.IGNORECASE)


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """Yield the checks of `doctor`."""
    place: dict[str, Any] = {}
    packages = installed(("azure-ai-ml", "azure-identity", "obstore"), extra="azureml")
    caller = tried("credentials", lambda: _caller(account))
    if not (yield from passed([packages], caller, tried("workspace", lambda: _workspace(account, place)))):
        return
    yield from tried("datastore", lambda: _datastore(account, store))
    size: dict[str, str] = {}
    yield from tried("compute", lambda: _compute(account, size, place, request))
    yield from tried("permissions", lambda: _permissions(account, request), extra=True)
    if request is None:
        yield skipped("quota", "there is no plan, so no machine is named")
        yield skipped("environment", "there is no plan")
        return
    yield from tried("quota", lambda: _quota(account, request, place["location"], size.get("vm", "")), extra=True)
    yield from tried("environment", lambda: _environment(account, request.body.get("environment")), extra=True)


def _caller(account: Account) -> Check:
    """Check the sign-in and name the caller."""
    with translated("sign in"):
        token = str(account.credential.get_token(account.cloud.scope).token)
    claims = claims_of(token)
    if not claims:
        return ok("credentials", "signed in; the token does not say as whom")
    name, tenant = named(token) or "unknown", claims.get("tid") or "unknown"
    return ok("credentials", f"{name}, tenant {tenant}, subscription {account.settings.subscription_id}")


def _workspace(account: Account, place: dict[str, Any]) -> Check:
    workspace = account.call(account.url(account.workspace), what="get workspace")
    place["location"] = str(workspace.get("location") or "").replace(" ", "").lower()
    place["workspace"] = workspace
    kind = (workspace.get("identity") or {}).get("type") or "None"
    said = f"identity {kind}, managed network {_isolation(workspace)}, public access {_access(workspace)}"
    return ok("workspace", f"{account.settings.workspace_name} in {place['location']}; {said}")


def _isolation(workspace: Mapping[str, Any]) -> str:
    return str((workspace["properties"].get("managedNetwork") or {}).get("isolationMode") or "Disabled")


def _access(workspace: Mapping[str, Any]) -> str:
    return str(workspace["properties"].get("publicNetworkAccess") or "Enabled")


def _datastore(account: Account, store: str) -> Check:
    if not store:
        return skipped("datastore", "the location of the store is unknown")
    if url_scheme(store) not in FSSPEC:
        fix = 'add to cloudtrain.toml: store = "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX", of the datastore'
        return failed("datastore", f"its nodes see Azure Storage, not {store}", fix=fix, code=SpecError.exit_code)
    check_datastore(account, store)
    return ok("datastore", f"{account.settings.datastore} is the store's container")


def _compute(
    account: Account, size: dict[str, str], place: Mapping[str, Any], request: Request | None
) -> Iterator[Check]:
    name = account.settings.compute
    if not name:
        yield skipped("compute", "none is set: serverless")
        yield _serverless(account, place["workspace"])
        return
    cluster = account.compute(name)
    size["vm"] = str(cluster.get("vmSize") or "")
    low = _SPOT.search(str(cluster.get("vmPriority") or ""))
    text = f"cluster {name}, of {size['vm'] or 'a size that it does not report'}{', low priority' if low else ''}"
    if low and request is not None and int(request.body["limits"]["timeout"]) > LONGEST_LOW:
        days = LONGEST_LOW // 86400
        text += f": Azure ML ends its jobs after {days} days"
        yield failed("compute", text, fix=f"set max_runtime to at most {days}d", code=SpecError.exit_code)
        return
    if request is not None and (short := short_idle(account.settings, cluster, request)):
        yield failed("compute", short[0], fix=short[1], code=SpecError.exit_code)
        return
    yield ok("compute", text)


def _serverless(account: Account, workspace: Mapping[str, Any]) -> Check:
    """Check Azure's conditions for a workspace whose jobs run serverless (how-to-use-serverless-compute)."""
    if _access(workspace) == "Disabled" and _isolation(workspace) == "Disabled":
        text = "without public access, serverless jobs need a managed network, and the workspace has none"
        fix = "az ml workspace update --managed-network allow_internet_outbound; or set azureml.compute"
        return failed("serverless", text, fix=fix, code=SpecError.exit_code)
    kind, _, client = account.settings.identity.partition(":")
    if kind != "managed_identity":
        return ok("serverless", f"jobs run as {kind or 'aml_token'}")
    given = workspace.get("identity") or {}
    own = given.get("userAssignedIdentities") or {}
    clients = sorted(str((item or {}).get("clientId") or "").lower() for item in own.values())
    system = "SystemAssigned" in str(given.get("type"))
    if client.lower() in clients or (not client and system):
        return ok("serverless", "jobs run as the workspace's own managed identity")
    if not client and workspace["properties"].get("primaryUserAssignedIdentity"):
        return ok("serverless", "jobs run as the workspace's primary managed identity")
    names = (["managed_identity"] if system else []) + [f"managed_identity:{name}" for name in clients]
    has = " or ".join(names)
    text = f"a serverless job can only be the workspace's own identity: {has or 'the workspace has none'}"
    fix = "give the workspace that identity (az ml workspace update); or set azureml.identity, or azureml.compute"
    return failed("serverless", text, fix=fix, code=SpecError.exit_code)


def _permissions(account: Account, request: Request | None) -> Check:
    """Check the sum of the caller's roles on the workspace."""
    path = f"{account.workspace}/providers/Microsoft.Authorization/permissions"
    granted = list(_listed(account, account.url(path, version=PERMISSIONS), what="list permissions"))
    image = request is not None and isinstance(request.body.get("environment"), Mapping)
    needed = (*ACTIONS, *IMAGE_ACTIONS) if image else ACTIONS
    denied = [action for action in needed if not any(_grants(item, action) for item in granted)]
    if denied:
        fix = HELP["role"]
        return failed("permissions", f"not allowed: {', '.join(denied)}", fix=fix, code=AuthError.exit_code)
    return ok("permissions", f"the caller's roles allow {len(needed)} actions on the workspace")


def _listed(account: Account, url: str, *, what: str) -> Iterator[Mapping[str, Any]]:
    """Yield the items of all pages. The token goes to the resource manager alone, so other next pages are dropped."""
    while url:
        page = account.call(url, what=what)
        yield from page.get("value") or []
        url = str(page.get("nextLink") or "")
        url = url if url.startswith(f"{account.cloud.resource_manager}/") else ""


def _grants(item: Mapping[str, Any], action: str) -> bool:
    def among(patterns: Any) -> bool:
        return any(fnmatchcase(action.lower(), str(pattern).lower()) for pattern in patterns or [])

    return among(item.get("actions")) and not among(item.get("notActions"))


def _quota(account: Account, request: Request, location: str, cluster: str) -> Check:
    """Check the cores of the machine's family. Azure ML's quotas are separate from those of Compute.

    For a ``cluster`` (its size) only the limit counts: the cores in use may be its own nodes.
    """
    resources = request.body.get("resources") or {}
    kind, count = cluster or str(resources.get("instance_type") or ""), int(resources.get("instance_count") or 1)
    where = f"/subscriptions/{account.settings.subscription_id}/providers/{_KIND}/locations/{location}"
    sizes = account.call(account.url(f"{where}/vmSizes"), what="list sizes")
    size = next((s for s in sizes.get("value") or [] if str(s.get("name")).lower() == kind.lower()), None)
    if size is None:
        fix = "choose one of: az ml compute list-sizes -o table; or another region"
        return failed("quota", f"{location} has no {kind}", fix=fix, code=QuotaError.exit_code)
    usages = list(_listed(account, account.url(f"{where}/usages"), what="list usages"))
    spot = str((request.body.get("queue_settings") or {}).get("job_tier") or "").lower() == "spot"
    found = next((u for u in usages if _is_for(u, str(size["family"]), spot)), None)
    if found is None:
        what = "low-priority cores" if spot else size["family"]
        return unknown("quota", f"Azure ML's usages in {location} name none for {what}")
    needed, name = int(size["vCPUs"]) * count, str(found["name"].get("localizedValue") or found["name"]["value"])
    used, limit = 0 if cluster else int(found["currentValue"]), int(found["limit"])
    left = limit - used
    text = f"{name}: {left} of {limit} vCPUs are free, {needed} are needed ({count} x {kind})"
    if limit >= 0 and left < needed:  # -1 is no limit
        fix = f"ask for at least {used + needed} vCPUs of it in Studio (Quota) for {location}"
        return failed("quota", text, fix=f"{fix}, or choose another size", code=QuotaError.exit_code)
    return ok("quota", text)


def _is_for(usage: Mapping[str, Any], family: str, spot: bool) -> bool:
    names = [str(usage["name"].get(key) or "") for key in ("value", "localizedValue")]
    low = any(_SPOT.search(name) for name in names)
    return low if spot else not low and any(_bare(name) == _bare(family) for name in names if name)


def _bare(name: str) -> str:
    """Reduce names such as ``Standard NCAST4v3 Family Cluster Dedicated vCPUs`` to ``standardncast4v3``."""
    return _WORDS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


def _environment(account: Account, given: Any) -> Check:
    if isinstance(given, Mapping):
        return unknown("environment", f"image {given.get('image')}: its registry is not asked, a job's start pulls it")
    text = str(given)
    match = _OWN.fullmatch(text)
    if _REGISTRY.match(text) or match is None or not match["version"]:
        return unknown("environment", f"{text} is of a registry, or a label: cloudtrain does not check it")
    path = f"{account.workspace}/environments/{match['name']}/versions/{match['version']}"
    try:
        account.call(account.url(path), what="get environment")
    except (NotFoundError, SpecError):
        fix = "az ml environment list -o table names those there are"
        text = f"the workspace has no environment {match['name']}:{match['version']}"
        return failed("environment", text, fix=fix, code=SpecError.exit_code)
    return ok("environment", f"{match['name']}:{match['version']} is in the workspace")
