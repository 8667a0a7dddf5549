"""Check an account for ``doctor``: caller, API, agency, bucket, quota, flavor. Nothing is created.

The answers of a real account are unverified.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import AuthError, CloudtrainError, QuotaError, SpecError, StorageError
from ...provider_api.checks import Check, failed, installed, ok, passed, skipped, tried, unknown
from ...storage.files import files
from ...validate import url_scheme
from . import NAME
from .api import HELP
from .request import POOL_FLAVORS

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from .api import Account


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """Yield the checks of `doctor`."""
    packages = installed(("obstore",), extra=NAME)
    if not (yield from passed([packages], tried("credentials", lambda: _caller(account)))):
        return
    yield from tried("api", lambda: _api(account))
    yield from tried("authorization", lambda: _authorization(account), extra=True)
    yield from tried("bucket", lambda: _bucket(account, store))
    yield from tried("quota", lambda: _quota(account), extra=True)
    if request is None:
        yield skipped("flavor", "there is no plan, so no machine is named")
        yield skipped("image", "there is no plan")
        return
    resource = request.body["spec"]["resource"]
    yield from tried("flavor", lambda: _flavor(account, resource), extra=True)
    image = request.body["algorithm"]["engine"]["image_url"]
    yield unknown("image", f"whether SWR has {image}; to check, run: docker pull")


def _caller(account: Account) -> Check:
    who = "an IAM token" if account.token else f"access key {account.keys().ak}"
    where = f"project {account.settings.project_id}, region {account.settings.region}"
    return ok("credentials", f"{who}, {where}")


def _api(account: Account) -> Check:
    """Check that a list of jobs is answered: key, project and region are right."""
    for name in ("region", "project_id"):
        if not getattr(account.settings, name):
            raise SpecError("is not set", field=f"{NAME}.{name}")
    next(iter(account.list_jobs("cloudtrain-doctor")), None)
    return ok("api", f"ModelArts answers in {account.settings.region}")


def _authorization(account: Account) -> Check:
    """Check that ModelArts has an agency, without which it reaches neither OBS nor SWR."""
    answer = account.call("GET", "authorizations", what="list authorizations")
    if not answer.get("auth"):
        why = "ModelArts has no agency of this account, so jobs reach neither OBS nor SWR"
        return failed("authorization", why, fix=HELP["agency"], code=AuthError.exit_code)
    return ok("authorization", "ModelArts has an agency of this account")


def _bucket(account: Account, store: str) -> Check:
    if not store:
        return skipped("bucket", "the location of the store is unknown")
    if url_scheme(store) != "obs":
        fix = f'add to cloudtrain.toml: store = "obs://BUCKET/PREFIX", a bucket in {account.settings.region}'
        return failed("bucket", f"its nodes see OBS, not {store}", fix=fix, code=SpecError.exit_code)
    name, region = urlsplit(store).netloc, account.settings.region
    try:
        files(f"obs://{name}", storage=account.storage).names("")
    except StorageError as exc:
        fix = f"make it in {region}, or set store to another one: console, Object Storage Service"
        return failed("bucket", str(exc), fix=fix, code=StorageError.exit_code)
    return ok("bucket", f"{name} answers in {region}")


def _quota(account: Account) -> Check:
    rows: Any = account.call("GET", "training-quotas", what="list quotas").get("quotas") or ()
    row = next((row for row in rows if row.get("resource") == "job-num"), None)
    if row is None:
        return unknown("quota", "ModelArts names no quota of jobs")
    quota, used = int(row.get("quota") or 0), int(row.get("used") or 0)
    if 0 <= quota <= used:
        return failed("quota", f"{used} of {quota} jobs", fix=HELP["quota"], code=QuotaError.exit_code)
    return ok("quota", f"{used} of {quota} jobs; the number of cards has no quota that the API names")


def _flavor(account: Account, resource: Any) -> Check:
    name, nodes = str(resource.get("flavor_id") or ""), int(resource["node_count"])
    if resource.get("pool_id"):
        known = name in POOL_FLAVORS.values() or not name
        why = f"{name or 'a part of a node'} of pool {resource['pool_id']}"
        return ok("flavor", why) if known else unknown("flavor", why)
    try:
        found = account.call("GET", "training-job-flavors", what="list flavors").get("flavors") or ()
    except CloudtrainError as exc:
        return unknown("flavor", str(exc))
    row = next((row for row in found if row.get("flavor_id") == name), None)
    if row is None:
        there = ", ".join(sorted(str(row.get("flavor_id")) for row in found)) or "none"
        fix = f"choose one with --instance-type: {there}"
        return failed("flavor", f"the region has no flavor {name}", fix=fix, code=SpecError.exit_code)
    if nodes > int(row.get("max_num") or nodes):
        why = f"{name} takes at most {row['max_num']} nodes, the job has {nodes}"
        return failed("flavor", why, fix="choose another flavor, or fewer nodes", code=SpecError.exit_code)
    return ok("flavor", f"the region has {name}, for {row.get('max_num')} nodes at most")
