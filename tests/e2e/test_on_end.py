"""Actions at the end of a run: node 0 calls the job's webhook, and a waiting client runs a command."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Jobs
from runtime.test_webhook import Hook, hook

__all__ = ["hook"]

pytestmark = pytest.mark.slow


def cloudtrain(jobs: Jobs, *words: str) -> tuple[int, dict[str, Any], str]:
    done = jobs.cli(*words, "--store", "st", "--json")
    return done.code, done.json, done.err


def test_node_0_posts_each_end_with_the_secret_by_reference(jobs: Jobs, hook: Hook) -> None:
    jobs.environ["HOOK"] = "s3cret"
    hook.codes = [200, 500]  # the client posts the second end again
    (jobs.code / "train.py").write_text(
        "import os\nif os.environ['CLOUDTRAIN_ATTEMPT'] == '0.0' and os.environ['RANK'] == '1': raise ValueError('x')\n"
    )
    flags = ["--nodes", "2", "--launcher", "python", "--retries", "1", "--run-id", "r1", "--secret", "HOOK"]
    header = "Authorization=Bearer {secrets.HOOK}"
    code, result, _ = cloudtrain(jobs, "submit", "train.py", *flags, "--webhook", hook.url, "--webhook-header", header)
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
    for path in (jobs.code / "st/runs/r1").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("url", "code"),
    [("http://127.0.0.1:9/x", 0), pytest.param("{slow}", 0, marks=pytest.mark.proof), ("{bad}", 3)],
)
def test_a_bad_webhook_changes_no_outcome(jobs: Jobs, hook: Hook, url: str, code: int) -> None:
    hook.slow, hook.codes = (30.0, []) if "slow" in url else (0.0, [500, 500, 500])
    url = url if url.startswith("http") else hook.url
    (jobs.code / "train.py").write_text(f"raise SystemExit({code})\n")
    ended, result, _ = cloudtrain(jobs, "submit", "train.py", "--webhook", url, "--run-id", "r1")
    assert (ended, result["state"]) == ((0, "succeeded") if code == 0 else (1, "failed"))


def test_a_waiting_client_runs_the_command_once_with_the_outcome(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text("raise ValueError('no data')\n")
    names = ("RUN_ID", "RUN", "STATE", "CATEGORY", "REASON", "EXIT_CODE")
    words = "|".join(f"$CLOUDTRAIN_{name}" for name in names)
    code, result, messages = cloudtrain(
        jobs, "submit", "train.py", "--run-id", "r1", "--on-end", f'echo "{words}" >> end; exit 7'
    )
    assert (code, result["exit_code"]) == (1, 1)
    assert (jobs.code / "end").read_text().strip().split("|") == [
        "r1", result["run"], "failed", "user_error", result["reason"], "1",
    ]  # fmt: skip
    assert "--on-end ended with 7; the exit code here is that of the run" in messages
    code, _, _ = cloudtrain(jobs, "wait", "r1", "--on-end", "echo $CLOUDTRAIN_STATE > end")
    assert (code, (jobs.code / "end").read_text()) == (1, "failed\n")


def test_a_detached_client_cannot_run_it(jobs: Jobs) -> None:
    (jobs.code / "train.py").write_text("print(1)\n")
    code, result, _ = cloudtrain(jobs, "submit", "train.py", "--detach", "--on-end", "true")
    assert (code, result["field"]) == (2, "on_end")
    assert not (jobs.code / "st").exists()
