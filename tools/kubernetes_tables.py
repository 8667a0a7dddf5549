"""``python tools/kubernetes_tables.py FOLDER``: the fields of all objects that cloudtrain's manifests can hold.

They come from the installed client kubernetes, into FOLDER/fields.json. FOLDER is ``cloudtrain/providers/kubernetes``.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

from kubernetes import client

ROOTS = ("V1Job", "V1Service")
QUANTITIES = frozenset({"limits", "requests", "overhead", "sizeLimit"})
"""Fields whose texts are quantities; the client does not mark them."""
SCALARS = {"str": "string", "bool": "bool", "int": "int", "object": "any", "datetime": "string"}
TYPE = re.compile(r"(List\[|Dict\[str, )?([^\]]*)\]?")
MARKS = {"List[": "*", "Dict[str, ": "%", None: ""}


def fields() -> dict[str, dict[str, str]]:
    """Return each model's fields with their types: ``*T`` is a list of T, ``%T`` a map from text to T."""
    found: dict[str, dict[str, str]] = {}
    waiting = list(ROOTS)
    while waiting:
        kind = waiting.pop()
        model, table = getattr(client, kind), found.setdefault(kind, {})
        for own, name in model.attribute_map.items():
            mark, inner = TYPE.fullmatch(model.openapi_types[own]).groups()  # type: ignore[union-attr]
            if name == "managedFields" or (kind in ROOTS and name == "status"):  # only an answer has them
                continue
            table[name] = MARKS[mark] + ("quantity" if name in QUANTITIES else SCALARS.get(inner, inner))
            if inner not in {*SCALARS, *found, *waiting}:
                waiting.append(inner)
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found)}


def text() -> str:
    """Return the table with one line for each object, so that a change of the API changes one line."""
    rows = [f"  {json.dumps(kind)}: {json.dumps(table)}" for kind, table in fields().items()]
    source = json.dumps(f"kubernetes {version('kubernetes')}")
    return f'{{\n"source": {source},\n"fields": {{\n' + ",\n".join(rows) + "\n}\n}\n"


if __name__ == "__main__":
    Path(sys.argv[1], "fields.json").write_text(text(), encoding="utf-8")
