"""JSON schemas (draft 2020-12) of ``--json``: a file for each verb beside this one, and shared definitions.

The files are the source. They refer to each other by name, so a tool that is given the path of one finds the others.
`load` returns one that stands alone. For a new ``--json``, or a new field in one, add its schema here and run
``tools/json_page.py``: `tests/cli/test_json_schemas.py` fails until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["SHARED", "WRITTEN", "load", "names", "path"]

SHARED = "defs"
"""The file of the definitions that the others share; not a schema itself."""
WRITTEN = ("job", "settings")
"""The files of documents that people write: `cloudtrain.settings.schema` makes them."""
_SUFFIX = ".schema.json"


def names() -> list[str]:
    """Return the names of the schemas: the verbs, ``error`` and ``result`` (result.json); sorted."""
    found = {file.name.removesuffix(_SUFFIX) for file in Path(__file__).parent.glob(f"*{_SUFFIX}")}
    return sorted(found - {SHARED, *WRITTEN})


def path(name: str) -> Path:
    """Return the file of a schema."""
    return Path(__file__).parent / f"{name}{_SUFFIX}"


def load(name: str) -> dict[str, Any]:
    """Return the schema ``name`` with its references in its own ``$defs``. FileNotFoundError for an unknown name."""
    schema, shared = _read(name), _read(SHARED)["$defs"]
    own = schema.get("$defs", {})
    found = {"$defs": {}, **_moved({key: value for key, value in schema.items() if key != "$defs"})}
    wanted = list(_refs(found))
    for word in wanted:
        if word not in found["$defs"]:
            found["$defs"][word] = _moved(own[word] if word in own else shared[word])
            wanted += _refs(found["$defs"][word])
    return found


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path(name).read_text(encoding="utf-8"))
    return found


def _moved(value: Any) -> Any:
    """Return ``value`` with every reference to the shared file turned into one to its own."""
    if isinstance(value, dict):
        return {
            key: item.replace(f"{SHARED}{_SUFFIX}#", "#") if key == "$ref" and isinstance(item, str) else _moved(item)
            for key, item in value.items()
        }
    return [_moved(item) for item in value] if isinstance(value, list) else value


def _refs(value: Any) -> Iterator[str]:
    """Yield the names in ``$defs`` that ``value`` refers to."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref" and isinstance(item, str):
                yield item.rpartition("/")[2]
            else:
                yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)
