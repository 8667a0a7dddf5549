"""A new user with only the README: from nothing to pulled checkpoints, and to the cause of a failure."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import first_time_user as stranger
import pytest
from pages import ROOT, blocks, section
from rows import for_each

from cloudtrain import cli

BROKEN = "ValueError: could not convert string to float: 'n/a'"


def same(wanted: str, made: str) -> None:
    """Fail with the difference between the page's output and the terminal's."""
    one, other = stranger.normal(wanted).splitlines(), stranger.normal(made).splitlines()
    if one != other:
        lines = "\n".join(difflib.unified_diff(one, other, stranger.PAGE, "now", lineterm=""))
        pytest.fail(f"run: python proof/first_time_user.py FOLDER\n{lines}", pytrace=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cloudtrain")


@pytest.fixture(scope="module")
def said(home: Path) -> tuple[str, str]:
    (home / "first").mkdir()
    return stranger.short(home / "first")


@pytest.mark.proof
def test_from_a_script_to_pulled_checkpoints(said: tuple[str, str], home: Path) -> None:
    import torch

    same(stranger.on_page()["first-job"].partition("data.csv\n")[2], said[0].partition("data.csv\n")[2])
    weights = torch.load(home / "first" / "results" / "checkpoints" / "step-100" / "model.pt")
    assert weights["weight"].item() == pytest.approx(3, abs=0.2)


@pytest.mark.proof
def test_a_failure_is_understood_from_the_output_alone(said: tuple[str, str], home: Path) -> None:
    """The output has the rank, the cause, the line in the user's code and the next step, without the ranks that only
    waited."""
    same(stranger.on_page()["failure"], said[1])
    end = said[1].partition("\nfailed ")[2]
    script = next(block.text for block in stranger.steps(stranger.FIRST) if block.value("file") == "train.py")
    line = 1 + [text.strip() for text in script.splitlines()].index("rows.append(list(map(float, row)))")
    assert end.startswith(f"(user_error): rank 3 on node 1 raised {BROKEN} (train.py:{line})\n")
    assert f'File "train.py", line {line}' in end
    assert "next: cloudtrain report broken-1\n" in end
    assert "(exit code 1)\n" in end
    assert not re.search(r"rank [012]\b", end)
    told = (home / "first" / "broken-1.html").read_text(encoding="utf-8")
    assert "could not convert string to float" in told


@pytest.mark.proof
def test_a_stranger_goes_from_nothing_to_pulled_checkpoints(tmp_path: Path) -> None:
    """Use a clean clone, a new venv and the README. It takes minutes, mostly for downloads."""
    demo, good, bad = stranger.whole(tmp_path / "clone")
    page = stranger.on_page()
    same(page["demo"], demo)
    same(page["first-job"], good)
    same(page["failure"], bad)


def test_what_the_readme_shows_of_a_failure_is_what_it_prints() -> None:
    [shown] = [block.text for block in blocks("README.md") if "example=broken" in block.words]
    assert stranger.normal(shown) in stranger.normal(stranger.on_page()["failure"])


def test_what_is_the_same_every_time_is_compared() -> None:
    """No cause, rank, position or command in the page's output is ignored."""
    failure = stranger.on_page()["failure"]
    for other in (
        failure.replace("rank 3 on node 1", "rank 2 on node 1"),
        failure.replace("n/a", "nan"),
        failure.replace("train.py:13", "train.py:12"),
        failure.replace("next: cloudtrain report", "next: cloudtrain status"),
        failure.replace("(exit code 1)", "(exit code 7)"),
        failure + "[n1] [W1122 TCPStore.cpp:138] noise\n",
    ):
        assert other != failure
        with pytest.raises(pytest.fail.Exception):
            same(failure, other)


# ------------------------------------------------------------------------------------------------------ five providers


def lines() -> list[list[str]]:
    [block] = [block for block in blocks("README.md") if "example=providers" in block.words]
    return [shlex.split(command) for command in stranger.commands(block.text)]


def test_the_same_job_is_planned_for_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run each line with `plan` in place of `submit`: only the platform differs."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("README.md"):
        if name := block.value("file"):
            (tmp_path / name).write_text(block.text, encoding="utf-8")
    (tmp_path / "data.csv").write_text("1,4\n")
    plans: dict[str, Any] = {}
    for words in lines():
        assert words[:2] == ["cloudtrain", "submit"]
        assert cli.main(["plan", *words[2:], "--json"]) == 0, capsys.readouterr().err
        plan = json.loads(capsys.readouterr().out)
        plans[plan["provider"]] = plan
    assert list(plans) == [cell.strip("` ") for cell in head("What was verified, and how")]
    assert len({plan["code"]["digest"] for plan in plans.values()}) == 1
    assert {plan["request"]["context"]["entry_point"] for plan in plans.values()} == {"train.py"}
    assert {plan["request"]["context"]["nodes"] for plan in plans.values()} == {2}
    assert len({json.dumps(plan["request"]["body"]) for plan in plans.values()}) == 5


def head(heading: str) -> list[str]:
    row = next(line for line in section("README.md", heading).splitlines() if line.startswith("|"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


@for_each("name", ["local", "docker", "sagemaker", "azureml", "vertex"])
def test_what_is_said_to_be_verified_has_its_suite(name: str) -> None:
    text = (ROOT / "tests" / "providers" / f"test_{name}.py").read_text(encoding="utf-8")
    assert re.search(r"class \w+\(ProviderContract\)", text)


def test_no_real_cloud_is_claimed() -> None:
    """Check the table, and each cloud's own page."""
    row = next(line for line in section("README.md", "What was verified, and how").splitlines() if "real cloud" in line)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["", "", *["**not yet**"] * 3]
    for name in ("sagemaker", "azureml", "vertex"):
        assert "## What was and what was not verified" in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
