"""Check a job's VPC for ``doctor``: free addresses of its subnets, rules of its security groups.

The rules are those of AWS's guide (train-vpc, train-encrypt) and of EC2's page on EFA. Endpoints and routes are not
checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import SpecError
from ...provider_api import catalog
from ...provider_api.checks import Check, failed, ok
from .names import NAME

if TYPE_CHECKING:
    from .api import Account

__all__ = ["ADDRESSES", "EFA_ADDRESSES", "network_check"]

ADDRESSES, EFA_ADDRESSES = 2, 5
"""Free addresses that an instance needs, without EFA and with it."""
ALL = "-1"
ENCRYPTED = (("udp", 500), ("50", None))
"""Traffic between containers under encryption: IKE, and IP protocol 50 (ESP)."""


def network_check(account: Account, body: Mapping[str, Any]) -> Iterator[Check]:
    """Yield one check. Raises `AuthError` for a caller who may not describe the VPC."""
    resources = body["ResourceConfig"]
    wanted = resources.get("InstancePreferences", [resources])
    count = int(wanted[0].get("InstanceCount", 1))
    machines = [catalog.machine(NAME, str(item["InstanceType"])) for item in wanted]
    efa = any(machine is not None and "EFA x" in machine.network for machine in machines)
    vpc = body["VpcConfig"]
    subnets = account.call("ec2", "describe_subnets", SubnetIds=list(vpc["Subnets"]))["Subnets"]
    groups = account.call("ec2", "describe_security_groups", GroupIds=list(vpc["SecurityGroupIds"]))["SecurityGroups"]
    free, needed = _free(subnets), count * (EFA_ADDRESSES if efa else ADDRESSES)
    problems = []
    if max(free.values(), default=0) < needed:
        told = ", ".join(f"{name} has {number}" for name, number in free.items())
        problems.append((f"{count} nodes need {needed} free addresses in one subnet; {told}", "choose a larger subnet"))
    if count > 1:
        problems += _closed(groups, efa=efa, encrypted=bool(body.get("EnableInterContainerTrafficEncryption")))
    if problems:
        what, fix = ("; ".join(dict.fromkeys(parts)) for parts in zip(*problems, strict=True))
        yield failed("network", what, fix=f"{fix} (docs/sagemaker.md has a table)", code=SpecError.exit_code)
        return
    rules = ", and the security groups let nodes talk to each other" if count > 1 else ""
    largest = max(free, key=lambda name: free[name])
    yield ok("network", f"{largest} has {free[largest]} free addresses, {needed} needed{rules}")


def _free(subnets: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {str(item["SubnetId"]): int(item["AvailableIpAddressCount"]) for item in subnets}


def _closed(groups: Sequence[Mapping[str, Any]], *, efa: bool, encrypted: bool) -> list[tuple[str, str]]:
    """Return each traffic that the groups' rules keep from their members, with its fix."""
    names = {str(group["GroupId"]) for group in groups}
    inward = [rule for group in groups for rule in group["IpPermissions"]]
    outward = [rule for group in groups for rule in group["IpPermissionsEgress"]]
    told = ", ".join(sorted(names))
    if efa:
        # EFA's traffic has no IP addresses, so a rule for a range of addresses does not let it pass.
        ways = {"in": inward, "out": outward}
        return [
            (
                f"EFA needs a rule of {told} that lets all traffic {way}, between members of the group itself",
                f"add a self-referencing rule for all traffic, {way}bound",
            )
            for way, rules in ways.items()
            if not any(rule["IpProtocol"] == ALL and _of_members(rule, names) for rule in rules)
        ]
    asked: tuple[tuple[str, int | None], ...] = ENCRYPTED if encrypted else (("tcp", None),)
    return [
        (
            f"{told} lets no {_named(protocol, port)} in from its own members",
            f"add an inbound self-referencing rule for {_named(protocol, port)}",
        )
        for protocol, port in asked
        if not any(_lets(rule, protocol, port) and (_of_members(rule, names) or _of_addresses(rule)) for rule in inward)
    ]


def _of_members(rule: Mapping[str, Any], names: set[str]) -> bool:
    return any(pair.get("GroupId") in names for pair in rule["UserIdGroupPairs"])


def _of_addresses(rule: Mapping[str, Any]) -> bool:
    """Return True if a rule names addresses. The nodes' own are not looked up, and may be among them."""
    return any(rule.get(kind) for kind in ("IpRanges", "Ipv6Ranges", "PrefixListIds"))


def _lets(rule: Mapping[str, Any], protocol: str, port: int | None) -> bool:
    """Return True if a rule is about ``protocol`` and has ``port``, or (None) a range wide enough for any."""
    if rule["IpProtocol"] == ALL:
        return True
    if rule["IpProtocol"] != protocol:
        return False
    first, last = rule.get("FromPort", 0), rule.get("ToPort", 65535)
    return bool(first <= port <= last) if port is not None else protocol != "tcp" or last - first > 1000


def _named(protocol: str, port: int | None) -> str:
    return {"tcp": "TCP", "50": "IP protocol 50"}.get(protocol, f"{protocol.upper()} {port}")
