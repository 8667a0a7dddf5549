"""`cloudtrain.runtime`, the helpers for training scripts: off the platform, under bare torchrun, and in whole runs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import pytest
from jobs import Jobs
from rows import for_each

from cloudtrain import runtime
from cloudtrain.store import runtime_zip

WORDS = (
    "CLOUDTRAIN_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC_",
)  # fmt: skip


def outside() -> dict[str, str]:
    """Return an environment without variables of a launcher or a platform."""
    return {name: value for name, value in os.environ.items() if not name.startswith(WORDS)}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the working folder of plain python, off the platform."""
    for name in os.environ.keys() - outside().keys():
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def metrics(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLOUDTRAIN_METRICS_FILE", str(bare / "metrics.jsonl"))
    return bare / "metrics.jsonl"


# ----------------------------------------------------------------------------------------------------- off the platform


def test_off_the_platform_there_is_a_sane_default_for_everything(bare: Path) -> None:
    found = runtime.context()
    assert dataclasses.asdict(found) == {
        "on_platform": False, "run_id": "", "attempt": "", "provider": "", "rank": 0, "local_rank": 0, "world_size": 1,
        "planned_world_size": 1, "local_world_size": 1, "node_rank": 0, "inputs": {},
        "checkpoint_dir": Path("checkpoints"),
        "artifact_dir": Path("artifacts"), "metrics_file": None, "resume_from": None, "checkpoint_url": None,
        "hyperparameters": {},
    }  # fmt: skip
    assert found.checkpoint_dir.is_dir()
    assert found.artifact_dir.is_dir()
    assert runtime.resume_path() is None
    assert not runtime.preempted()
    assert not runtime.preempted(agree=False)
    runtime.log_metrics(1, loss=0.5)
    assert runtime.batch_size(32) == 32
    assert sorted(path.name for path in bare.iterdir()) == ["artifacts", "checkpoints"]


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "file").touch()
    monkeypatch.setenv("CLOUDTRAIN_CHECKPOINT_DIR", str(bare / "file" / "below"))
    assert runtime.context().checkpoint_dir == bare / "file" / "below"


def test_the_context_is_that_of_the_moment(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CLOUDTRAIN_RUN_ID": "r-1", "CLOUDTRAIN_ATTEMPT": "1.2", "CLOUDTRAIN_PROVIDER": "somebody", "RANK": "5",
        "CLOUDTRAIN_PLANNED_WORLD_SIZE": "16",
        "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "CLOUDTRAIN_INPUT_TRAIN_DATA": "/data/train", "CLOUDTRAIN_CHECKPOINT_DIR": str(bare / "c"),
        "CLOUDTRAIN_ARTIFACT_DIR": str(bare / "a"), "CLOUDTRAIN_METRICS_FILE": "/m.jsonl",
        "CLOUDTRAIN_RESUME_FROM": "/c/step-3", "CLOUDTRAIN_CHECKPOINT_URL": "memory://c",
        "CLOUDTRAIN_HYPERPARAMETERS": '{"lr": 0.1, "sizes": [1, 2]}',
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert dataclasses.asdict(runtime.context()) == {
        "on_platform": True, "run_id": "r-1", "attempt": "1.2", "provider": "somebody", "rank": 5, "local_rank": 1,
        "world_size": 8, "planned_world_size": 16, "local_world_size": 2, "node_rank": 2,
            "inputs": {"train_data": Path("/data/train")},
        "checkpoint_dir": bare / "c", "artifact_dir": bare / "a", "metrics_file": Path("/m.jsonl"),
        "resume_from": Path("/c/step-3"), "checkpoint_url": "memory://c",
        "hyperparameters": {"lr": 0.1, "sizes": [1, 2]},
    }  # fmt: skip
    monkeypatch.setenv("CLOUDTRAIN_RESUME_FROM", "")
    monkeypatch.setenv("RANK", "6")
    assert runtime.context().resume_from is None
    assert runtime.context().rank == 6


def test_a_checkpoint_in_the_store_stays_a_url(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_RESUME_FROM", "s3://bucket/runs/r/step-3")
    assert runtime.resume_path() == "s3://bucket/runs/r/step-3"


def test_a_notice_is_seen(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_PREEMPT_FILE", str(bare / "preempt"))
    assert (runtime.preempted(), runtime.preempted(agree=False)) == (False, False)
    (bare / "preempt").touch()
    assert (runtime.preempted(), runtime.preempted(agree=False)) == (True, True)


@pytest.mark.parametrize(
    ("world", "batch", "accumulate", "each"), [(1, 7, 1, 7), (4, 64, 1, 16), (4, 64, 2, 8), (4, 64, 16, 1)]
)
def test_the_global_batch_is_split(
    bare: Path, monkeypatch: pytest.MonkeyPatch, world: int, batch: int, accumulate: int, each: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert runtime.batch_size(batch, accumulate=accumulate) == each


@pytest.mark.parametrize(("batch", "accumulate"), [(30, 1), (64, 3), (0, 1), (-4, 1), (64, 0), (64, -1)])
def test_a_batch_that_does_not_split_is_refused(
    bare: Path, monkeypatch: pytest.MonkeyPatch, batch: int, accumulate: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=f"{batch} does not split over 4 ranks x {accumulate} passes"):
        runtime.batch_size(batch, accumulate=accumulate)


@for_each(("world", "planned", "given", "steps"), [
    ("4", "", 1, 1), ("4", "4", 3, 3), ("2", "4", 1, 2), ("2", "8", 3, 12), ("1", "4", 1, 4),
])  # fmt: skip
def test_fewer_ranks_make_more_passes(
    bare: Path, monkeypatch: pytest.MonkeyPatch, world: str, planned: str, given: int, steps: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("CLOUDTRAIN_PLANNED_WORLD_SIZE", planned)
    assert runtime.accumulation_steps(given) == steps
    assert runtime.batch_size(96, accumulate=steps) == 96 // given // int(planned or world), "as many as planned"
    assert runtime.context().planned_world_size == int(planned or world)


def test_planned_ranks_that_do_not_split_are_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("CLOUDTRAIN_PLANNED_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 planned ranks do not split over 3"):
        runtime.accumulation_steps()


# -------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.slow
def test_a_row_is_flat_json_whatever_the_numbers_are(metrics: Path) -> None:
    import torch  # for a second and a half, so not while the tests are collected

    began = time.time()
    runtime.log_metrics(3, epoch=0.5, loss=1.25, ok=True, note="a\nb", none=None, count=7)
    runtime.log_metrics(
        numpy.int64(4), loss=torch.tensor(0.5, requires_grad=True), one=torch.ones(1, 1), lr=numpy.float32(0.25)
    )
    runtime.log_metrics(torch.tensor(5), loss=float("nan"), norm=torch.tensor(float("inf")), low=-numpy.inf)
    first, second, third = map(json.loads, metrics.read_text().splitlines())
    assert began <= first.pop("time") <= second.pop("time") <= third.pop("time") <= time.time()
    assert first == {"step": 3, "epoch": 0.5, "loss": 1.25, "ok": True, "note": "a\nb", "none": None, "count": 7}
    assert second == {"step": 4, "epoch": 0, "loss": 0.5, "one": 1, "lr": 0.25}
    assert third == {"step": 5, "epoch": 0, "loss": None, "norm": None, "low": None}
    assert "NaN" not in metrics.read_text()
    for size in (2, 0):
        with pytest.raises(ValueError, match=rf"loss has the shape \({size},\)"):
            runtime.log_metrics(6, loss=torch.ones(size))
    assert len(metrics.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"loss": [1.0]}, TypeError, "loss is a list"),
        ({"a/b": {"c": 1}}, TypeError, "a/b is a dict"),
        ({"when": Path("x")}, TypeError, "when is a P"),
        ({"z": 1j}, TypeError, "z is a complex"),
        ({"loss": numpy.ones((2, 3))}, ValueError, r"loss has the shape \(2, 3\)"),
        ({"time": 1.0}, ValueError, "time"),
        ({"epoch": [1]}, TypeError, "epoch is a list"),
    ],
)
def test_a_row_that_is_not_flat_is_refused_whole(
    metrics: Path, values: dict[str, object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        runtime.log_metrics(1, **values)  # type: ignore[arg-type]
    assert not metrics.exists()


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_a_step_is_a_whole_number(metrics: Path, step: object) -> None:
    with pytest.raises(TypeError):
        runtime.log_metrics(step)  # type: ignore[arg-type]


def test_other_ranks_write_no_metrics(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    runtime.log_metrics(1, loss=0.5)
    assert not metrics.exists()


# ---------------------------------------------------------------------------------------------------------- checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_appears_whole(bare: Path) -> None:
    with runtime.saving("step-1") as folder:
        (folder / "state").write_text("one")
        assert [name for name in names(bare / "checkpoints") if not name.startswith(".")] == []
        assert folder.name.startswith(".")
    assert names(bare / "checkpoints") == ["step-1"]
    with runtime.saving("step-1") as folder:
        (folder / "other").write_text("two")
        assert names(bare / "checkpoints/step-1") == ["state"]  # until the end it is the one before
    assert names(bare / "checkpoints") == ["step-1"]
    assert names(bare / "checkpoints/step-1") == ["other"]


def test_nothing_appears_of_a_checkpoint_that_failed(bare: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "state").write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"), runtime.saving("step-1") as folder:
        fill(folder)
    assert names(bare / "checkpoints") == []  # nor does it fill the disk


def test_what_a_killed_process_left_is_no_part_of_the_next(bare: Path) -> None:
    (bare / "checkpoints/.step-1.tmp").mkdir(parents=True)
    (bare / "checkpoints/.step-1.tmp/rank-7").touch()
    with runtime.saving("step-1") as folder:
        (folder / "state").touch()
    assert names(bare / "checkpoints") == ["step-1"]
    assert names(bare / "checkpoints/step-1") == ["state"]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "step-1.tmp"])
def test_a_name_that_would_not_count_is_refused(bare: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no checkpoint"), runtime.saving(name):
        pass
    assert names(bare) == []


def test_a_second_rank_of_a_node_does_not_save_alone(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="rank 3 is not the first of its node"), runtime.saving("step-1"):
        pass


def test_ranks_that_cannot_meet_do_not_save_together(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with runtime.saving("alone", every_rank=True) as folder:  # one process is every rank
        (folder / "state").touch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="process group"), runtime.saving("together", every_rank=True):
        pass
    assert names(bare / "checkpoints") == ["alone"]


def test_the_best_is_a_pointer(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step-1", "step-2"):
        with runtime.saving(name) as folder:
            (folder / "state").touch()
        runtime.mark_best(name)
        assert (bare / "checkpoints/best").read_text().strip() == name
    assert names(bare / "checkpoints") == ["best", "step-1", "step-2"]
    for missing in ("step-3", "", ".", "step-1/state"):
        with pytest.raises(ValueError, match="no checkpoint"):
            runtime.mark_best(missing)
    monkeypatch.setenv("RANK", "1")
    runtime.mark_best("step-3")
    assert (bare / "checkpoints/best").read_text().strip() == "step-2"


# ------------------------------------------------------------------------------------------------- where it is imported


@pytest.mark.costly
def test_it_comes_out_of_the_zip_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "cloudtrain.pyz").write_bytes(runtime_zip.build())
    code = """
        import os, sys
        sys.path.append(sys.argv[1])
        from cloudtrain import runtime
        print(os.path.dirname(runtime.__file__), runtime.batch_size(8), runtime.preempted(), "torch" in sys.modules)
        with runtime.saving("step-1", every_rank=True) as folder:
            (folder / "state").touch()
        runtime.log_metrics(1, loss=float("nan"))
        runtime.mark_best("step-1")
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), str(tmp_path / "cloudtrain.pyz")],
        cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/cloudtrain.pyz/cloudtrain/runtime 8 False False\n"
    assert names(tmp_path / "checkpoints") == ["best", "step-1"]


# ------------------------------------------------------------------------------------------------------- bare torchrun


def torchrun(folder: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on two ranks, with rank 0's and rank 1's own lines."""
    (folder / "script.py").write_text(GROUP + textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--", "script.py"],
        cwd=folder, env=outside() | {"OMP_NUM_THREADS": "1"} | environ, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


GROUP = """
import os, sys, time
import torch.distributed as dist
from cloudtrain import runtime

dist.init_process_group("gloo")
rank = dist.get_rank()
"""


@pytest.mark.slow
def test_all_ranks_see_a_notice_at_the_same_step_and_save_together(tmp_path: Path) -> None:
    """The slowest rank decides when a checkpoint is complete. One start of torchrun, which takes seconds, tests
    both."""
    (tmp_path / "checkpoints/.step-0.tmp").mkdir(parents=True)
    (tmp_path / "checkpoints/.step-0.tmp/rank-7").touch()
    done = torchrun(
        tmp_path,
        """
        os.environ["CLOUDTRAIN_PREEMPT_FILE"] = file = f"notice-of-{rank}"
        seen, own = [], []
        for step in range(10):
            if rank == 1 and step == 6:
                open(file, "w").close()
            time.sleep(0.02 * rank)
            own.append(runtime.preempted(agree=False))
            seen.append(runtime.preempted())
        assert seen == [step >= 6 for step in range(10)], (rank, seen)
        assert own == [rank == 1 and step >= 6 for step in range(10)], (rank, own)
        for step in range(20):  # over and over: what is left of the one before is the next one's peril
            with runtime.saving("step-0", every_rank=True) as folder:
                time.sleep(0.02 * (rank ^ step % 2))
                (folder / f"rank-{rank}").write_text(str(step))
                assert rank ^ step % 2 or not step or os.path.exists("checkpoints/step-0")
            assert sorted(os.listdir("checkpoints/step-0")) == ["rank-0", "rank-1"], os.listdir("checkpoints/step-0")
            assert [open(f"checkpoints/step-0/rank-{i}").read() for i in (0, 1)] == [str(step)] * 2
            dist.barrier()
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        here = runtime.context()
        assert (here.rank, here.world_size, here.on_platform) == (rank, 2, False)
        assert runtime.batch_size(8) == 4
        runtime.log_metrics(rank + 1)
        with runtime.saving("step-1", every_rank=True) as folder:
            (folder / f"rank-{rank}").touch()
            if rank == 1:
                raise ValueError("only here")
        """,
        CLOUDTRAIN_METRICS_FILE=str(tmp_path / "metrics.jsonl"),
    )
    assert done.returncode != 0
    assert "ValueError: only here" in done.stderr
    assert "AssertionError" not in done.stderr
    assert [json.loads(row)["step"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]
    assert names(tmp_path / "checkpoints") == [".step-1.tmp", "step-0"]


# ----------------------------------------------------------------------------------------------------------- whole runs

TRAINS = """
import sys, time
import torch
import torch.distributed as dist
from cloudtrain import runtime

STEPS, NAP = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
here, rows = runtime.context(), runtime.batch_size(32)
step, weights = 0, torch.zeros(8)
if resume := runtime.resume_path():
    states = [torch.load(resume / f"rank-{rank}.pt") for rank in range(here.world_size)]  # all nodes' files are here
    (step,) = {state["step"] for state in states}
    weights = states[here.rank]["weights"]
while step < STEPS:
    batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).split(rows)[here.rank]
    error = batch @ weights - batch.sum(1)
    sums = torch.cat([error @ batch, error.square().sum()[None]]) / 32
    dist.all_reduce(sums)
    weights -= 0.05 * sums[:-1]
    step += 1
    runtime.log_metrics(step, loss=sums[-1], hex=sums[-1].item().hex())
    if step == 10:
        print("at step 10", flush=True)
    time.sleep(NAP)
    if runtime.preempted():
        with runtime.saving(f"step-{step}", every_rank=True) as folder:
            torch.save({"step": step, "weights": weights}, folder / f"rank-{here.rank}.pt")
        print("saved at", step, flush=True)
        break
else:
    print("done at", step, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.proof
def test_a_notice_to_one_node_costs_no_step(jobs: Jobs) -> None:
    jobs.write("train.py", TRAINS)
    run = jobs.detach("train.py", "--nodes", "2", "--nproc-per-node", "2", "--", "60", "0.1")
    jobs.printed(run, "at step 10")
    os.kill(jobs.node(1), signal.SIGTERM)
    done = jobs.cli("wait", run.url, "--json")
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.json
    assert [(a["number"], a["reason"]) for a in done.json["attempts"]] == [
        ("0.0", "node 1 got a stop signal"), ("0.1", "succeeded"),
    ]  # fmt: skip
    logs = jobs.cli("logs", run.url).out
    (said,) = {line.partition("saved at ")[2] for line in logs.splitlines() if "saved at " in line}
    assert logs.count("saved at ") == 4  # every rank, at the same step
    assert done.json["attempts"][1]["resumed_from"] == f"step-{said}"
    assert logs.count("done at 60") == 4

    files = sorted((jobs.store / "runs" / run.run_id / "live/metrics").glob("*.jsonl"))
    assert [file.name for file in files] == ["0.0-node-0.jsonl", "0.1-node-0.jsonl"]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))  # no step is missing or repeated
    assert 10 <= int(said) < 60

    # The same script under bare torchrun, never stopped: the same losses, bit for bit.
    metrics = jobs.tmp / "bare.jsonl"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py", "60", "0"],
        cwd=jobs.code, env=outside() | {"OMP_NUM_THREADS": "1", "CLOUDTRAIN_METRICS_FILE": str(metrics)}, timeout=120,
        check=True, capture_output=True,
    )  # fmt: skip
    assert [row["hex"] for row in rows] == [json.loads(line)["hex"] for line in metrics.read_text().splitlines()]


@pytest.mark.slow
def test_another_version_in_the_image_is_the_scripts_and_harms_nobody(jobs: Jobs) -> None:
    """Check that a package of the image comes before cloudtrain, which is last on the path."""
    old = jobs.tmp / "old" / "cloudtrain"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("__version__ = '0.0.1'\n")
    jobs.write("train.py", "import cloudtrain, sys; print('version', cloudtrain.__version__, sys.path[-1])")
    jobs.write("runtime.py", "raise ImportError('this one is the script\\'s own, and not asked for')")
    done = jobs.submit("train.py", "--nodes", "2", "--launcher", "python", "--env", f"PYTHONPATH={old.parent}")
    assert done.code == 0, done.err
    assert done.err.count("version 0.0.1 ") == 2
    assert "cloudtrain.pyz" in done.err


@pytest.mark.slow
def test_what_the_trackers_of_experiments_are_told(jobs: Jobs) -> None:
    """One tracker's run covers all attempts of one run, unless the user chose another. MLflow decides for itself."""
    jobs.write(
        "train.py",
        """
        import os
        if os.environ["CLOUDTRAIN_ATTEMPT"] == "0.0": raise ValueError("once")
        print("seen", {name: value for name, value in os.environ.items() if name.startswith(("WANDB_", "MLFLOW_"))})
        """,
    )
    done = jobs.submit(
        "train.py", "--retries", "1", "--run-id", "mine", MLFLOW_RUN_ID="m", MLFLOW_TRACKING_URI="file:x"
    )
    assert done.code == 0, done.err
    seen = next(line.partition("seen ")[2] for line in done.err.splitlines() if "seen {" in line)
    assert dict(sorted(eval(seen).items())) == {
        "MLFLOW_RUN_ID": "m", "MLFLOW_TRACKING_URI": "file:x", "WANDB_RESUME": "allow", "WANDB_RUN_ID": "mine",
    }  # fmt: skip
