"""What ``doctor`` can tell of an AWS account: who calls, role, bucket, permissions, quota, image. Nothing is created.

What is asked here is documented; that a true account answers so is unverified.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ...checks import Check, failed, installed, ok, skipped, tried, unknown
from ...errors import AuthError, NotFoundError, QuotaError, SpecError, StorageError
from ...values import url_scheme

if TYPE_CHECKING:
    from ...provider import Request
    from .account import Account

__all__ = ["ACTIONS", "PRINCIPAL", "checks"]

PRINCIPAL = "sagemaker.amazonaws.com"
ACTIONS = (
    *("sagemaker:CreateTrainingJob", "sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"),
    *("sagemaker:ListTags", "sagemaker:AddTags"),
)
"""What a submit, a wait and a cancel call."""
LOGS = "logs:FilterLogEvents"
PASS = "iam:PassRole"
PAGES = 60
"""Of a hundred quotas each; SageMaker has over a thousand."""
_ASSUMED = re.compile(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.*")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/(?:.*/)?(?P<name>[^/]+)")
_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+/(?P<name>[^:@]+)(?P<tag>[:@].+)?"
)


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """See `doctor`."""
    yield (found := installed(("boto3", "s3fs"), extra="sagemaker"))
    if found.status != "ok":
        return
    who: dict[str, Any] = {}
    yield from tried("credentials", lambda: _caller(account, who))
    if not who:
        return
    yield from tried("bucket", lambda: _bucket(account, store))
    yield from tried("role", lambda: _role(account, str(account.settings.role)), extra=True)
    yield from tried("permissions", lambda: _permissions(account, str(who["Arn"])), extra=True)
    if request is None:
        yield skipped("quota", "there is no plan, so no machine is named")
        yield skipped("image", "there is no plan")
        return
    yield from tried("quota", lambda: _quota(account, request.body), extra=True)
    image = str(request.body["AlgorithmSpecification"]["TrainingImage"])
    yield from tried("image", lambda: _image(account, image, str(who["Account"])), extra=True)


def _caller(account: Account, who: dict[str, Any]) -> Check:
    who |= account.call("sts", "get_caller_identity")
    return ok("credentials", f"{who['Arn']}, account {who['Account']}, region {account.settings.region}")


def _bucket(account: Account, store: str) -> Check:
    if not store:
        return skipped("bucket", "where the store is could not be told")
    if url_scheme(store) != "s3":
        fix = "set store to s3://BUCKET/…, a bucket in the jobs' region"
        return failed("bucket", f"its nodes see S3, not {store}", fix=fix, code=SpecError.exit_code)
    name, wanted = urlsplit(store).netloc, account.settings.region
    try:
        there = account.bucket_region(name)
    except NotFoundError:
        fix = f"make it: aws s3 mb s3://{name} --region {wanted}; or set store to another"
        return failed("bucket", f"there is no bucket {name}", fix=fix, code=StorageError.exit_code)
    if not there:
        return unknown("bucket", f"AWS does not say in which region {name} is")
    if there != wanted:
        fix = f"set sagemaker.region to {there}, or make a bucket in {wanted}: aws s3 mb s3://NAME --region {wanted}"
        return failed("bucket", f"{name} is in {there}, the jobs are in {wanted}", fix=fix, code=SpecError.exit_code)
    return ok("bucket", f"{name} is in {there}, as the jobs are")


def _role(account: Account, arn: str) -> Check:
    match = _ROLE.fullmatch(arn)
    if match is None:
        fix = "set sagemaker.role to the ARN of the role that jobs run as (docs/sagemaker.md makes one)"
        return failed("role", f"{arn!r} is not the ARN of a role", fix=fix, code=SpecError.exit_code)
    try:
        role = account.call("iam", "get_role", RoleName=match["name"])["Role"]
    except NotFoundError:
        fix = "make the role (docs/sagemaker.md), or set sagemaker.role to one that there is"
        return failed("role", f"there is no role {match['name']} in this account", fix=fix, code=AuthError.exit_code)
    if str(role["Arn"]) != arn:
        fix = f"set sagemaker.role to {role['Arn']}"
        return failed("role", f"the role of that name is {role['Arn']}", fix=fix, code=AuthError.exit_code)
    trust = role.get("AssumeRolePolicyDocument") or {}
    trust = json.loads(unquote(trust)) if isinstance(trust, str) else trust
    if not _trusts(trust):
        fix = f"add it to the role's trust policy: Principal Service {PRINCIPAL}, Action sts:AssumeRole"
        return failed("role", f"{match['name']} cannot be assumed by SageMaker", fix=fix, code=AuthError.exit_code)
    return ok("role", f"{match['name']} is there, and SageMaker may assume it")


def _trusts(policy: Mapping[str, Any]) -> bool:
    """Whether a trust policy lets SageMaker in; its conditions are not judged."""
    for statement in _list(policy.get("Statement")):
        services = _list(
            (statement.get("Principal") or {}).get("Service") if statement.get("Principal") != "*" else "*"
        )
        actions = [action.lower() for action in _list(statement.get("Action"))]
        allowed = statement.get("Effect") == "Allow" and {"sts:assumerole", "sts:*", "*"} & set(actions)
        if allowed and (PRINCIPAL in services or "*" in services):
            return True
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _permissions(account: Account, arn: str) -> Iterator[Check]:
    """By IAM's own simulator, for the user or role behind the session. (Of a role in a path it finds none.)"""
    match = _ASSUMED.fullmatch(arn)
    source = f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}" if match else arn
    if source.endswith(":root"):
        yield ok("permissions", "the root user of the account may do anything; use another one")
        return
    region, number = account.settings.region, source.split(":")[4]
    partition = source.split(":")[1]
    asked = [
        (list(ACTIONS), f"arn:{partition}:sagemaker:{region}:{number}:training-job/doctor"),
        ([LOGS], f"arn:{partition}:logs:{region}:{number}:log-group:/aws/sagemaker/TrainingJobs:*"),
        ([PASS], str(account.settings.role)),
    ]
    denied = []
    for actions, resource in asked:
        told = account.call(
            "iam",
            "simulate_principal_policy",
            PolicySourceArn=source,
            ActionNames=actions,
            ResourceArns=[resource],
            ContextEntries=[
                {"ContextKeyName": "iam:PassedToService", "ContextKeyValues": [PRINCIPAL], "ContextKeyType": "string"}
            ],
        )
        denied += [r["EvalActionName"] for r in told["EvaluationResults"] if r["EvalDecision"] != "allowed"]
    if denied:
        fix = f"let the policy of {source} allow {', '.join(denied)} (docs/sagemaker.md has one)"
        yield failed("permissions", f"not allowed: {', '.join(denied)}", fix=fix, code=AuthError.exit_code)
    else:
        yield ok("permissions", f"IAM's simulator allows {len(ACTIONS)} actions, {LOGS} and {PASS}")


def _quota(account: Account, body: Mapping[str, Any]) -> Check:
    """Instances of one type that may run at a time; how many do now the quota does not tell."""
    resources = body["ResourceConfig"]
    wanted = resources.get("InstancePreferences", [resources])
    kind, count = str(wanted[0]["InstanceType"]), int(wanted[0].get("InstanceCount", 1))
    spot = "spot training job" if body.get("EnableManagedSpotTraining") else "training job"
    name, token = f"{kind} for {spot} usage", ""
    for _ in range(PAGES):
        more = {"NextToken": token} if token else {}
        told = account.call("service-quotas", "list_service_quotas", ServiceCode="sagemaker", MaxResults=100, **more)
        found = next((item for item in told["Quotas"] if item["QuotaName"] == name), None)
        if found is not None:
            return _judged(found, name, count, account.settings.region)
        token = told.get("NextToken") or ""
        if not token:
            break
    return unknown("quota", f"Service Quotas lists none called {name!r}")


def _judged(quota: Mapping[str, Any], name: str, count: int, region: str) -> Check:
    limit = int(quota["Value"])
    if limit >= count:
        return ok("quota", f"{name}: {limit} at a time, {count} asked for")
    ask = "aws service-quotas request-service-quota-increase --service-code sagemaker"
    fix = f"{ask} --quota-code {quota['QuotaCode']} --desired-value {count} --region {region}"
    return failed("quota", f"{name}: {limit} at a time, {count} asked for", fix=fix, code=QuotaError.exit_code)


def _image(account: Account, image: str, own: str) -> Check:
    match = _IMAGE.fullmatch(image)
    if match is None:
        return unknown("image", f"{image} is in no registry of ECR, and nobody here can ask it")
    if match["account"] != own:
        return unknown("image", f"{image} is another account's ({match['account']}), which does not tell")
    tag = (match["tag"] or ":latest").partition("@")
    which = {"imageDigest": tag[2]} if tag[1] else {"imageTag": tag[0].lstrip(":")}
    try:
        told = account.call(
            "ecr",
            "describe_images",
            region=match["region"],
            registryId=match["account"],
            repositoryName=match["name"],
            imageIds=[which],
        )
    except NotFoundError:
        fix = f"push it: docker push {image}; or name another with --image"
        return failed("image", f"ECR has no {image}", fix=fix, code=SpecError.exit_code)
    size = int((told["imageDetails"] or [{}])[0].get("imageSizeInBytes") or 0)
    return ok("image", f"ECR has {image}" + (f", {size / (1 << 30):.1f} GiB" if size else ""))
