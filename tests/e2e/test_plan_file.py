"""A saved plan is sent as it was shown, also when it was saved beside the code it is about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CLI = [sys.executable, "-m", "cloudtrain"]


def cloudtrain(folder: Path, *words: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    with open(out or folder / "stdout.txt", "wb") as stream:
        done = subprocess.run([*CLI, *words], cwd=folder, stdout=stream, stderr=subprocess.PIPE, timeout=60)
    text = Path(stream.name).read_text()
    return subprocess.CompletedProcess(done.args, done.returncode, text, done.stderr.decode())


def test_the_request_shown_is_the_request_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('args', sys.argv[1:])\n")
    words = ("train.py", "--run-id", "planned-1", "--hp", "lr=1", "--store", "st")
    assert cloudtrain(tmp_path, "plan", *words, "--json", out=tmp_path / "plan.json").returncode == 0
    shown = json.loads((tmp_path / "plan.json").read_text())
    assert [file["path"] for file in shown["code"]["files"]] == ["train.py"]
    assert {"path": "plan.json", "rule": "built-in: this command writes to it"} in shown["code"]["excluded"]

    sent = cloudtrain(tmp_path, "submit", "--plan", "plan.json")
    assert sent.returncode == 0, sent.stderr
    assert "args ['--lr', '1']" in sent.stdout
    recorded = json.loads((tmp_path / "st/runs/planned-1/attempts/0/request.json").read_text())
    assert {key: recorded[key] for key in shown["request"]} == shown["request"]
    context = json.loads((tmp_path / "st/runs/planned-1/container/context.json").read_text())
    assert context == shown["request"]["context"]


def test_a_plan_of_other_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    cloudtrain(tmp_path, "plan", "train.py", "--store", "st", "--json", out=tmp_path / "plan.json")
    (tmp_path / "train.py").write_text("print(2)\n")
    refused = cloudtrain(tmp_path, "submit", "--plan", "plan.json")
    assert refused.returncode == 2
    assert "has changed since it was planned" in refused.stderr
    assert not (tmp_path / "st/runs").exists()
