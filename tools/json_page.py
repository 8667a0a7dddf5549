"""``docs/json.md``, made of the schemas in ``cloudtrain/schemas``: ``python tools/json_page.py > docs/json.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain import schemas

HEAD = """# Output of `--json`

Use this page to read the output of `--json` in a script. With `--json`, a command prints exactly one JSON object on
stdout. All messages go to stderr.

- The object is on one line. On a terminal, and of `plan`, it is indented. Its fields have the order of the tables
  below.
- `logs` prints one object for each line of the log.
- For several runs, `status`, `pull`, `report` and `cancel` print one object. Its field `runs` has an object for each
  run.
- A command that fails or is interrupted prints an [error](#error) instead. An object with a `state` describes a run. An
  object without one has the cause in `error`.
- If `logs` fails after some lines, the error is the last line.
- `submit`, `rehearse` and `wait` print the outcome of the run with every exit code ([exit-codes.md](exit-codes.md)).

The package has a schema for each verb, in the folder `cloudtrain/schemas/` (JSON Schema, draft 2020-12). To print one,
run `cloudtrain schema status`. The files share the definitions in `defs.schema.json`. In Python, load a schema:

```python run
from cloudtrain import schemas

schema = schemas.load("status")
assert "status" in schemas.names() and "$defs" in schema
print(schemas.path("status"))
```

The schemas are strict. cloudtrain prints all their fields and no others, except fields with "may be absent" below. A
later version may print more fields. Let your script ignore unknown fields. To check an output, use the schemas of the
version that printed it.

`tools/json_page.py` makes this page from the schemas.

"""


def main() -> int:
    sys.stdout.write(page())
    return 0


def page() -> str:
    """Return the page."""
    parts = [HEAD + "## By verb\n"]
    parts.append("| schema | describes | object |\n| --- | --- | --- |")
    shared = _read(schemas.SHARED)["$defs"]
    sections: dict[str, Mapping[str, Any]] = {}
    for name in schemas.names():
        schema = _read(name)
        shapes = schema.get("oneOf") or [schema]
        parts.append(f"| `{name}.schema.json` | {schema['title']} | {' or '.join(_names(name, shapes))} |")
        sections |= {f"{name}: {key}": value for key, value in schema.get("$defs", {}).items()}
        if "oneOf" not in schema and schema.get("properties"):
            sections[f"{name}.json"] = schema
    text = "\n".join(parts) + "\n"
    for title, schema in {**dict(sorted(sections.items())), **dict(sorted(shared.items()))}.items():
        text += "\n" + "\n".join(_section(title, schema)) + "\n"
    return text


def _names(name: str, shapes: list[Mapping[str, Any]]) -> Iterator[str]:
    for shape in shapes:
        if "properties" in shape:
            yield _link(f"{name}.json")
        else:
            yield _reference(shape["$ref"], f"{name}:")


def _section(title: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {title}\n"
    text = str(schema.get("description") or schema.get("title") or "")
    table = schema.get("items", schema)  # of an array, show the fields of its items
    yield f"{_cased(text)}."
    if "properties" not in schema and "$ref" not in schema:
        yield f"\nType: {_type(schema, title)}."
    if "$ref" in schema:
        yield f"\nThe fields of {_reference(schema['$ref'], title)}{', and:' if table.get('properties') else '.'}"
    if table.get("properties"):
        yield "\n| field | type | meaning |\n| --- | --- | --- |"
        yield from _rows("", table, title)


def _rows(before: str, schema: Mapping[str, Any], title: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, item in schema["properties"].items():
        absent = "" if name in required else "; may be absent"
        meaning = str(item.get("description", "")).replace("|", "\\|")
        yield f"| `{before}{name}` | {_type(item, title)}{absent} | {meaning} |"
        inner = item.get("items", item)
        if "properties" in inner:
            yield from _rows(f"{before}{name}{'[]' if 'items' in item else ''}.", inner, title)


def _type(item: Mapping[str, Any], title: str) -> str:
    if "$ref" in item:
        return _reference(item["$ref"], title)
    if "oneOf" in item:
        return " or ".join(_type(choice, title) for choice in item["oneOf"])
    if "const" in item:
        return f"`{json.dumps(item['const'])}`"
    if "enum" in item:
        return ", ".join(f"`{json.dumps(word)}`" for word in item["enum"])
    types = item["type"] if isinstance(item["type"], list) else [item["type"]]
    if types == ["array"]:
        return f"array of {_type(item['items'], title)}"
    if isinstance(item.get("additionalProperties"), dict):
        return f"object of {_type(item['additionalProperties'], title)}"
    return " or ".join(types)


def _reference(text: str, title: str) -> str:
    """Return a link for a reference of the schema ``title``: to its own definitions, or to the shared ones."""
    name = text.rpartition("/")[2]
    verb = title.partition(":")[0]
    shared = text.startswith(schemas.SHARED) or ":" not in title
    return _link(name if shared else f"{verb}: {name}")


def _link(heading: str) -> str:
    return f"[{heading.rpartition(': ')[2]}](#{heading.replace(':', '').replace(' ', '-').replace('.', '')})"


def _cased(text: str) -> str:
    return text[:1].upper() + text[1:]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(schemas.path(name).read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
