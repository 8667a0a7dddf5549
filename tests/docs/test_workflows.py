"""The example workflows and our own, checked by their platforms' schemas and by the cloudtrain commands in them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import commands
from rows import for_each

from cloudtrain import cli
from cloudtrain.cli.output import Screen
from cloudtrain.job.run_id import check_run_id

ROOT = Path(__file__).parents[2]
GITHUB = [ROOT / "examples/ci/github-actions.yml", *sorted((ROOT / ".github/workflows").glob("*.yml"))]
GITLAB = ROOT / "examples/ci/gitlab-ci.yml"
TEMPLATES = [GITHUB[0], GITLAB]
RULES = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: {max-spaces-inside: 1}}}"
LATEST = re.compile(r"([\w./-]+)@([0-9a-f]{40})  # (v\d+\.\d+\.\d+)")


def texts(value: Any, *names: str) -> Iterator[str]:
    """Yield every shell text below the keys ``names``, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in names:
                yield from [item] if isinstance(item, str) else item
            else:
                yield from texts(item, *names)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, *names)


def scripts(path: Path) -> list[str]:
    return list(texts(yaml.safe_load(path.read_text()), "run", "script", "before_script", "after_script"))


@pytest.mark.slow
@for_each("path", [*GITHUB, GITLAB])
def test_the_platforms_schema_and_yamllint_take_it(path: Path) -> None:
    schema = "vendor.gitlab-ci" if path == GITLAB else "vendor.github-workflows"
    for command in (
        ["check_jsonschema", "--builtin-schema", schema, str(path)],
        ["yamllint", "--strict", "-d", RULES, str(path)],
    ):
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_schema_is_one_that_refuses(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text(GITHUB[0].read_text().replace("runs-on:", "runs-no:"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(bad)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_command_of_ours_is_one(path: Path) -> None:
    verbs = []
    for script in scripts(path):
        for words in commands(script):
            for at in [number for number, word in enumerate(words) if word == "cloudtrain"]:
                tokens, args = cli.split(words[at + 1 :])
                cli.parse(tokens, args, Screen(io.StringIO(), io.StringIO()))
                verbs.append(tokens[0])
    assert len(verbs) == sum(len(re.findall(r"\bcloudtrain (?=[a-z])", script)) for script in scripts(path))
    assert {"submit", "wait", "pull", "cancel"} == set(verbs)


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_say_their_version(path: Path) -> None:
    lines = re.findall(r"uses: (.*)", path.read_text())
    assert lines
    assert [line for line in lines if not LATEST.fullmatch(line)] == []
    pins = {match[1]: match[2] for line in lines if (match := LATEST.fullmatch(line))}
    assert len(set(pins.values())) == len(pins)


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_no_event_is_written_into_a_shell_line_and_permissions_are_few(path: Path) -> None:
    assert [script for script in scripts(path) if "${{" in script] == []
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert set(job["permissions"]) <= {"contents", "id-token"}, name
        assert job["permissions"]["contents"] == "read"
        assert job["timeout-minutes"] < 360
        checkouts = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_run_is_named_after_what_stays_when_a_step_is_run_again() -> None:
    github, gitlab = (yaml.safe_load(path.read_text()) for path in TEMPLATES)
    assert github["env"]["RUN_ID"] == "ci-${{ github.run_id }}"
    assert gitlab["variables"]["RUN_ID"] == "ci-$CI_PIPELINE_ID"
    assert check_run_id("ci-18446744073709551615")
    for path in TEMPLATES:
        calls = [script for script in scripts(path) if "cloudtrain" in script and "pip install" not in script]
        assert all('"$RUN_ID"' in script for script in calls)


def test_the_waiting_ends_before_the_job_does() -> None:
    """Otherwise GitHub cancels the job, and with it the run."""
    job = yaml.safe_load(GITHUB[0].read_text())["jobs"]["wait"]
    (wait,) = [step["run"] for step in job["steps"] if "cloudtrain wait" in step.get("run", "")]
    assert "--timeout 5h" in wait
    assert job["timeout-minutes"] > 5 * 60 + 15
    assert job["steps"][-1] == {"if": "cancelled()", "run": 'cloudtrain cancel "$RUN_ID"'}
