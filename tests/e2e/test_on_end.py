"""The end of a run: node 0 posts to the job's webhook, and a waiting client runs a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime.test_webhook import Hook, hook

__all__ = ["hook"]

pytestmark = pytest.mark.slow


def cloudtrain(folder: Path, *words: str, **env: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "cloudtrain", *words, "--store", "st", "--json"]
    given = {**os.environ, **env}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_node_0_posts_each_end_with_the_secret_by_reference(tmp_path: Path, hook: Hook) -> None:
    hook.codes = [200, 500]  # the second end is posted again
    (tmp_path / "train.py").write_text(
        "import os\nif os.environ['CLOUDTRAIN_ATTEMPT'] == '0.0' and os.environ['RANK'] == '1': raise ValueError('x')\n"
    )
    flags = ["--nodes", "2", "--launcher", "python", "--retries", "1", "--run-id", "r1", "--secret", "HOOK"]
    header = "Authorization=Bearer {secrets.HOOK}"
    code, result, _ = cloudtrain(
        tmp_path, "submit", "train.py", *flags, "--webhook", hook.url, "--webhook-header", header, HOOK="s3cret"
    )
    assert (code, result["state"]) == (0, "succeeded")
    bodies = [body for _, _, body in hook.posts]
    assert [headers["Authorization"] for _, headers, _ in hook.posts] == ["Bearer s3cret"] * 3
    assert [(body["attempt"], body["state"], body["over"]) for body in bodies] == [
        ("0.0", "failed", False),
        ("1.0", "succeeded", True),
        ("1.0", "succeeded", True),
    ]
    assert (bodies[0]["category"], bodies[0]["failure"]["rank"]) == ("user_error", 1)
    assert bodies[0]["run"] == result["run"]
    for path in (tmp_path / "st/runs/r1").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


@pytest.mark.parametrize(("url", "code"), [("http://127.0.0.1:9/x", 0), ("{slow}", 0), ("{bad}", 3)])
def test_a_bad_webhook_changes_no_outcome(tmp_path: Path, hook: Hook, url: str, code: int) -> None:
    hook.slow, hook.codes = (30.0, []) if "slow" in url else (0.0, [500, 500, 500])
    url = url if url.startswith("http") else hook.url
    (tmp_path / "train.py").write_text(f"raise SystemExit({code})\n")
    ended, result, _ = cloudtrain(tmp_path, "submit", "train.py", "--webhook", url, "--run-id", "r1")
    assert (ended, result["state"]) == ((0, "succeeded") if code == 0 else (1, "failed"))


def test_a_waiting_client_runs_the_command_once_with_the_outcome(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no data')\n")
    names = ("RUN_ID", "RUN", "STATE", "CATEGORY", "REASON", "EXIT_CODE")
    words = "|".join(f"$CLOUDTRAIN_{name}" for name in names)
    code, result, said = cloudtrain(
        tmp_path, "submit", "train.py", "--run-id", "r1", "--on-end", f'echo "{words}" >> end; exit 7'
    )
    assert (code, result["exit_code"]) == (1, 1)
    assert (tmp_path / "end").read_text().strip().split("|") == [
        "r1", result["run"], "failed", "user_error", result["reason"], "1",
    ]  # fmt: skip
    assert "--on-end ended with 7; the exit code here is that of the run" in said
    code, _, _ = cloudtrain(tmp_path, "wait", "r1", "--on-end", "echo $CLOUDTRAIN_STATE > end")
    assert (code, (tmp_path / "end").read_text()) == (1, "failed\n")


def test_a_client_that_leaves_cannot_run_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    code, result, _ = cloudtrain(tmp_path, "submit", "train.py", "--detach", "--on-end", "true")
    assert (code, result["field"]) == (2, "on_end")
    assert not (tmp_path / "st").exists()
