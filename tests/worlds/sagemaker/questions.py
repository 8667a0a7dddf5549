"""Answers of an AWS account for ``doctor``: STS and IAM in their query protocol, Service Quotas, ECR."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .strict import model_errors
from .wire import ACCOUNT, Caller, Refusal

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["USER", "Questions"]

USER = f"arn:aws:iam::{ACCOUNT}:user/tester"
FILLERS = 120
"""Number of unrelated quotas, so that a list has several pages."""


class Questions:
    """Answers set by a test. ``denied`` are actions that no policy allows the caller; ``images`` are the registry's
    ``name:tag``.

    The quotas are the plane's; those in ``unlisted`` are in no list.
    """

    def __init__(self, plane: Plane) -> None:
        self.denied: set[str] = set()
        self.images: set[str] = set()
        self.unlisted: set[str] = set()
        self._plane = plane
        plane.wire.services |= {
            "Query": self._query,
            "ServiceQuotasV20190624": self._quotas,
            "AmazonEC2ContainerRegistry_V20150921": self._registry,
        }

    def environ(self) -> dict[str, str]:
        """Return the variables that lead boto3 here, in addition to `Plane.environ`."""
        names = ("STS", "IAM", "SERVICE_QUOTAS", "ECR")
        return {f"AWS_ENDPOINT_URL_{name}": self._plane.url for name in names}

    def _query(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        if operation == "GetCallerIdentity":
            return {"Arn": USER, "UserId": "AIDATESTER", "Account": ACCOUNT}
        if operation == "GetRole":
            return {"Role": self._role(str(request["RoleName"]))}
        if operation == "SimulatePrincipalPolicy":
            return {"EvaluationResults": self._simulated(request), "IsTruncated": False}
        raise Refusal("InvalidAction", f"The action {operation} is not valid for this endpoint.")

    def _role(self, name: str) -> Mapping[str, Any]:
        try:
            found = self._plane.iam.get_role(RoleName=name)["Role"]
        except self._plane.iam.exceptions.NoSuchEntityException:
            raise Refusal("NoSuchEntity", f"The role with name {name} cannot be found.", 404) from None
        policy = urllib.parse.quote(json.dumps(found["AssumeRolePolicyDocument"]))
        names = ("Path", "RoleName", "RoleId", "Arn")
        made = found["CreateDate"].strftime("%Y-%m-%dT%H:%M:%SZ")
        return {**{key: found[key] for key in names}, "CreateDate": made, "AssumeRolePolicyDocument": policy}

    def _simulated(self, request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        source = str(request["PolicySourceArn"])
        if source != USER and not source.startswith(f"arn:aws:iam::{ACCOUNT}:role/"):
            raise Refusal("NoSuchEntity", f"The entity {request['PolicySourceArn']} cannot be found.", 404)
        names = [value for key, value in sorted(request.items()) if key.startswith("ActionNames.member.")]
        return [
            {"EvalActionName": name, "EvalDecision": "implicitDeny" if name in self.denied else "allowed"}
            for name in names
        ]

    def _quotas(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        if operation != "ListServiceQuotas" or caller.service != "servicequotas":
            raise Refusal("UnknownOperationException", operation)
        if problems := model_errors(operation, request, "service-quotas"):
            raise Refusal("IllegalArgumentException", "; ".join(problems))
        rows = [(f"ml.filler.{n} for endpoint usage", 1.0) for n in range(FILLERS)]
        rows += [(name, float(limit)) for name, limit in self._plane.limits.items() if name not in self.unlisted]
        known = {"ml.m5.xlarge": min(8, self._plane.quota), **self._plane.quotas}
        for kind, limit in known.items():
            words = ("training job", "spot training job") if kind not in self.unlisted else ()
            rows += [(f"{kind} for {word} usage", float(limit)) for word in words]
        start, size = int(request.get("NextToken") or 0), int(request.get("MaxResults") or 100)
        quotas = [
            {"ServiceCode": "sagemaker", "QuotaCode": f"L-{n:08X}", "QuotaName": name, "Value": value, "Unit": "None"}
            for n, (name, value) in enumerate(rows)
        ]
        more = {"NextToken": str(start + size)} if start + size < len(quotas) else {}
        return {"Quotas": quotas[start : start + size], **more}

    def _registry(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        if operation != "DescribeImages" or caller.service != "ecr":
            raise Refusal("UnknownOperationException", operation)
        if problems := model_errors(operation, request, "ecr"):
            raise Refusal("InvalidParameterException", "; ".join(problems))
        name, which = request["repositoryName"], request["imageIds"][0]
        if not any(image.partition(":")[0] == name for image in self.images):
            text = f"The repository with name '{name}' does not exist in the registry with id '{ACCOUNT}'"
            raise Refusal("RepositoryNotFoundException", text)
        if f"{name}:{which.get('imageTag')}" not in self.images:
            text = f"The image with imageId {which} does not exist within the repository with name '{name}'"
            raise Refusal("ImageNotFoundException", text)
        return {"imageDetails": [{"repositoryName": name, "imageSizeInBytes": 3 << 30}]}
