"""Runs whose end is decided outside the script: a cancel in the store, silence, nothing to resume from."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Jobs

from cloudtrain.store.store import Store

pytestmark = pytest.mark.slow


def cloudtrain(jobs: Jobs, *words: str) -> tuple[int, dict[str, Any]]:
    done = jobs.cli(*words, "--store", "st", "--json")
    return done.code, done.json


def test_a_cancel_that_only_reached_the_store_starts_no_further_attempt(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text("import time; time.sleep(3); raise RuntimeError(str(time.time()))\n")
    cloudtrain(jobs, "submit", "train.py", "--run-id", "r1", "--retries", "5", "--detach")
    Store(str(jobs.code / "st")).cancel("r1")
    code, result = cloudtrain(jobs, "wait", "r1")
    assert (code, result["state"], result["category"]) == (5, "cancelled", "cancelled")
    assert Store(str(jobs.code / "st")).attempts("r1") == [0]


def test_silence_after_node_0_has_ended_is_a_stall(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text(
        "import os, time\nprint('up', flush=True)\nif os.environ['RANK'] == '1': time.sleep(600)\n"
    )
    code, result = cloudtrain(
        jobs, "submit", "train.py", "--nodes", "2", "--launcher", "python", "--stall-timeout", "4s"
    )
    assert (code, result["category"]) == (1, "stalled")


def test_a_run_without_a_complete_checkpoint_cannot_be_resumed(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text("print('up')\n")
    assert cloudtrain(jobs, "submit", "train.py", "--run-id", "first")[0] == 0
    (jobs.code / "st/runs/first/live/checkpoints/step-1/0.0-1/node-0").mkdir(parents=True)
    code, result = cloudtrain(jobs, "submit", "train.py", "--run-id", "second", "--resume-from", "first")
    assert (code, result["error"]) == (2, "resume_from: run 'first' has no complete checkpoint")
    assert not (jobs.code / "st/runs/second").exists()


def test_artifacts_of_an_earlier_start_are_restored(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text(
        "import os\nfolder = os.environ['CLOUDTRAIN_ARTIFACT_DIR']\n"
        "open(folder + '/history.csv', 'a').write(os.environ['CLOUDTRAIN_ATTEMPT'] + '\\n')\n"
        "assert os.environ['CLOUDTRAIN_ATTEMPT'] == '1.0'\n"
    )
    assert cloudtrain(jobs, "submit", "train.py", "--run-id", "r1", "--retries", "1")[0] == 0
    kept = jobs.code / "st/runs/r1/live/artifacts/node-0/history.csv"
    assert kept.read_text().split() == ["0.0", "1.0"]


def test_a_long_exception_is_still_the_cause(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('bad batch ' + 'x' * 80_000_000)\n"
        "time.sleep(60)\n"
    )
    code, result = cloudtrain(jobs, "submit", "train.py", "--nodes", "2", "--launcher", "python")
    assert (code, result["failure"]["rank"], result["failure"]["node"]) == (1, 1, 1)
    assert result["failure"]["exception"].startswith("ValueError: bad batch xxx")
