"""``python tools/modelarts_tables.py SDK FOLDER``: the facts of a job that provider ``modelarts`` needs without an SDK.

It writes every model that the body of a new training job can reach, with the type of each field, to FOLDER/fields.json.
The source is huaweicloudsdkmodelarts in the folder SDK. FOLDER is ``cloudtrain/providers/modelarts``.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any


def fields(models: Any, version: str) -> dict[str, Any]:
    """Return the table: each model's fields by their names on the wire, with types as the SDK writes them."""
    found: dict[str, dict[str, str]] = {}

    def visit(name: str) -> None:
        model = getattr(models, name, None)
        if name in found or not hasattr(model, "openapi_types"):
            return
        wire = model.attribute_map
        found[name] = {wire[key]: kind for key, kind in model.openapi_types.items()}
        for kind in found[name].values():
            for inner in re.findall(r"[A-Z]\w+", kind):
                visit(inner)

    visit("Job")
    return {"source": f"huaweicloudsdkmodelarts {version}", "models": dict(sorted(found.items()))}


def text(table: dict[str, Any]) -> str:
    """Return the table with one line for each model, so that a change of the API changes one line."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in table["models"].items())
    return f'{{\n"source": {json.dumps(table["source"])},\n"models": {{\n{rows}\n}}\n}}\n'


def installed(folder: str) -> tuple[Any, str]:
    """Return the SDK's models and its version, from a folder of `pip install --target`."""
    sys.path.insert(0, folder)
    (info,) = Path(folder).glob("huaweicloudsdkmodelarts-*.dist-info")
    return importlib.import_module("huaweicloudsdkmodelarts.v1.model"), info.name.split("-")[1].removesuffix(".dist")


if __name__ == "__main__":
    Path(sys.argv[2], "fields.json").write_text(text(fields(*installed(sys.argv[1]))), encoding="utf-8")
