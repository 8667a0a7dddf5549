"""Check an AWS account for ``doctor``: caller, role, bucket, permissions, quotas, keys, image and VPC.

It creates nothing.

The calls are documented. The answers of a real account are unverified.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ...errors import AuthError, NotFoundError, QuotaError, SpecError, StorageError
from ...provider_api import catalog
from ...provider_api.checks import Check, failed, installed, ok, passed, skipped, tried, unknown
from ...validate import url_scheme
from .._cloud import pages
from . import NAME
from .images import ECR

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from .api import Account

PRINCIPAL = "sagemaker.amazonaws.com"
ACTIONS = (
    *("sagemaker:CreateTrainingJob", "sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"),
    *("sagemaker:ListTags", "sagemaker:AddTags"),
)
"""Actions of a submit, a wait and a cancel."""
OUTPUT_KEY = ("kms:Encrypt", "kms:Decrypt", "kms:GenerateDataKey")
VOLUME_KEY = ("kms:CreateGrant",)
"""Actions that a job's role needs on its request's keys: the text of CreateTrainingJob, and S3's of SSE-KMS."""
LOGS = "logs:FilterLogEvents"
PASS = "iam:PassRole"
PAGES = 60
"""Pages of a hundred quotas each; SageMaker has over a thousand."""
_ASSUMED = re.compile(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.*")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/(?:.*/)?(?P<name>[^/]+)")
ADDRESSES, EFA_ADDRESSES = 2, 5
"""Free addresses that an instance needs, without EFA and with it."""
ALL = "-1"
PLAIN: Sequence[tuple[str, int | None, str]] = (("tcp", None, "TCP"),)
ENCRYPTED: Sequence[tuple[str, int | None, str]] = (("udp", 500, "UDP 500"), ("50", None, "IP protocol 50"))
"""Traffic between containers, as protocol, port and name. Under encryption: IKE, and IP protocol 50 (ESP)."""


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """Yield the checks of `doctor`."""
    who: dict[str, Any] = {}
    packages = installed(("boto3", "obstore"), extra="sagemaker")
    if not (yield from passed([packages], tried("credentials", lambda: _caller(account, who)))):
        return
    yield from tried("bucket", lambda: _bucket(account, store))
    yield from tried("role", lambda: _role(account, str(account.settings.role)), extra=True)
    yield from tried("permissions", lambda: _permissions(account, str(who["Arn"])), extra=True)
    if request is None:
        for name in ("quota", "limits", "image"):
            yield skipped(name, "there is no plan, so no machine is named" if name == "quota" else "there is no plan")
        return
    body = request.body
    yield from tried("quota", lambda: _quota(account, body), extra=True)
    if "KmsKeyId" in body["OutputDataConfig"] or "VolumeKmsKeyId" in body["ResourceConfig"]:
        yield from tried("keys", lambda: _keys(account, body), extra=True)
    if "VpcConfig" in body:
        yield from tried("network", lambda: _network(account, body), extra=True)
    image = str(request.body["AlgorithmSpecification"]["TrainingImage"])
    yield from tried("image", lambda: _image(account, image, str(who["Account"])), extra=True)


def _caller(account: Account, who: dict[str, Any]) -> Check:
    who |= account.call("sts", "get_caller_identity")
    return ok("credentials", f"{who['Arn']}, account {who['Account']}, region {account.settings.region}")


def _bucket(account: Account, store: str) -> Check:
    if not store:
        return skipped("bucket", "the location of the store is unknown")
    if url_scheme(store) != "s3":
        fix = 'add to cloudtrain.toml: store = "s3://BUCKET/PREFIX", a bucket in the jobs\' region'
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
    """Return True if a trust policy lets SageMaker in. Its conditions are not judged."""
    for statement in _list(policy.get("Statement")):
        principal = statement.get("Principal") or {}
        services = _list(principal if principal == "*" else principal.get("Service"))
        actions = {action.lower() for action in _list(statement.get("Action"))}
        allowed = statement.get("Effect") == "Allow" and {"sts:assumerole", "sts:*", "*"} & actions
        if allowed and {PRINCIPAL, "*"} & {*services}:
            return True
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _permissions(account: Account, arn: str) -> Check:
    """Check by IAM's own simulator, for the session's user or role. (The simulator finds no role in a path.)"""
    match = _ASSUMED.fullmatch(arn)
    source = f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}" if match else arn
    if source.endswith(":root"):
        return ok("permissions", "the root user of the account may do anything; use another one")
    _, partition, _, _, number, _ = source.split(":", 5)
    region = account.settings.region
    denied = _denied(
        account,
        source,
        (ACTIONS, f"arn:{partition}:sagemaker:{region}:{number}:training-job/doctor"),
        ([LOGS], f"arn:{partition}:logs:{region}:{number}:log-group:/aws/sagemaker/TrainingJobs:*"),
        ([PASS], str(account.settings.role)),
    )
    if denied:
        fix = f"let the policy of {source} allow {', '.join(denied)} (docs/sagemaker.md has one)"
        return failed("permissions", f"not allowed: {', '.join(denied)}", fix=fix, code=AuthError.exit_code)
    return ok("permissions", f"IAM's simulator allows {len(ACTIONS)} actions, {LOGS} and {PASS}")


def _denied(account: Account, source: str, *asked: tuple[Sequence[str], str]) -> list[str]:
    """Return the actions that IAM's simulator refuses to the user or role ``source``.

    ``asked`` are pairs of actions and the resource that they are for.
    """
    entry = {"ContextKeyName": "iam:PassedToService", "ContextKeyValues": [PRINCIPAL], "ContextKeyType": "string"}
    given: dict[str, Any] = {"PolicySourceArn": source, "ContextEntries": [entry]}
    denied: list[str] = []
    for actions, resource in asked:
        given |= {"ActionNames": list(actions), "ResourceArns": [resource]}
        answer = account.call("iam", "simulate_principal_policy", **given)
        denied += [r["EvalActionName"] for r in answer["EvaluationResults"] if r["EvalDecision"] != "allowed"]
    return denied


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """A quota that the job needs: its name in Service Quotas (a pattern), and the amount of ``unit`` requested."""

    name: str
    asked: int
    unit: str = "at a time"


def _limits(body: Mapping[str, Any]) -> dict[str, list[_Limit]]:
    """Return the quotas of the job's machine, and of all machines alike. A quota does not show how many run now."""
    resources = body["ResourceConfig"]
    wanted = resources.get("InstancePreferences", [resources])[0]
    kind, count = re.escape(str(wanted["InstanceType"])), int(wanted.get("InstanceCount", 1))
    seconds, size = int(body["StoppingCondition"]["MaxRuntimeInSeconds"]), resources["VolumeSizeInGB"]
    usage = "spot training job" if body.get("EnableManagedSpotTraining") else "training job"
    machine = [_Limit(name=f"{kind} for {usage} usage", asked=count)]
    if resources.get("KeepAlivePeriodInSeconds"):
        machine.append(_Limit(name=f"{kind} for training warm pool usage", asked=count))
    account = [
        _Limit(name="Longest run time for a training job", asked=seconds, unit="s"),
        _Limit(name=f"Maximum (number of )?instances per {usage}", asked=count, unit="nodes"),
        _Limit(name=f"Number of instances across all {usage}s", asked=count),
        _Limit(name="(Maximum )?Size of EBS volume for a training job.*", asked=size, unit="GB"),
    ]
    return {"quota": machine, "limits": account}


def _quota(account: Account, body: Mapping[str, Any]) -> Iterator[Check]:
    """Check the quotas of the machine and of the account by one listing."""
    limits = _limits(body)
    listed = _listed(account, [limit.name for found in limits.values() for limit in found])
    for name, found in limits.items():
        yield _judged(name, found, listed, account.settings.region)


def _listed(account: Account, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the quotas whose names match, each by its pattern. Stops once it has all."""
    found: dict[str, Mapping[str, Any]] = {}

    def ask(token: str) -> Any:
        given: dict[str, Any] = {"ServiceCode": "sagemaker", "MaxResults": 100}
        given |= {"NextToken": token} if token else {}
        return account.call("service-quotas", "list_service_quotas", **given)

    for page in itertools.islice(pages(ask, "NextToken"), PAGES):
        for quota in page["Quotas"]:
            name = next((n for n in names if re.fullmatch(n, quota["QuotaName"], re.IGNORECASE)), None)
            if name is not None:
                found[name] = quota
        if len(found) == len(names):
            break
    return found


def _judged(name: str, limits: Sequence[_Limit], listed: Mapping[str, Mapping[str, Any]], region: str) -> Check:
    lines, short, commands = [], [], []
    for limit in limits:
        quota = listed.get(limit.name)
        if quota is None:
            continue
        lines.append(f"{quota['QuotaName']}: {int(quota['Value'])} {limit.unit}, {limit.asked} asked for")
        if quota["Value"] < limit.asked:
            short.append(lines[-1])
            wanted = f"--quota-code {quota['QuotaCode']} --desired-value {limit.asked} --region {region}"
            commands.append(f"aws service-quotas request-service-quota-increase --service-code sagemaker {wanted}")
    if short:
        return failed(name, "; ".join(short), fix="; ".join(commands), code=QuotaError.exit_code)
    if not lines:
        known = limits[0].name.replace("\\", "")
        return unknown(name, f"Service Quotas lists none called {known!r}")
    return ok(name, "; ".join(lines))


def _keys(account: Account, body: Mapping[str, Any]) -> Check:
    """Check, by IAM's simulator, that the job's role may use the keys of KMS. A key's own policy may still refuse."""
    keys = (
        (body["OutputDataConfig"].get("KmsKeyId"), OUTPUT_KEY),
        (body["ResourceConfig"].get("VolumeKmsKeyId"), VOLUME_KEY),
    )
    asked = [(actions, key if key.startswith("arn:") else "*") for key, actions in keys if key]
    denied = _denied(account, str(body["RoleArn"]), *asked)
    if denied:
        role = str(body["RoleArn"]).rpartition("/")[2]
        fix = f"let the policy of role {role} allow {', '.join(denied)} (docs/sagemaker.md has the statement)"
        return failed("keys", f"the role may not: {', '.join(denied)}", fix=fix, code=AuthError.exit_code)
    return ok("keys", "IAM's simulator lets the role use the keys; a key's own policy may still refuse")


def _image(account: Account, image: str, own: str) -> Check:
    match = ECR.fullmatch(image)
    if match is None:
        return unknown("image", f"{image} is in no registry of ECR, so it is not checked")
    if match["account"] != own:
        return unknown("image", f"{image} is another account's ({match['account']}), which does not answer")
    tag = (match["tag"] or ":latest").partition("@")
    which = {"imageDigest": tag[2]} if tag[1] else {"imageTag": tag[0].lstrip(":")}
    where: dict[str, Any] = {"registryId": match["account"], "repositoryName": match["repository"], "imageIds": [which]}
    try:
        answer = account.call("ecr", "describe_images", region=match["region"], **where)
    except NotFoundError:
        fix = f"push it: docker push {image}; or name another with --image"
        return failed("image", f"ECR has no {image}", fix=fix, code=SpecError.exit_code)
    size = int((answer["imageDetails"] or [{}])[0].get("imageSizeInBytes") or 0)
    return ok("image", f"ECR has {image}" + (f", {size / (1 << 30):.1f} GiB" if size else ""))


# ----------------------------------------------------------------------------------------------------------- network
# AWS's guide has the rules (train-vpc, train-encrypt), and EC2's page on EFA. Endpoints and routes are not checked.


def _network(account: Account, body: Mapping[str, Any]) -> Check:
    """Check the VPC's addresses and rules. Raises `AuthError` for a caller who may not describe the VPC."""
    resources = body["ResourceConfig"]
    wanted = resources.get("InstancePreferences", [resources])
    count = int(wanted[0].get("InstanceCount", 1))
    machines = [catalog.machine(NAME, str(item["InstanceType"])) for item in wanted]
    efa = any(machine is not None and "EFA x" in machine.network for machine in machines)
    vpc = body["VpcConfig"]
    subnets = account.call("ec2", "describe_subnets", SubnetIds=list(vpc["Subnets"]))["Subnets"]
    groups = account.call("ec2", "describe_security_groups", GroupIds=list(vpc["SecurityGroupIds"]))["SecurityGroups"]
    free = {str(item["SubnetId"]): int(item["AvailableIpAddressCount"]) for item in subnets}
    needed = count * (EFA_ADDRESSES if efa else ADDRESSES)
    problems = []
    if max(free.values(), default=0) < needed:
        text = ", ".join(f"{name} has {number}" for name, number in free.items())
        problems.append((f"{count} nodes need {needed} free addresses in one subnet; {text}", "choose a larger subnet"))
    if count > 1:
        problems += _closed(groups, efa=efa, encrypted=bool(body.get("EnableInterContainerTrafficEncryption")))
    if problems:
        what, fix = ("; ".join(dict.fromkeys(parts)) for parts in zip(*problems, strict=True))
        return failed("network", what, fix=f"{fix} (docs/sagemaker.md has a table)", code=SpecError.exit_code)
    rules = ", and the security groups let nodes talk to each other" if count > 1 else ""
    largest = max(free, key=lambda name: free[name])
    return ok("network", f"{largest} has {free[largest]} free addresses, {needed} needed{rules}")


def _closed(groups: Sequence[Mapping[str, Any]], *, efa: bool, encrypted: bool) -> list[tuple[str, str]]:
    """Return each traffic that the groups' rules keep from their members, with its fix."""
    names = {str(group["GroupId"]) for group in groups}
    ids = ", ".join(sorted(names))
    found = []
    if efa:
        for way, kind in (("in", "IpPermissions"), ("out", "IpPermissionsEgress")):
            # EFA's traffic has no IP addresses, so a rule for a range of addresses does not let it pass.
            rules = [rule for group in groups for rule in group[kind]]
            if not any(rule["IpProtocol"] == ALL and _of_members(rule, names) for rule in rules):
                what = f"EFA needs a rule of {ids} that lets all traffic {way}, between members of the group itself"
                found.append((what, f"add a self-referencing rule for all traffic, {way}bound"))
        return found
    # The nodes' own addresses are not looked up, and may be among those of any rule that names some.
    rules = [
        rule
        for group in groups
        for rule in group["IpPermissions"]
        if _of_members(rule, names) or any(rule.get(kind) for kind in ("IpRanges", "Ipv6Ranges", "PrefixListIds"))
    ]
    for protocol, port, traffic in ENCRYPTED if encrypted else PLAIN:
        if not any(_lets(rule, protocol, port) for rule in rules):
            fix = f"add an inbound self-referencing rule for {traffic}"
            found.append((f"{ids} lets no {traffic} in from its own members", fix))
    return found


def _of_members(rule: Mapping[str, Any], names: set[str]) -> bool:
    return any(pair.get("GroupId") in names for pair in rule["UserIdGroupPairs"])


def _lets(rule: Mapping[str, Any], protocol: str, port: int | None) -> bool:
    """Return True if a rule is about ``protocol`` and has ``port``, or (None) a range wide enough for any."""
    if rule["IpProtocol"] == ALL:
        return True
    if rule["IpProtocol"] != protocol:
        return False
    first, last = rule.get("FromPort", 0), rule.get("ToPort", 65535)
    return bool(first <= port <= last) if port is not None else protocol != "tcp" or last - first > 1000
