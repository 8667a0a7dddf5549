"""Refusals of ``POST …/jobs``, in the words of a real 1.36.2: `tests/data/kubernetes-answers.json` has them.

The fields and their types are those of the models of the client `kubernetes` 36: `tests/data/kubernetes-fields.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

__all__ = ["Refusal", "check_job", "check_jobset", "check_name"]

FIELDS: Mapping[str, Mapping[str, str]] = json.loads(
    (Path(__file__).parents[2] / "data" / "kubernetes-fields.json").read_text()
)
"""Type of each field of an object. ``*`` before a type is a list of it, ``%`` a map from text to it."""
GO = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}
RANGES = {"int32": 2**31, "int64": 2**63}
QUANTITY = r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
UNITS = {
    "": Fraction(1),
    **{unit: Fraction(1, 1000 ** (n + 1)) for n, unit in enumerate("mun")},
    **{unit: Fraction(1000) ** (n + 1) for n, unit in enumerate("kMGTPE")},
    **{f"{unit}i": Fraction(1024) ** (n + 1) for n, unit in enumerate("KMGTPE")},
}
STANDARD = ("cpu", "memory", "ephemeral-storage")
NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS = rf"{LABEL}(\.{LABEL})*"
_ENDS = " and must start and end with an alphanumeric character (e.g. "
WORDS = {
    "value": "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.',"
    f"{_ENDS}'MyValue',  or 'my_value',  or '12345', regex used for validation is"
    " '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
    "name": "name part must consist of alphanumeric characters, '-', '_' or '.',"
    f"{_ENDS}'MyName',  or 'my.name',  or '123-abc', regex used for validation is"
    " '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
    "dns": "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.',"
    f"{_ENDS}'example.com', regex used for validation is"
    r" '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
    "label": "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-',"
    f"{_ENDS}'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')",
}
POD = "spec.template.spec"
Object = Mapping[str, Any]
Wrong = Iterator[str]
"""Messages, each with its field."""


class Refusal(Exception):
    """An error answer, in the words of the API server."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message
        super().__init__(message)


def check_job(job: Object, *, strict: bool = True) -> None:
    """Raise `Refusal` for a Job that the API server refuses; with ``strict`` also for an unknown field."""
    unknown: list[str] = []
    try:
        _decode(job, "Job", "", "Job", unknown)
    except ValueError as exc:
        raise Refusal(400, "BadRequest", f'Job in version "v1" cannot be handled as a Job: {exc}') from None
    if unknown and strict:
        detail = ", ".join(f'unknown field "{name}"' for name in unknown)
        raise Refusal(
            400, "BadRequest", f'Job in version "v1" cannot be handled as a Job: strict decoding error: {detail}'
        )
    wrong = [*_metadata(job["metadata"], "metadata"), *_spec(job["metadata"]["name"], job["spec"])]
    _raise(wrong, f'Job.batch "{job["metadata"]["name"]}"')


JOBSET = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *("coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy"),
        *("suspend", "ttlSecondsAfterFinished", "volumeClaimPolicies"),
    },
    "spec.network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "spec.replicatedJobs[0]": {"dependsOn", "groupName", "name", "replicas", "template"},
    "spec.replicatedJobs[0].template": {"metadata", "spec"},
}
"""Fields of a JobSet v1alpha2, as its types of 2026-08 have them."""


def check_jobset(made: Object) -> Object:
    """Return the Job that a JobSet creates. Raises `Refusal` as its CRD and webhook do (source of 2026-08)."""
    (item,) = made["spec"]["replicatedJobs"]
    tables = (made, made["spec"], made["spec"]["network"], item, item["template"])
    for (path, known), table in zip(JOBSET.items(), tables, strict=True):
        for name in table.keys() - known:
            detail = f'strict decoding error: unknown field "{path}.{name}"'
            raise Refusal(400, "BadRequest", f'JobSet in version "v1alpha2" cannot be handled as a JobSet: {detail}')
    name, subdomain = (
        f"{made['metadata']['name']}-{item['name']}-{item['replicas'] - 1}",
        made["spec"]["network"]["subdomain"],
    )
    pod = f"{name}-{item['template']['spec']['completions'] - 1}-abcde"
    for field, text in (
        ("replicatedJobs[0].name", name),
        ("replicatedJobs[0].name", pod),
        ("network.subdomain", subdomain),
    ):
        if len(text) > 63 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text):
            _raise(
                [_invalid(f"spec.{field}", text, WORDS["label"])],
                f'JobSet.jobset.x-k8s.io "{made["metadata"]["name"]}"',
            )
    _raise([*_metadata(made["metadata"], "metadata")], f'JobSet.jobset.x-k8s.io "{made["metadata"]["name"]}"')
    template = item["template"]
    job = {"metadata": {**template["metadata"], "name": name, "namespace": made["metadata"]["namespace"]}}
    check_job({"apiVersion": "batch/v1", "kind": "Job", **job, "spec": template["spec"]})
    return {**job, "spec": template["spec"]}


def check_name(kind: str, name: str) -> None:
    """Raise `Refusal` for a Service or a Secret with an invalid name."""
    rule, longest, words = (LABEL, 63, "label") if kind == "Service" else (DNS, 253, "dns")
    if len(name) > longest:
        _raise([_invalid("metadata.name", name, f"must be no more than {longest} characters")], f'{kind} "{name}"')
    if not re.fullmatch(rule, name):
        _raise([_invalid("metadata.name", name, WORDS[words])], f'{kind} "{name}"')


def _raise(wrong: Sequence[str], what: str) -> None:
    if wrong:
        detail = wrong[0] if len(wrong) == 1 else f"[{', '.join(wrong)}]"
        raise Refusal(422, "Invalid", f"{what} is invalid: {detail}")


def _invalid(field: str, value: Any, why: str) -> str:
    detail = json.dumps(value, separators=(",", ":")) if isinstance(value, (str, list)) else str(value)
    return f"{field}: Invalid value: {detail}: {why}"


# ------------------------------------------------------------------------------------------------------------- decoding


def _decode(value: Any, kind: str, path: str, owner: str, unknown: list[str], go: str = "") -> None:
    """Raise `ValueError` for a value of another type. ``path`` counts the items of lists; ``go`` does not."""
    if value is None or kind == "any":
        return
    if kind[0] in "*%":
        _expect(value, list if kind[0] == "*" else dict, kind, owner, go)
        for key, item in enumerate(value) if kind[0] == "*" else value.items():
            _decode(item, kind[1:], f"{path}[{key}]", owner, unknown, go)
    elif kind == "quantity":
        text = str(value)
        if not re.fullmatch(QUANTITY, text) or _amount(text) is None:
            raise ValueError(f"quantities must match the regular expression '{QUANTITY}'")
    elif kind in FIELDS:
        _expect(value, dict, kind, owner, go)
        for name, item in value.items():
            if name not in FIELDS[kind]:
                unknown.append(f"{path}.{name}".lstrip("."))
            else:
                _decode(
                    item, FIELDS[kind][name], f"{path}.{name}".lstrip("."), kind, unknown, f"{go}.{name}".lstrip(".")
                )
    else:
        wanted = {"string": str, "bool": bool}.get(kind, int)
        _expect(value, wanted, kind, owner, go)
        if kind in RANGES and not -RANGES[kind] <= value < RANGES[kind]:
            raise ValueError(f"json: cannot unmarshal number {value} into Go struct field {owner}.{go} of type {kind}")


def _expect(value: Any, wanted: type, kind: str, owner: str, go: str) -> None:
    if type(value) is not wanted:
        known = {"*": "[]", "%": "map[string]"}.get(kind[0], "") + kind.lstrip("*%")
        raise ValueError(f"json: cannot unmarshal {GO[type(value)]} into Go struct field {owner}.{go} of type {known}")


def _amount(text: str) -> Fraction | None:
    found = re.fullmatch(r"([+-]?)(\d+\.?\d*|\.\d+)(?:([numkMGTPE]?|[KMGTPE]i)|[eE]([+-]?\d+))", text)
    if found is None:
        return None
    number = Fraction(found[2]) * (Fraction(10) ** int(found[4]) if found[4] else UNITS[found[3] or ""])
    return -number if found[1] == "-" else number


def _plain(text: Any) -> str:
    """Return a quantity as the API writes it: without a fraction."""
    amount = _amount(str(text))
    assert amount is not None
    return str(text) if "." not in str(text) else f"{int(amount * 1000)}m" if amount.denominator > 1 else str(amount)


# ------------------------------------------------------------------------------------------------------------ the rules


def _metadata(meta: Object, at: str) -> Wrong:
    name = str(meta.get("name", ""))
    if at == "metadata" and not re.fullmatch(DNS, name):
        yield _invalid(f"{at}.name", name, WORDS["dns"])
    for key in [*(meta.get("labels") or {}), *(meta.get("annotations") or {})]:
        yield from _key(key, f"{at}.labels" if key in (meta.get("labels") or {}) else f"{at}.annotations")
    for value in (meta.get("labels") or {}).values():
        yield from _label(value, f"{at}.labels")
    if sum(len(key) + len(value) for key, value in (meta.get("annotations") or {}).items()) > 262144:
        yield f"{at}.annotations: Too long: may not be more than 262144 bytes"


def _key(key: str, field: str) -> Wrong:
    prefix, _, name = key.rpartition("/")
    if len(name) > 63:
        yield _invalid(field, key, "name part must be no more than 63 bytes")
    if not re.fullmatch(NAME, name):
        yield _invalid(field, key, WORDS["name"])
    if "/" in key and not re.fullmatch(DNS, prefix.lower()):
        yield _invalid(field, key, f"prefix part {WORDS['dns']}")


def _label(value: str, field: str) -> Wrong:
    if len(value) > 63:
        yield _invalid(field, value, "must be no more than 63 bytes")
    elif value and not re.fullmatch(NAME, value):
        yield _invalid(field, value, WORDS["value"])


def _spec(name: str, spec: Object) -> Wrong:
    count, mode = spec.get("completions"), spec.get("completionMode", "NonIndexed")
    parallel = spec.get("parallelism", 1)
    pod = spec["template"].get("spec") or {}
    for field in ("parallelism", "completions", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "maxFailedIndexes"):
        if (spec.get(field) or 0) < 0:
            yield _invalid(f"spec.{field}", spec[field], "must be greater than or equal to 0")
    if mode not in ("NonIndexed", "Indexed"):
        yield f'spec.completionMode: Unsupported value: "{mode}": supported values: "NonIndexed", "Indexed"'
    elif mode == "Indexed" and count is None:
        yield "spec.completions: Required value: when completion mode is Indexed"
    elif mode == "Indexed" and parallel > 100000:
        why = "must be less than or equal to 100000 when completion mode is Indexed"
        yield _invalid("spec.parallelism", parallel, why)
        why = "must be less than or equal to 10000 when completions are above 100000"
        why += " and used with backoff limit per index"
        yield _invalid("spec.parallelism", parallel, why)
    replacement = spec.get("podReplacementPolicy", "Failed")
    if "podFailurePolicy" in spec and replacement != "Failed":
        yield f'spec.podReplacementPolicy: Unsupported value: "{replacement}": supported values: "Failed"'
    yield from _failure_policy(spec.get("podFailurePolicy") or {}, [item["name"] for item in pod.get("containers", ())])
    yield from _metadata(spec["template"].get("metadata") or {}, "spec.template.metadata")
    yield from _pod(pod)
    restart = pod.get("restartPolicy", "Always")
    if restart not in ("OnFailure", "Never"):
        yield f'{POD}.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    elif restart != "Never" and "podFailurePolicy" in spec:
        yield _invalid(f"{POD}.restartPolicy", restart, 'only "Never" is supported when podFailurePolicy is specified')
    last = f"{name}-{max(0, (count or 1) - 1)}"
    if len(last) > 63 or not re.fullmatch(LABEL, last):
        yield _invalid("metadata.name", name, f"will not able to create pod with invalid DNS label: {last}")


def _failure_policy(policy: Object, containers: Sequence[str]) -> Wrong:
    rules = policy.get("rules", ())
    if len(rules) > 20:
        yield f"spec.podFailurePolicy.rules: Too many: {len(rules)}: must have at most 20 items"
        return
    for number, rule in enumerate(rules):
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        at, values = f"spec.podFailurePolicy.rules[{number}].onExitCodes", codes["values"]
        name = codes.get("containerName")
        for index, value in enumerate(values):
            if value == 0 and codes["operator"] == "In":
                yield _invalid(f"{at}.values[{index}]", 0, "must not be 0 for the In operator")
            elif value in values[:index]:
                yield f"{at}.values[{index}]: Duplicate value: {value}"
        if values != sorted(values):
            yield _invalid(f"{at}.values", values, "must be ordered")
        if name is not None and name not in containers:
            why = "must be one of the container or initContainer names in the pod template"
            yield _invalid(f"{at}.containerName", name, why)


def _pod(pod: Object) -> Wrong:
    volumes, claims = pod.get("volumes") or [], pod.get("resourceClaims") or []
    for number, volume in enumerate(volumes):
        name, kinds = volume["name"], volume.keys() - {"name"}
        if name in [item["name"] for item in volumes[:number]]:
            yield f'{POD}.volumes[{number}].name: Duplicate value: "{name}"'
        if len(kinds) > 1:
            yield f"{POD}.volumes[{number}].{sorted(kinds)[1]}: Forbidden: may not specify more than 1 volume type"
        if not kinds:
            yield f"{POD}.volumes[{number}]: Required value: must specify a volume type"
    names = [item["name"] for item in pod.get("containers", ())]
    if not names:
        yield f"{POD}.containers: Required value"
    for number, container in enumerate(pod.get("containers", ())):
        at = f"{POD}.containers[{number}]"
        if container["name"] in names[:number]:
            yield f'{at}.name: Duplicate value: "{container["name"]}"'
            continue
        yield from _container(container, at, [item["name"] for item in volumes], [item["name"] for item in claims])
    for key, value in (pod.get("nodeSelector") or {}).items():
        yield from _key(key, f"{POD}.nodeSelector")
        yield from _label(value, f"{POD}.nodeSelector")
    for number, item in enumerate(pod.get("tolerations") or ()):
        yield from _toleration(item, f"{POD}.tolerations[{number}]")
    subdomain = pod.get("subdomain", "")
    if len(subdomain) > 63:
        yield _invalid(f"{POD}.subdomain", subdomain, "must be no more than 63 characters")
    for field in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        if pod.get(field) and not re.fullmatch(DNS, pod[field]):
            yield _invalid(f"{POD}.{field}", pod[field], WORDS["dns"])
    limit = pod.get("activeDeadlineSeconds", 1)
    if not 1 <= limit < 2**31:
        yield _invalid(f"{POD}.activeDeadlineSeconds", limit, "must be between 1 and 2147483647, inclusive")


def _toleration(item: Object, at: str) -> Wrong:
    operator, effect = item.get("operator") or "Equal", item.get("effect", "")
    if not item.get("key") and operator != "Exists":
        why = 'operator must be Exists when `key` is empty, which means "match all values and all keys"'
        yield _invalid(f"{at}.operator", operator, why)
    if operator == "Exists" and item.get("value"):
        yield _invalid(f"{at}.operator", item["value"], "value must be empty when `operator` is 'Exists'")
    if operator not in ("Equal", "Exists", "Lt", "Gt"):
        yield f'{at}.operator: Unsupported value: "{operator}": supported values: "Equal", "Exists"'
    if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
        known = '"NoSchedule", "PreferNoSchedule", "NoExecute"'
        yield f'{at}.effect: Unsupported value: "{effect}": supported values: {known}'
    if "tolerationSeconds" in item and effect != "NoExecute":
        yield _invalid(f"{at}.effect", effect, "effect must be 'NoExecute' when `tolerationSeconds` is set")
    if item.get("key"):
        yield from _key(item["key"], f"{at}.key")


def _container(container: Object, at: str, volumes: Sequence[str], claims: Sequence[str]) -> Wrong:
    if not container.get("image"):
        yield f"{at}.image: Required value"
    for number, item in enumerate(container.get("env") or ()):
        if not item.get("name"):
            yield f"{at}.env[{number}].name: Required value"
        elif not re.fullmatch(r"[ -<>-~]+", item["name"]):
            why = "a valid environment variable name must consist only of printable ASCII characters other than '='"
            yield _invalid(f"{at}.env[{number}].name", item["name"], why)
    paths: list[str] = []
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            yield f'{at}.volumeMounts[{number}].name: Not found: "{mount["name"]}"'
        if mount["mountPath"] in paths:
            yield _invalid(f"{at}.volumeMounts[{number}].mountPath", mount["mountPath"], "must be unique")
        paths.append(mount["mountPath"])
    yield from _resources(container.get("resources") or {}, f"{at}.resources", claims)


def _resources(resources: Object, at: str, claims: Sequence[str]) -> Wrong:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for number, claim in enumerate(resources.get("claims") or ()):
        if claim["name"] not in claims:
            known = "is empty" if not claims else f"has {', '.join(claims)}"
            why = f"must be one of the names in pod.spec.resourceClaims which {known}"
            yield f'{at}.claims[{number}]: Not found: "{claim["name"]}": {why}'
    for kind, found in (("limits", limits), ("requests", requests)):
        for name, amount in found.items():
            yield from _amount_of(name, str(amount), f"{at}.{kind}[{name}]")
    for name, amount in requests.items():
        own, limit = _amount(str(amount)), limits.get(name)
        assert own is not None
        if limit is None and _fixed(name):
            yield f"{at}.limits: Required value: Limit must be set for non overcommitable resources"
        elif limit is not None and _fixed(name) and own != _amount(str(limit)):
            why = f"must be equal to {name} limit of {_plain(limit)}"
            yield _invalid(f"{at}.requests", _plain(amount), why)
        elif limit is not None and own > (_amount(str(limit)) or 0):
            why = f"must be less than or equal to {name} limit of {_plain(limit)}"
            yield _invalid(f"{at}.requests", _plain(amount), why)
    named = limits.keys() | requests.keys()
    if any(name.startswith("hugepages-") for name in named) and not {"cpu", "memory"} & named:
        yield f"{at}: Forbidden: HugePages require cpu or memory"


def _fixed(name: str) -> bool:
    """Return True if a resource cannot be overcommitted."""
    return name.startswith("hugepages-") or (name not in STANDARD and "/" in name)


def _amount_of(name: str, text: str, at: str) -> Wrong:
    if name not in STANDARD and not name.startswith("hugepages-") and "/" not in name:
        yield _invalid(at, name, "must be a standard resource type or fully qualified")
        yield _invalid(at, name, "must be a standard resource for containers")
        return
    amount = _amount(text)
    assert amount is not None
    if amount < 0:
        yield _invalid(at, text, "must be greater than or equal to 0")
    elif _fixed(name) and not name.startswith("hugepages-") and amount.denominator > 1:
        yield _invalid(at, _plain(text), "must be an integer")
