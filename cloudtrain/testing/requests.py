"""Compare a planned request in tests: the value at a path, and a golden file of a whole plan."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..provider_api.protocol import Request
from ..validate import did_you_mean

if TYPE_CHECKING:
    from ..runs.submit import Plan

__all__ = ["ANY", "UPDATE", "assert_request", "compare", "stable"]

UPDATE = "CLOUDTRAIN_SNAPSHOTS"
"""Variable that, set to ``write``, makes tests write golden files instead of comparing them."""
MANY_LINES = 20
ANY = object()
"""The value of ``equals`` that any value of a request fits."""
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_HASH = re.compile(r"\b[0-9a-f]{16}\b")
_ORIGIN = re.compile(r"cloudtrain[:.-](revision|ci)")
_ORIGIN_WORD = re.compile(rf" {_ORIGIN.pattern}=\S+")
"""Tags of a run's origin, which differ by commit and CI run."""
#: Keys of a plan that change with cloudtrain's code, this machine or the day, at the same request.
_CHANGING = ("code", "runtime", "disk", "job_digest", "source", "layout")


def assert_request(planned: Request | Plan | Mapping[str, Any], path: str, *, equals: Any = ANY) -> Any:
    """Return the value at the dotted ``path`` of the request's body; a number is an index, so are negative ones.

    ``planned`` is a Request, a Plan, or the object that ``plan --json`` prints. Raises AssertionError with the part of
    the path that exists and the nearest name, or with the lines that differ from ``equals``.
    """
    found: Any = _body(planned)
    walked: list[str] = []
    for name in path.split("."):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif (
            isinstance(found, (list, tuple)) and re.fullmatch(r"-?\d+", name) and -len(found) <= int(name) < len(found)
        ):
            found = found[int(name)]
        else:
            raise AssertionError(_missing(path, walked, name, found))
        walked.append(name)
    if equals is not ANY and (wanted := _plain(equals)) != (is_now := _plain(found)):
        raise AssertionError(f"{path} of the request\n{_difference(wanted, is_now)}")
    return found


def _missing(path: str, walked: list[str], name: str, found: Any) -> str:
    where = ".".join(walked) or "the body"
    if isinstance(found, Mapping):
        near = did_you_mean(name, found)
        there = f"{where} has no {name!r}{near and f' ({near})'}; there are {', '.join(found) or 'no fields'}"
    elif isinstance(found, (list, tuple)):
        there = f"{where} is a list of {len(found)}, of which {name!r} is no index"
    else:
        there = f"{where} is {found!r}, with nothing below it"
    return f"the request has no {path}: {there}"


def _difference(wanted: Any, found: Any) -> str:
    if not isinstance(wanted, (dict, list)) and not isinstance(found, (dict, list)):
        return f"  planned: {found!r}\n  wanted:  {wanted!r}"
    return _diff(_text(wanted), _text(found), "wanted", "planned")


def _diff(old: str, new: str, before: str, after: str) -> str:
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), before, after, lineterm=""))


def _body(planned: Request | Plan | Mapping[str, Any]) -> Any:
    if isinstance(planned, Mapping):
        return planned["request"]["body"]
    return planned.body if isinstance(planned, Request) else planned.request.body


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def stable(planned: Plan | Mapping[str, Any]) -> dict[str, Any]:
    """Return the output of ``plan --json``, less what differs by run, day, machine or state of the code.

    Run ids, digests, this Python's path, and the folder of this process become ``<run>``, ``<digest>``, ``<python>``
    and ``<here>``. A text of many lines (a provider may send a program of ours) becomes ``<text>``. The shipped files,
    their sizes, the price and the tags of a run's origin are left out.
    """
    document: dict[str, Any] = _plain(planned if isinstance(planned, Mapping) else planned.document())
    run_id = re.compile(rf"(?<![\w-]){re.escape(str(document['run_id']))}(?![0-9a-z])")
    kept = {key: value for key, value in document.items() if key not in _CHANGING}
    kept["resources"] = {key: value for key, value in kept["resources"].items() if key != "price"}
    here = Path.cwd()
    words = [(sys.executable, "<python>"), (here.as_uri(), "file://<here>"), (str(here), "<here>")]

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {replaced(key): replaced(item) for key, item in value.items() if not _ORIGIN.fullmatch(key)}
        if isinstance(value, list):
            return [
                replaced(item)
                for item in value
                if not (isinstance(item, dict) and _ORIGIN.fullmatch(str(item.get("Key", ""))))
            ]
        if not isinstance(value, str):
            return value
        for old, new in words:
            value = value.replace(old, new)
        value = _ORIGIN_WORD.sub("", value)
        value = _HASH.sub("<digest>", _DIGEST.sub("<digest>", run_id.sub("<run>", value)))
        return value if value.count("\n") <= MANY_LINES else "<text>"

    return replaced(kept)  # type: ignore[no-any-return]


def compare(planned: Plan | Mapping[str, Any], path: Path) -> None:
    """Compare `stable` of a plan with a golden file, or write it if `UPDATE` says so. Raises AssertionError with the
    difference."""
    text = _text(stable(planned))
    again = f"run again with {UPDATE}=write"
    if os.environ.get(UPDATE) == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(f"there is no {path} to compare the plan with; {again}, read it, and commit it")
    golden = path.read_text(encoding="utf-8")
    if golden != text:
        difference = _diff(golden, text, path.name, "planned now")
        raise AssertionError(f"the plan is not the one of {path}; if it should be so, {again}\n{difference}")
