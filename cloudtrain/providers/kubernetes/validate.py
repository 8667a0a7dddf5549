"""Check a Job before it is sent, by the rules of a real API server. Pure.

`fields.json` holds the fields and types of every object (``tools/kubernetes_tables.py``). A field that is missing there
is a word that the server refuses too: requests are sent with ``fieldValidation=Strict``. Source of the other rules: the
answers of Kubernetes 1.36.2 to 67 manifests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from ...errors import SpecError
from ...validate import choice_of, near_or_all, whole_number
from .._cloud import table_in
from . import NAME

LONGEST = 63
"""Characters of a label's value, and of the name part of a key."""
INT32 = 2**31 - 1
"""Largest whole number of most fields."""
LONGEST_NAME, ANNOTATIONS = 253, 262_144
"""Characters of an object's name, and bytes of all annotations of one object."""
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(\+?(?:\d+\.?\d*|\.\d+))([eE][+-]?\d+|k|Ki|[MGTPE]i?|[num])?")
_LABEL_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(rf"{_LABEL_NAME.pattern}(\.{_LABEL_NAME.pattern})*")
_VARIABLE = re.compile(r"[ -<>-~]+")
"""Name of an environment variable: printable ASCII without ``=``."""
_UNITS = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000) ** (power + 2) for power, unit in enumerate("MGTPE")}
_UNITS |= {f"{unit}i": Decimal(1024) ** (power + 1) for power, unit in enumerate("KMGTPE")}
_SCALARS: Mapping[str, tuple[type, str]] = {
    "string": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
}
_NEEDED = {
    "csi": ("driver",),
    "hostPath": ("path",),
    "nfs": ("server", "path"),
    "persistentVolumeClaim": ("claimName",),
}
"""Fields that a kind of volume cannot be without."""
_EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
_OPERATORS = ("", "Equal", "Exists", "Lt", "Gt")


# ----------------------------------------------------------------------------------------------------- fields and types


def known_fields() -> Mapping[str, Mapping[str, str]]:
    """Return the types of each object's fields, by the names of the official client's models."""
    found: Mapping[str, Mapping[str, str]] = table_in(__file__, "fields.json")["fields"]
    return found


def check_fields(value: Any, kind: str, where: str) -> None:
    """Raise `SpecError` for a field of ``value`` that its ``kind`` has not, or with a wrong type."""
    if kind[0] == "*":
        if not isinstance(value, (list, tuple)):
            raise SpecError(f"must be a list, not {value!r}", field=where)
        for number, item in enumerate(value):
            check_fields(item, kind[1:], f"{where}.{number}")
    elif kind == "quantity":
        quantity_of(value, where)
    elif kind in _SCALARS:
        wanted, words = _SCALARS[kind]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            hint = "put it in quotes" if wanted is str else ""
            raise SpecError(f"must be {words}, not {value!r}", field=where, hint=hint)
    elif kind != "any":
        if not isinstance(value, Mapping):
            raise SpecError(f"must be a table, not {value!r}", field=where)
        table = known_fields().get(kind, {})
        for name, item in value.items():
            if kind[0] != "%" and name not in table:
                hint = near_or_all(name, table)
                raise SpecError("is no field of Kubernetes here", field=f"{where}.{name}", hint=hint)
            check_fields(item, table.get(name, kind[1:]), f"{where}.{name}")


def quantity_of(value: Any, where: str) -> Decimal:
    """Return the number of a quantity, ``100Gi``. Raises `SpecError` for text that is none."""
    match = None if isinstance(value, bool) else _QUANTITY.fullmatch(str(value))
    if match is None:
        raise SpecError(f"{value!r} is not a quantity, like 16 or 100Gi", field=where)
    number, unit = Decimal(match[1]), match[2] or ""
    return number * (_UNITS[unit] if unit in _UNITS else Decimal(f"1{unit}"))


# ----------------------------------------------------------------------------------------------------- names and values


def check_name(name: Any, where: str, *, label: bool = False) -> None:
    """Raise `SpecError` for text that no object can be called. ``label``: it has no dot, and fewer characters."""
    form, longest = (_LABEL_NAME, LONGEST) if label else (_NAME, LONGEST_NAME)
    if not isinstance(name, str) or not form.fullmatch(name) or len(name) > longest:
        hint = f"use at most {longest} small letters, digits and dashes"
        raise SpecError(f"{name!r} is not a name that Kubernetes takes", field=where, hint=hint)


def label_text(value: Any) -> str:
    """Return the text that a setting's value has as a label: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_key(key: Any, where: str) -> None:
    """Raise `SpecError` for text that is no name of a label, an annotation or a resource."""
    if not isinstance(key, str) or not _KEY.fullmatch(key) or len(key.rpartition("/")[2]) > LONGEST:
        raise SpecError("is not a label's name", field=where, hint="for example: team, example.com/team")


def check_labels(table: Any, where: str, *, values: bool = True) -> None:
    """Raise `SpecError` for a key or value that Kubernetes refuses. ``values``: they are a label's, not free text."""
    if not isinstance(table, Mapping):
        raise SpecError("must be a table", field=where)
    for key, value in table.items():
        check_key(key, f"{where}.{key}")
        if not isinstance(value, (str, int, float)):
            raise SpecError(f"must be text, not {value!r}", field=f"{where}.{key}")
        text = label_text(value)
        if values and not (_VALUE.fullmatch(text) and len(text) <= LONGEST):
            why = f"{value!r} is not a label's value: at most {LONGEST} of letters, digits, dots, dashes, underscores"
            raise SpecError(why, field=f"{where}.{key}")
    size = sum(len(str(item).encode()) for pair in table.items() for item in pair)
    if not values and size > ANNOTATIONS:
        raise SpecError(f"has {size} bytes, and Kubernetes takes at most {ANNOTATIONS}", field=where)


def check_volume(volume: Any, where: str) -> None:
    """Raise `SpecError` for a pod's volume, without its name, that Kubernetes refuses."""
    check_fields(volume, "V1Volume", where)
    if len(volume) != 1:
        hint = 'for example { nfs = { server = "nas.example", path = "/training" } }'
        raise SpecError("must be a table with one kind of volume", field=where, hint=hint)
    for kind, source in volume.items():
        for name in _NEEDED.get(kind, ()):
            if not source.get(name) or (name == "path" and not source[name].startswith("/")):
                what = "a path that begins with /" if name == "path" else "text"
                raise SpecError(f"must be {what}, not {source.get(name)!r}", field=f"{where}.{kind}.{name}")


def check_tolerations(found: Sequence[Any], where: str) -> None:
    """Raise `SpecError` for a list of tolerations that Kubernetes refuses."""
    check_fields(found, "*V1Toleration", where)
    for number, item in enumerate(found):
        place, any_value = f"{where}.{number}", item.get("operator") == "Exists"
        choice_of(item.get("operator", ""), _OPERATORS, f"{place}.operator")
        choice_of(item.get("effect", ""), _EFFECTS, f"{place}.effect")
        if item.get("key"):
            check_key(item["key"], f"{place}.key")
        elif not any_value:
            raise SpecError("is empty, which only operator Exists may have", field=f"{place}.key")
        if any_value and item.get("value"):
            raise SpecError("must be empty with operator Exists", field=f"{place}.value")
        check_labels({"value": item.get("value", "")}, place)
        if "tolerationSeconds" in item and item.get("effect") != "NoExecute":
            raise SpecError("needs effect NoExecute", field=f"{place}.tolerationSeconds")


# ------------------------------------------------------------------------------------------------------------- the body


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError` for what the API server would refuse, named by its place in a job's ``options``."""
    where = f"options.{NAME}.items"
    for number, item in enumerate(body["items"]):
        check_fields(item, f"V1{item['kind']}", f"{where}.{number}")
        _check_meta(item["metadata"], f"{where}.{number}.metadata")
    spec, where = body["items"][0]["spec"], f"{where}.0.spec"
    if "backoffLimit" in spec:
        raise SpecError("backoffLimitPerIndex is set", field=f"{where}.backoffLimit", hint="leave it out")
    whole_number(spec["ttlSecondsAfterFinished"], f"{where}.ttlSecondsAfterFinished", least=0, most=INT32)
    _check_meta(spec["template"]["metadata"], f"{where}.template.metadata")
    _check_pod(spec["template"]["spec"], f"{where}.template.spec")


def _check_meta(meta: Mapping[str, Any], where: str) -> None:
    for kind in ("labels", "annotations"):
        check_labels(meta.get(kind, {}), f"{where}.{kind}", values=kind == "labels")


def _check_pod(pod: Mapping[str, Any], where: str) -> None:
    check_labels(pod.get("nodeSelector", {}), f"{where}.nodeSelector")
    check_tolerations(pod.get("tolerations", []), f"{where}.tolerations")
    for number, volume in enumerate(pod["volumes"]):
        place = f"{where}.volumes.{number}"
        check_name(volume.get("name"), f"{place}.name", label=True)
        check_volume({key: value for key, value in volume.items() if key != "name"}, place)
    named = {kind: [item.get("name") for item in pod.get(kind, [])] for kind in ("volumes", "resourceClaims")}
    named["containers"] = []
    for kind in ("containers", "initContainers"):
        for number, container in enumerate(pod.get(kind, [])):
            _check_container(container, named, f"{where}.{kind}.{number}")
            named["containers"].append(container["name"])
    for kind, names in named.items():
        if len(set(names)) < len(names):
            raise SpecError("has one name twice", field=f"{where}.{kind}")


def _check_container(container: Mapping[str, Any], named: Mapping[str, list[Any]], where: str) -> None:
    check_name(container.get("name"), f"{where}.name", label=True)
    check_fields(container.get("image"), "string", f"{where}.image")
    _check_resources(container.get("resources", {}), named["resourceClaims"], f"{where}.resources")
    paths = set()
    for mount in container.get("volumeMounts", []):
        if mount.get("name") not in named["volumes"]:
            raise SpecError(f"{mount.get('name')!r} is no volume of the pod", field=f"{where}.volumeMounts")
        path = mount.get("mountPath")
        if not path or path in paths:
            raise SpecError(f"must have a mountPath of its own, not {path!r}", field=f"{where}.volumeMounts")
        paths.add(path)
    for item in container.get("env", []):
        if not _VARIABLE.fullmatch(item.get("name") or ""):
            raise SpecError(f"{item.get('name')!r} is not the name of a variable", field=f"{where}.env")


def _check_resources(resources: Mapping[str, Any], claims: list[Any], where: str) -> None:
    for claim in resources.get("claims", []):
        if claim.get("name") not in claims:
            raise SpecError(f"{claim.get('name')!r} is no resource claim of the pod", field=f"{where}.claims")
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for kind, found in (("limits", limits), ("requests", requests)):
        for name, value in found.items():
            _check_resource(name, value, f"{where}.{kind}.{name}")
    for name, value in requests.items():
        field, amount = f"{where}.requests.{name}", quantity_of(value, where)
        limit = quantity_of(limits[name], where) if name in limits else None
        if ("/" in name or name.startswith("hugepages-")) and limit != amount:  # these cannot be shared out twice
            raise SpecError("must be equal to the limit", field=field)
        if limit is not None and amount > limit:
            raise SpecError(f"{value!r} is more than the limit, {limits[name]!r}", field=field)
    pages = next((name for name in (*limits, *requests) if name.startswith("hugepages-")), "")
    if pages and not {"cpu", "memory"} & {*limits, *requests}:
        raise SpecError("needs a limit of cpu or memory too", field=f"{where}.limits.{pages}")


def _check_resource(name: str, value: Any, field: str) -> None:
    if "/" not in name and name not in ("cpu", "memory", "ephemeral-storage") and not name.startswith("hugepages-"):
        hint = "resources of a device have a domain, like nvidia.com/gpu"
        raise SpecError("is no resource of Kubernetes", field=field, hint=hint)
    check_key(name, field)
    if "/" in name and not str(value).isdecimal():
        raise SpecError(f"must be a whole number, not {value!r}", field=field)
