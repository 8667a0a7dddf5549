"""Runs whose end is decided elsewhere than in the script: a cancel in the store, silence, nothing to start from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.store.store import Store

pytestmark = pytest.mark.slow


def cloudtrain(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "cloudtrain", *words, "--store", "st", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_cancel_that_only_reached_the_store_starts_no_further_attempt(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(3); raise RuntimeError(str(time.time()))\n")
    cloudtrain(tmp_path, "submit", "train.py", "--run-id", "r1", "--retries", "5", "--detach")
    Store(str(tmp_path / "st")).cancel("r1")
    code, result = cloudtrain(tmp_path, "wait", "r1")
    assert (code, result["state"], result["category"]) == (5, "cancelled", "cancelled")
    assert Store(str(tmp_path / "st")).attempts("r1") == [0]


def test_silence_after_node_0_has_ended_is_a_stall(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nprint('up', flush=True)\nif os.environ['RANK'] == '1': time.sleep(600)\n"
    )
    code, result = cloudtrain(
        tmp_path, "submit", "train.py", "--nodes", "2", "--launcher", "python", "--stall-timeout", "4s"
    )
    assert (code, result["category"]) == (1, "stalled")


def test_a_run_with_nothing_complete_is_no_place_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('up')\n")
    assert cloudtrain(tmp_path, "submit", "train.py", "--run-id", "first")[0] == 0
    (tmp_path / "st/runs/first/live/checkpoints/step-1/0.0-1/node-0").mkdir(parents=True)
    code, result = cloudtrain(tmp_path, "submit", "train.py", "--run-id", "second", "--resume-from", "first")
    assert (code, result["error"]) == (2, "resume_from: run 'first' has no complete checkpoint")
    assert not (tmp_path / "st/runs/second").exists()


def test_artifacts_of_an_earlier_start_are_there_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nfolder = os.environ['CLOUDTRAIN_ARTIFACT_DIR']\n"
        "open(folder + '/history.csv', 'a').write(os.environ['CLOUDTRAIN_ATTEMPT'] + '\\n')\n"
        "assert os.environ['CLOUDTRAIN_ATTEMPT'] == '1.0'\n"
    )
    assert cloudtrain(tmp_path, "submit", "train.py", "--run-id", "r1", "--retries", "1")[0] == 0
    kept = tmp_path / "st/runs/r1/live/artifacts/node-0/history.csv"
    assert kept.read_text().split() == ["0.0", "1.0"]


def test_a_long_exception_is_still_the_cause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('bad batch ' + 'x' * 80_000_000)\n"
        "time.sleep(60)\n"
    )
    code, result = cloudtrain(tmp_path, "submit", "train.py", "--nodes", "2", "--launcher", "python")
    assert (code, result["failure"]["rank"], result["failure"]["node"]) == (1, 1, 1)
    assert result["failure"]["exception"].startswith("ValueError: bad batch xxx")
