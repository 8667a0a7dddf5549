"""Check a CustomJob before it is sent, with no SDK.

`fields.json` holds the fields of the SDK's protobufs (``tools/vertex_tables.py``). The protobufs have no limits, and no
rules that span fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from ...errors import SpecError
from .._cloud import problems, table_in
from . import NAME
from .node import NODES

ENV_COUNT = 100
"""Most variables of a container, besides the service's own: docs of ContainerSpec.env."""
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "string": {"type": "string", "pattern": r"[^\ud800-\udfff]*", "words": "text"},  # halves of pairs have no UTF-8
    "bool": {"type": "boolean"},
    "int32": {"type": "integer", "min": -(2**31), "max": 2**31 - 1, "words": "a whole number"},
    "int64": {"type": "int64", "pattern": r"-?\d{1,18}", "words": "a whole number"},
    "map": {"type": "map", "key": "string", "value": "string"},
    "Duration": {"type": "string", "pattern": r"\d{1,11}s", "words": "seconds, like 3600s"},
}
"""The protobufs' scalars, as `problems` reads them."""
fields = partial(table_in, __file__, "fields.json")
"""Return the table."""


@cache
def _shapes() -> dict[str, Any]:
    """Return the protobufs as `problems` reads them."""
    messages = {
        name: {"type": "structure", "members": members, "unknown": f"no such field of a {name}"}
        for name, members in fields()["messages"].items()
    }
    enums = {name: {"type": "string", "enum": names} for name, names in fields()["enums"].items()}
    return {**messages, **enums, **_FORMS}


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError`, named by its place in ``options``, for values that the API refuses. Only `options` can be
    wrong."""
    for path, why, hint in problems(_shapes(), fields()["input"], body):
        raise SpecError(why, field=".".join(("options", NAME, *path)), hint=hint)
    pools = body["jobSpec"]["workerPoolSpecs"]
    for pool in pools:
        _check_env(pool["containerSpec"].get("env", []), sum(int(pool["replicaCount"]) for pool in pools))
        if "pythonPackageSpec" in pool:
            where = f"options.{NAME}.jobSpec.workerPoolSpecs.*.pythonPackageSpec"
            raise SpecError("is not allowed: each pool has cloudtrain's container", field=where)
    scheduling = body["jobSpec"]["scheduling"]
    if scheduling.get("disableRetries") and scheduling.get("strategy") == "SPOT":
        where = f"options.{NAME}.jobSpec.scheduling.disableRetries"
        why = "is set, and a job on spot machines needs such retries"
        raise SpecError(why, field=where, hint="remove disableRetries, or spot")


def _check_env(variables: list[Mapping[str, str]], count: int) -> None:
    """Check the variables; ``count`` is the job's nodes."""
    where = f"options.{NAME}.jobSpec.workerPoolSpecs.*.containerSpec.env"
    if len(variables) > ENV_COUNT:
        why = f"has {len(variables)} variables, at most {ENV_COUNT}"
        raise SpecError(why, field=where, hint="use the job's own env, which has no such limit")
    names = [item.get("name", "") for item in variables]
    if names[:1] != [NODES] or variables[0].get("value") != str(count):
        why = f"cloudtrain itself sets the first variable, {NODES}"
        raise SpecError(why, field=where, hint="begin with index 1")
    for number, name in enumerate(names):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SpecError(f"{name!r} is not a name for an environment variable", field=f"{where}.{number}.name")
        if number and (name.startswith("CLOUDTRAIN_") or name in names[:number]):
            raise SpecError(f"{name} is set already", field=f"{where}.{number}.name")
