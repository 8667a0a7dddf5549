"""Check the body of a training job before it is sent, with no SDK.

`fields.json` holds the models of Huawei's SDK that a body can reach (``tools/modelarts_tables.py``). The limits are
those of Huawei's page on creating a training job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from ...errors import SpecError
from .._cloud import problems, table_in
from . import NAME
from .node import SECRETS

DESCRIPTION, VARIABLES, LONGEST_VALUE = 256, 100, 4096
"""Most characters of a description, most variables of a job, and most characters of each."""
_models = partial(table_in, __file__, "fields.json")


@cache
def _shapes() -> dict[str, Any]:
    """Return the SDK's models as `problems` reads them."""
    scalars = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    shapes: dict[str, Any] = {name: {"type": form} for name, form in scalars.items()}
    shapes["dict(str, str)"] = {"type": "map", "key": "str", "value": "str"}
    for name, fields in _models()["models"].items():
        members = {key: re.sub(r"list\[(.+)\]", r"\1[]", kind) for key, kind in fields.items()}
        shapes[name] = {"type": "structure", "members": members, "unknown": f"no such field of a {name}"}
    return shapes


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError`, named by its place in ``options``, for values that ModelArts refuses. Only `options` can be
    wrong."""
    where = f"options.{NAME}"
    for path, why, hint in problems(_shapes(), "Job", body):
        raise SpecError(why, field=".".join((where, *path)), hint=hint)
    variables = body["algorithm"].get("environments") or {}
    if len(variables) > VARIABLES:
        hint = "use the job's own env, which has no such limit"
        raise SpecError(f"has {len(variables)} entries, at most {VARIABLES}", field=f"{where}.algorithm", hint=hint)
    for name, value in variables.items():
        if name.startswith("CLOUDTRAIN_") and (name != SECRETS or value):
            raise SpecError("cloudtrain itself sets such names", field=f"{where}.algorithm.environments.{name}")
        field = f"{where}.algorithm.environments.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name.startswith(("MA_", "VC_")):
            raise SpecError("is not a name that a job may set", field=field)
        if len(value) > LONGEST_VALUE or "$" in value:
            why = f"has more than {LONGEST_VALUE} characters, or a $, which ModelArts refuses"
            raise SpecError(why, field=field, hint="use the job's own env, which has no such limit")
