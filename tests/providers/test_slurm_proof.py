"""Tests with slurmdbd or many jobs of a real Slurm: QOS, limits, sacct alone, preemptions, scripts made for srun."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurmcluster import DDP, SlurmPlatform, await_text, check_nothing_lost, ddp_world, loss_of, running, send, texts
from trials import TRIALS

from cloudtrain.errors import QuotaError
from cloudtrain.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.proof]
QOS_GRACE = 10
"""GraceTime in seconds of the QOS that tests/slurm.sh makes."""
MEMORY = 15
"""MinJobAge: seconds after which slurmctld forgets a job that has ended."""
PREEMPTIONS, EACH = min(TRIALS or 5, 50), 5
"""Preemptions in all, and of one run."""


@pytest.fixture(scope="module")
def accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmPlatform]:
    """Give a cluster with slurmdbd, and preemption by QOS."""
    with running(tmp_path_factory.mktemp("slurm"), ACCOUNTING="1", MIN_JOB_AGE=str(MEMORY)) as cluster:
        yield ddp_world(tmp_path_factory.mktemp("world"), cluster, stop_grace=QOS_GRACE + 5, qos="low")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmPlatform]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield ddp_world(tmp_path_factory.mktemp("world"), cluster)


def numbers(run: Run) -> list[str]:
    return [row["number"] for row in run.result()["attempts"]]


def test_a_job_that_a_better_qos_preempts_loses_nothing(accounting: SlurmPlatform) -> None:
    clean = loss_of(send(accounting, "qos-clean"))
    run = send(accounting, "qos-preempted")
    await_text(run, "from step", 2)
    cluster = accounting.cluster
    node = cluster.nodes_of(accounting.job(run))[1]
    words = ("-q", "urgent", "-w", node, "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1")
    cluster.call("sbatch", "-p", "low", *words)
    assert loss_of(run) == clean
    assert numbers(run) == ["0.0", "0.1"]
    check_nothing_lost(run)
    first, second = run.result()["attempts"]
    assert (first["category"], second["category"]) == ("preempted", None)


def test_a_limit_of_jobs_is_a_quota_and_sends_nothing(accounting: SlurmPlatform) -> None:
    cluster = accounting.cluster
    cluster.call("sacctmgr", "-i", "modify", "qos", "low", "set", "MaxSubmitJobsPerUser=0")
    try:
        with pytest.raises(QuotaError, match="QOSMaxSubmitJobPerUserLimit") as caught:
            send(accounting, "too-many")
        assert "sacctmgr show assoc" in caught.value.hint
        assert not cluster.call("squeue", "-h", "-t", "all", "-o", "%j").count("too-many")
    finally:
        cluster.call("sacctmgr", "-i", "modify", "qos", "low", "set", "MaxSubmitJobsPerUser=-1")


def test_a_limit_of_running_jobs_leaves_it_pending_with_its_reason(accounting: SlurmPlatform) -> None:
    cluster = accounting.cluster
    cluster.call("sacctmgr", "-i", "modify", "qos", "low", "set", "MaxJobsPerUser=0")
    try:
        run = send(accounting, "waits", max_wait=5)
        deadline = time.monotonic() + 60
        while "QOSMaxJobsPerUserLimit" not in run.status().reason:
            assert time.monotonic() < deadline, run.status()
            time.sleep(0.3)
        assert (run.status().state, run.status().category) == ("pending", "quota")
        result = run.wait(timeout=90, poll=0.3)
        assert (result["state"], result["category"]) == ("failed", "capacity"), "max_wait has passed"
        assert "QOSMaxJobsPerUserLimit" in result["reason"]
    finally:
        cluster.call("sacctmgr", "-i", "modify", "qos", "low", "set", "MaxJobsPerUser=-1")


def test_sacct_knows_a_job_that_slurmctld_forgot(accounting: SlurmPlatform) -> None:
    run = send(accounting, "forgotten", steps=2)
    request = run.store.attempt_request(run.run_id, 0)
    native = accounting.provider.find(request)
    assert native is not None
    loss_of(run)
    job, _, base = native.partition(":")
    deadline = time.monotonic() + 2 * MEMORY + 60
    while job in accounting.cluster.call("squeue", "-h", "-t", "all", "-o", "%A").split():
        assert time.monotonic() < deadline
        time.sleep(1)
    for mark in ("end", "over", "job"):
        Path(base, mark).unlink(missing_ok=True)
    assert accounting.provider.find(request) == native, "another client would send a second job"
    accounting.provider.submit(request)
    assert job == accounting.job(run)
    status = accounting.provider.status(native)
    assert (status.state, status.native) == ("succeeded", "COMPLETED")


@pytest.mark.timeout(120 * PREEMPTIONS)
def test_preemptions_lose_no_step(ddp: SlurmPlatform) -> None:
    """Check one run after the other. Each is preempted several times, at different steps."""
    steps = 60 + 60 * EACH
    clean = loss_of(send(ddp, "many-clean", steps=steps))
    for start in range(0, PREEMPTIONS, EACH):
        run = send(ddp, f"many-{start}", steps=steps)
        for number in range(min(EACH, PREEMPTIONS - start)):
            await_text(run, "from step", 2 * number + 2)
            time.sleep((start + number) % 7 * 0.3)
            ddp.cluster.preempt(ddp.job(run), number % 2)
        assert loss_of(run) == clean, run
        assert len(numbers(run)) == min(EACH, PREEMPTIONS - start) + 1
        check_nothing_lost(run)


def test_the_script_of_a_plain_srun_torchrun_runs_unchanged_to_the_same_bits(
    ddp: SlurmPlatform, tmp_path: Path
) -> None:
    """Check against a batch script by hand: that of PyTorch's own example for Slurm."""
    batch = f"""#!/bin/bash
#SBATCH --partition=low --nodes=2 --ntasks-per-node=1 --time=3 --output={tmp_path}/log
export GLOO_SOCKET_IFNAME=lo STEPS=60 CLOUDTRAIN_RESUME_FROM= CLOUDTRAIN_CHECKPOINT_DIR={tmp_path}/saved
export CLOUDTRAIN_PREEMPT_FILE={tmp_path}/none
srun {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-id $SLURM_JOB_ID \\
    --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{29000 + int(time.time()) % 900} {DDP}
"""
    ddp.cluster.call("sbatch", "--wait", text=batch)
    (loss,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("loss ")]
    assert loss_of(send(ddp, "unchanged")) == loss


#: Like main_dino.py and MAE, which submitit starts: torchrun's variables first, then those of srun.
SUBMITIT = """
import os
import torch.distributed as dist

if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
elif "SLURM_PROCID" in os.environ:
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    local = rank % 2
dist.init_process_group("gloo", init_method="env://", world_size=world, rank=rank)
dist.barrier()
print("job", os.environ["SLURM_JOB_ID"], "rank", dist.get_rank(), "of", dist.get_world_size(), "local", local)
"""


def test_a_script_made_for_submitit_runs_unchanged(ddp: SlurmPlatform) -> None:
    (ddp.place.code / "dino.py").write_text(SUBMITIT)
    run = send(ddp, "submitit", entry_point="dino.py", nproc_per_node=2)
    assert run.wait(timeout=120, poll=0.3)["state"] == "succeeded", texts(run)
    job = ddp.job(run)
    words = {text for text in texts(run) if text.startswith("job ")}
    assert words == {f"job {job} rank {rank} of 4 local {rank % 2}" for rank in range(4)}
