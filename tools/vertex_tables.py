"""``python tools/vertex_tables.py FOLDER``: the facts of a CustomJob that provider ``vertex`` needs without an SDK.

It writes every message that a request can reach, with the type of each field, and the values of every enum, to
FOLDER/fields.json. The source is the installed google-cloud-aiplatform. FOLDER is ``cloudtrain/providers/vertex``.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob

ANSWERED = frozenset(
    {"name", "state", "createTime", "startTime", "endTime", "updateTime", "error", "webAccessUris", "satisfiesPzs"}
) | {"satisfiesPzi"}  # fmt: skip
"""Members of a CustomJob that only an answer has."""
SCALARS = {3: "int64", 5: "int32", 8: "bool", 9: "string"}


def fields() -> dict[str, Any]:
    """Return the table: ``messages`` maps each to its fields' types (``[]``: a list), ``enums`` to their values."""
    messages: dict[str, dict[str, str]] = {}
    enums: dict[str, list[str]] = {}
    root = CustomJob.pb(CustomJob()).DESCRIPTOR
    _message(root, messages, enums, without=ANSWERED)
    package = version("google-cloud-aiplatform")
    return {"input": _name(root), "source": f"google-cloud-aiplatform {package}", "messages": messages, "enums": enums}


def _message(
    message: Any, messages: dict[str, dict[str, str]], enums: dict[str, list[str]], without: frozenset[str]
) -> None:
    table = messages[_name(message)] = {}
    for field in message.fields:
        if field.json_name in without:
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            kind = "map"
        elif inner is not None:
            kind = _name(inner)
            if inner.file.package != "google.protobuf" and kind not in messages:
                _message(inner, messages, enums, frozenset())
        elif field.enum_type is not None:
            kind = _name(field.enum_type)
            enums[kind] = [value.name for value in field.enum_type.values]
        else:
            kind = SCALARS[field.type]
        table[field.json_name] = kind + ("[]" if field.is_repeated and kind != "map" else "")


def _name(descriptor: Any) -> str:
    return str(descriptor.full_name).removeprefix(f"{descriptor.file.package}.")


def _text(table: dict[str, Any]) -> str:
    """Return the table with one line for each message, so that a change of the API changes one line."""
    rows = []
    for key, value in table.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            rows.append(f"{json.dumps(key)}: {{\n{inner}\n}}")
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    Path(sys.argv[1], "fields.json").write_text(_text(fields()), encoding="utf-8")
