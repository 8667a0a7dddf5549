"""A saved plan is sent as it was shown, even if it was saved next to its code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import SpecError
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import load_plan, make_plan
from cloudtrain.settings.settings import Settings

CLI = [sys.executable, "-m", "cloudtrain"]


def cloudtrain(folder: Path, *words: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    with open(out or folder / "stdout.txt", "wb") as stream:
        done = subprocess.run([*CLI, *words], cwd=folder, stdout=stream, stderr=subprocess.PIPE, timeout=60)
    text = Path(stream.name).read_text()
    return subprocess.CompletedProcess(done.args, done.returncode, text, done.stderr.decode())


@pytest.mark.slow
def test_the_request_shown_is_the_request_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('args', sys.argv[1:])\n")
    words = ("train.py", "--run-id", "planned-1", "--hp", "lr=1", "--store", "st")
    assert cloudtrain(tmp_path, "plan", *words, "--json", out=tmp_path / "plan.json").returncode == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [file["path"] for file in plan["code"]["files"]] == ["train.py"]
    assert {"path": "plan.json", "rule": "built-in: this command writes to it"} in plan["code"]["excluded"]

    sent = cloudtrain(tmp_path, "submit", "--plan", "plan.json")
    assert sent.returncode == 0, sent.stderr
    assert "args ['--lr', '1']" in sent.stdout
    recorded = json.loads((tmp_path / "st/runs/planned-1/attempts/0/request.json").read_text())
    assert {key: recorded[key] for key in plan["request"]} == plan["request"]
    context = json.loads((tmp_path / "st/runs/planned-1/container/context.json").read_text())
    assert context == plan["request"]["context"]


@pytest.mark.slow
def test_a_plan_of_other_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    cloudtrain(tmp_path, "plan", "train.py", "--store", "st", "--json", out=tmp_path / "plan.json")
    (tmp_path / "train.py").write_text("print(2)\n")
    refused = cloudtrain(tmp_path, "submit", "--plan", "plan.json")
    assert refused.returncode == 2
    assert "has changed since it was planned" in refused.stderr
    assert not (tmp_path / "st/runs").exists()


@pytest.mark.parametrize(("part", "changed", "why"), [
    ("layout", None, "KeyError: 'layout'"),
    ("layout", {"inputs": {}, "code_url": "x"}, "layout: not a layout: "),
    ("request", {"body": {}}, "request: not a request: "),
    ("source", {"folder": "."}, "TypeError: "),
    ("job", {"script": "train.py"}, "script: no such field"),
])  # fmt: skip
def test_a_plan_of_an_older_format_is_one_clear_line(
    tmp_path: Path, part: str, changed: dict[str, Any] | None, why: str
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")
    settings, job = Settings(store=str(tmp_path / "st")), Job.make(entry_point="train.py")
    document = make_plan(job, settings=settings, cwd=code).document()
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(document))
    assert load_plan(saved, settings=settings, cwd=code).document() == document
    older = {key: value for key, value in document.items() if key != part}
    saved.write_text(json.dumps(older if changed is None else {**older, part: changed}))
    line = re.escape(f"plan.json is not a plan of this version of cloudtrain ({why}")
    with pytest.raises(SpecError, match=line) as refused:
        load_plan(saved, settings=settings, cwd=code)
    assert refused.value.hint == "plan the job again, and save that plan"
    assert len(str(refused.value).splitlines()) == 1
