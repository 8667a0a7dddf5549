"""Whole runs with ``node_check`` and ``min_gpu_util`` on this machine: a bad GPU, and idle GPUs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from jobs import Jobs

from cloudtrain.runs.summary import status_text

pytestmark = pytest.mark.slow

FAULTY = Path(__file__).parents[1] / "scripts" / "faulty_node"
SMI = """#!/bin/sh
echo '3, 10, 40'; echo '1, 10, 40'
"""
IDLE = """
import json, os, time
with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as file:
    file.write(json.dumps({"step": 1}) + "\\n")
while True:
    print("waits for data", flush=True)
    time.sleep(0.2)
"""


def test_a_machine_that_fails_the_check_twice_is_named(jobs: Jobs) -> None:
    jobs.write("train.py", "raise SystemExit('no rank may start')")
    faulty = ("--env", f"PYTHONPATH={FAULTY}", "--env", "FAULTY=node 1")
    shape = ("--nodes", "2", "--launcher", "python", "--node-check", "--retries", "1")
    done = jobs.submit("train.py", *shape, *faulty, "--run-id", "bad-1")
    machine, ecc = socket.gethostname(), "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    reason = f"node 1 failed the node check on machine {machine}: a process ended with code 1: {ecc}"
    assert (done.code, done.json["category"], done.json["reason"]) == (9, "infra", reason)
    assert (done.json["failure"]["node"], done.json["failure"]["machine"]) == (1, machine)
    assert [row["machine"] for row in done.json["attempts"]] == [machine] * 2
    assert done.json["bad_machines"] == [{"machine": machine, "attempts": 2, "excluded": False}]
    assert f"bad machine  {machine}: 2 attempts failed on it; local cannot leave out" in status_text(done.json)
    records = [json.loads(path.read_bytes()) for path in (jobs.store / "runs/bad-1/live/exit").glob("*.json")]
    assert [record["machine"] for record in records] == [machine] * 4


def test_a_run_that_leaves_its_gpus_idle_ends_as_stalled(jobs: Jobs) -> None:
    jobs.write("bin/nvidia-smi", SMI).chmod(0o755)
    jobs.environ["PATH"] = f"{jobs.code / 'bin'}:{jobs.environ.get('PATH', os.environ['PATH'])}"
    jobs.shorten(usage=0.3)
    jobs.write("train.py", IDLE)
    rule = ("--min-gpu-util", "5% for 2s", "--stall-timeout", "0")
    done = jobs.submit("train.py", "--nodes", "2", "--launcher", "python", *rule, "--run-id", "idle-1")
    assert (done.code, done.json["category"]) == (1, "stalled")
    why, _, where = done.json["reason"].partition("; ")
    assert why.startswith("no GPU was used for 5 % in the last 2s (min_gpu_util): 3.0 % on average, 3 % at most")
    assert where.startswith("all 2 ranks are at train.py:")
