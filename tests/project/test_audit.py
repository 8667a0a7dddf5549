"""`make audit`: no answer is no pass; and workflows take actions by their commit alone."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WANTED = {"good": "1", "bad": "2"}
HOLE = {"id": "PYSEC-1", "fix_versions": ["2.1", "3"]}
SKIPPED = {"name": "bad", "skip_reason": "Dependency not found on PyPI and could not be audited: bad (2)"}
FINE = {"name": "good", "version": "1", "vulns": []}


@pytest.fixture(scope="module")
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        ([FINE, {"name": "Bad", "version": "2", "vulns": []}], 0, "2 packages, no known vulnerability"),
        ([FINE, {"name": "bad", "version": "2", "vulns": [HOLE]}], 1, "bad 2: PYSEC-1, fixed in 2.1, 3"),
        ([FINE, SKIPPED], 2, "NOT AUDITED: no answer for 1 of 2 packages (bad)"),
        ([{"name": "good", "version": "1", "vulns": [{"id": "X"}]}, SKIPPED], 1, "good 1: X, no fix yet"),
        ([], 2, "no answer for 2 of 2"),
        (None, 2, "NOT AUDITED: the name service failed"),
    ],
)
def test_no_answer_is_no_pass(audit: Any, rows: Any, code: int, words: str) -> None:
    out = "" if rows is None else json.dumps({"dependencies": rows, "fixes": []})
    found, lines = audit.judged(WANTED, out, "Traceback\nthe name service failed")
    assert (found, words in " ".join(lines)) == (code, True), lines


def test_what_is_asked_for_is_all_that_is_installed(audit: Any) -> None:
    found = audit.installed()
    assert {"fsspec", "cyclopts", "pathspec", "rich"} <= found.keys()
    assert "cloudtrain" not in found
    assert not [version for version in found.values() if "+" in version]


@pytest.mark.parametrize(
    ("out", "ends", "code", "words"),
    [
        ("[]", 0, 0, "1 files, nothing found"),
        ("[]", 3, 2, "NOT AUDITED"),
        ("no json", 0, 2, "NOT AUDITED"),
        (
            json.dumps([{"ident": "unpinned-uses", "desc": "unpinned action", "locations": [{
                "symbolic": {"key": {"Local": {"verbatim_path": "x/a.yml"}}},
                "concrete": {"location": {"start_point": {"row": 6, "column": 8}}}}]}]),
            14, 1, "a.yml:7: unpinned-uses: unpinned action",
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_workflows(audit: Any, tmp_path: Path, out: str, ends: int, code: int, words: str) -> None:
    tool = tmp_path / "zizmor"
    tool.write_text(f"#!{sys.executable}\nimport sys\nprint({out!r})\nsys.exit({ends})\n")
    tool.chmod(0o755)
    found, lines = audit.workflows(tool, [tmp_path / "a.yml"])
    assert (found, words in " ".join(lines)) == (code, True), lines
    assert audit.workflows(tool, [])[0] == 2


def test_the_audit_itself_is_a_workflow(audit: Any) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/audit.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make audit"]
    assert (workflow["permissions"], job["permissions"]) == ({}, {"contents": "read"})
    assert {"schedule", "pull_request", "push"} <= workflow[True].keys(), "YAML reads `on` as true"


def test_actions_are_taken_by_their_commit(audit: Any) -> None:
    files = [path for pattern in audit.WORKFLOWS for path in ROOT.glob(pattern)]
    uses = [
        line.strip() for path in files for line in path.read_text().splitlines() if re.match(r"\s*(- )?uses:", line)
    ]
    assert uses
    for line in uses:
        assert re.fullmatch(r"(- )?uses: [\w./-]+@[0-9a-f]{40} {1,2}# v\d[\d.]*", line), line
