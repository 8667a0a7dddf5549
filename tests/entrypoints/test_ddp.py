"""`entrypoints/ddp.py` where cloudtrain cannot be imported: under torchrun, as plain python, and quickly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import DIGITS, ODD, Launched, Quick, Trainings, torch

pytestmark = pytest.mark.slow

PER_EPOCH = (1797 - 360) // 64
EPOCHS = 4
DIGITS_FLAGS = ("--train", str(DIGITS))
SHORT = (*DIGITS_FLAGS, "--epochs", str(EPOCHS))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Run on two processes to the end, by torchrun."""
    return Launched(tmp_path_factory.mktemp("two"), "ddp.py", *SHORT, processes=2).finish()


@pytest.mark.proof
def test_trains_under_bare_torchrun(two: Launched) -> None:
    assert (two.code, two.err) == (0, "")
    lines = two.out.splitlines()
    assert len(lines) == EPOCHS + 1
    assert lines[0].startswith(f"step {PER_EPOCH} epoch 1 loss ")
    *_, accuracy, on, number, held, out = lines[-1].split()
    assert (on, number, held, out) == ("on", "180", "held", "out")
    assert float(accuracy) >= 0.9
    weights = torch.load(two.folder / "artifacts/model.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.proof
def test_metrics_are_one_flat_line_a_step(two: Launched) -> None:
    lines = two.metrics()
    assert [line["step"] for line in lines] == list(range(1, EPOCHS * PER_EPOCH + 1))
    assert all({"step", "epoch", "time", "loss", "lr", "grad_norm", "samples_per_s"} <= line.keys() for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    epochs = [line for line in lines if "val_accuracy" in line]
    assert [line["epoch"] for line in epochs] == list(range(1, EPOCHS + 1))
    assert [line["step"] for line in epochs] == [PER_EPOCH * epoch for epoch in range(1, EPOCHS + 1)]


@pytest.mark.proof
def test_a_checkpoint_each_epoch_and_nothing_half_written(two: Launched) -> None:
    names = {path.name for path in (two.folder / "checkpoints").iterdir()}
    assert names == {f"step-{PER_EPOCH * epoch}" for epoch in range(1, EPOCHS + 1)}
    for name in names:
        assert {path.name for path in two.checkpoint(name).iterdir()} == {
            ".metadata", "train.json", "__0_0.distcp", "__1_0.distcp"
        }  # fmt: skip
    contract = {"seed": 0, "global_batch": 64, "steps": EPOCHS * PER_EPOCH, "lr": 4e-3}
    assert two.notes("step-44") == {"step": 44, "contract": contract, "scaler": {}}


@pytest.mark.proof
def test_one_plain_process_sees_the_same_losses(two: Launched, tmp_path: Path) -> None:
    """Only the order of float sums differs with the number of processes. One epoch keeps that difference small."""
    one = Launched(tmp_path, "ddp.py", "--train", str(DIGITS.parent), "--epochs", str(EPOCHS))
    one.until(PER_EPOCH)
    one.preempt_file.touch()
    one.finish()
    assert (one.code, one.err) == (0, "")
    first_epoch = range(1, PER_EPOCH + 1)
    assert [one.losses()[step] for step in first_epoch] == pytest.approx(
        [two.losses()[step] for step in first_epoch], rel=1e-4
    )


@pytest.mark.proof
def test_a_preempted_run_resumes_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    """Use three processes: with two, a sum has only one order, which would hide DDP's reordered buckets."""
    flags = (*DIGITS_FLAGS, "--global-batch", "63", "--epochs", "6")
    uninterrupted = trainings.run(tmp_path / "whole", "ddp.py", *flags, processes=3)
    stopped = trainings.start(tmp_path / "stopped", "ddp.py", *flags, processes=3)
    stopped.until(30)
    stopped.preempt_file.touch()
    assert stopped.finish().code == 0
    last = max(stopped.losses())
    assert 30 <= last < max(uninterrupted.losses())
    assert stopped.out.splitlines()[-1] == f"preempted at step {last} of {max(uninterrupted.losses())}, saved"
    assert not (stopped.folder / "artifacts").exists()

    env = {"CLOUDTRAIN_RESUME_FROM": str(stopped.checkpoint(f"step-{last}"))}
    resumed = trainings.run(tmp_path / "resumed", "ddp.py", *flags, processes=3, env=env)
    assert min(resumed.losses()) == last + 1
    assert stopped.losses() | resumed.losses() == uninterrupted.losses()
    one, other = (torch.load(run.folder / "artifacts/model.pt", weights_only=True) for run in (uninterrupted, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_over_what_a_killed_one_left(trainings: Trainings, tmp_path: Path) -> None:
    """An unfinished checkpoint is removed. A finished one is replaced when its step is repeated."""
    flags = (*ODD, "--epochs", "2", "--dropout", "0.3")
    uninterrupted = trainings.run(tmp_path, "ddp.py", *flags, "--save-every", "4", processes=2)
    (uninterrupted.folder / "checkpoints/.step-8.tmp").mkdir()
    (uninterrupted.folder / "checkpoints/step-8/stale").touch()
    before, names = uninterrupted.losses(), {path.name for path in (uninterrupted.folder / "checkpoints").iterdir()}
    again = trainings.run(
        tmp_path,
        "ddp.py",
        *flags,
        "--save-every",
        "4",
        "--resume",
        str(uninterrupted.checkpoint("step-4")),
        processes=2,
    )
    assert again.losses() == before
    assert {path.name for path in (again.folder / "checkpoints").iterdir()} == names - {".step-8.tmp"}
    assert not (again.folder / "checkpoints/step-8/stale").exists()


@pytest.mark.proof
@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_frozen_parameters_resume_bit_for_bit(script: str, trainings: Trainings, tmp_path: Path) -> None:
    """Check also that parameters may be frozen after the checkpoint was written."""
    flags = (*ODD, "--frozen")
    uninterrupted = trainings.run(tmp_path / "whole", script, *flags, processes=2)
    for name, before in (
        ("frozen", uninterrupted),
        ("not yet", trainings.run(tmp_path / "not", script, *ODD, processes=2)),
    ):
        resume = ("--resume", str(before.checkpoint("step-6")))
        resumed = trainings.run(tmp_path / name, script, *flags, *resume, processes=2)
        assert list(resumed.losses()) == list(range(7, 19))
        assert (resumed.losses().items() <= uninterrupted.losses().items()) == (before is uninterrupted)


@pytest.mark.proof
def test_a_parameter_that_is_not_used_is_refused_by_ddp_before_step_1(trainings: Trainings, tmp_path: Path) -> None:
    run = trainings.start(tmp_path, "ddp.py", *ODD, "--late", "9", processes=2).finish()
    assert run.code != 0
    assert "parameters that were not used in producing loss" in run.err
    assert run.metrics() == []


# ----------------------------------------------------------------------------------------------------- the global batch


def gradients(run: Quick) -> dict[str, Any]:
    """Return the gradients of the first step, of which AdamW then holds a tenth."""
    return {name: 10 * values["exp_avg"] for name, values in run.adam("step-1").items()}


@pytest.mark.parametrize("script", [pytest.param("ddp.py", marks=pytest.mark.proof), "fsdp.py"])
def test_accumulation_is_the_same_batch(script: str, trainings: Trainings, tmp_path: Path) -> None:
    """Compare 4 passes of 8 samples with unequal numbers of tokens, also on 2 processes, with one pass of 32."""
    flags = (*ODD, "--global-batch", "32", "--max-steps", "1", "--clip", "1e9")
    one = trainings.run(tmp_path / "one", script, *flags)
    wanted = gradients(one)
    for processes in (1, 2):
        split = trainings.run(tmp_path / f"{processes}", script, *flags, "--micro-batch", "8", processes=processes)
        assert split.losses()[1] == pytest.approx(one.losses()[1], rel=1e-6)
        found = gradients(split)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            assert (gradient - wanted[name]).norm() <= 1e-6 * max(wanted[name].norm(), 1e-3), name


def test_one_process_resumes_on_the_curve_of_two(trainings: Trainings, tmp_path: Path) -> None:
    """Check within the order of sums, for runs that resume on fewer machines, as in tests/e2e/test_fewer_nodes.py."""
    two = trainings.run(tmp_path / "two", "ddp.py", *ODD, processes=2)
    one = trainings.run(tmp_path / "one", "ddp.py", *ODD, "--resume", str(two.checkpoint("step-6")))
    assert list(one.losses()) == list(range(7, 19))
    assert list(one.losses().values()) == pytest.approx([two.losses()[step] for step in one.losses()], rel=1e-4)


@pytest.mark.proof
def test_means_are_over_all_tokens(trainings: Trainings, tmp_path: Path) -> None:
    """Check validation too, with any number of processes: 2 and 4 do not divide its 21 samples."""
    rows = [
        trainings.run(tmp_path / f"{n}", "ddp.py", *ODD, "--epochs", "1", processes=n).metrics()[-1] for n in (1, 2, 4)
    ]
    assert rows[0]["val_accuracy"] == rows[1]["val_accuracy"] == rows[2]["val_accuracy"]
    assert [row["val_loss"] for row in rows] == pytest.approx([rows[0]["val_loss"]] * 3, rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- options


def skipped(run: Quick, processes: int) -> list[list[int]]:
    """Return for each rank the passes that began with the weights of the previous pass."""
    found = []
    for rank in range(processes):
        rows = [json.loads(line) for line in (run.folder / f"weights-{rank}.jsonl").read_text().splitlines()]
        rows = rows[-18:]  # fsdp.py makes one more, to test whether memory suffices
        found.append([number for number in range(1, 18) if rows[number] == rows[number - 1]])
    return found


@pytest.mark.proof
@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_an_overflow_of_one_rank_skips_the_step_of_all(script: str, trainings: Trainings, tmp_path: Path) -> None:
    """One sample's gradient is infinite in float16. With fsdp.py it is infinite in one rank's shard only."""
    flags = (*ODD, "--precision", "fp16", "--overflow", "7")
    run = trainings.run(tmp_path, script, *flags, processes=2)
    without = [line["step"] for line in run.metrics() if line["grad_norm"] is None]
    assert len(without) == 3  # the sample occurs once an epoch
    assert skipped(run, 2) == [without, without]


@pytest.mark.proof
def test_half_precision_and_compressed_gradients_learn_the_same(trainings: Trainings, tmp_path: Path) -> None:
    plain = trainings.run(tmp_path / "plain", "ddp.py", *ODD, processes=2)
    for flags in (["--precision", "bf16"], ["--compress", "fp16"]):
        run = trainings.run(tmp_path / flags[1], "ddp.py", *ODD, *flags, processes=2)
        assert run.losses() != plain.losses()
        assert run.losses() == pytest.approx(plain.losses(), rel=0.02)


def judged(run: Any) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in run.metrics() if "val_loss" in line}


@pytest.mark.proof
@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_batch_norm_is_judged_and_saved_as_one_model(script: str, trainings: Trainings, tmp_path: Path) -> None:
    """Each process has seen other samples, which training itself does not use. A save copies while the next passes
    change the statistics."""
    flags = (*ODD, "--batch-norm", "--copying", "0.1")
    run = trainings.run(tmp_path / "run", script, *flags, processes=2)
    again = trainings.run(tmp_path / "again", script, *flags, "--resume", str(run.checkpoint("step-6")), processes=2)
    assert judged(again) == {step: loss for step, loss in judged(run).items() if step > 6} != {}


@pytest.mark.proof
def test_batch_norm_on_a_cpu_is_said_to_be_of_one_pass(trainings: Trainings, tmp_path: Path) -> None:
    """A checkpoint also restores the statistics, which the passes before step 1 leave unchanged."""
    run = trainings.run(tmp_path / "run", "ddp.py", *ODD, "--batch-norm", processes=2)
    assert run.out.splitlines()[0] == "BatchNorm with 8 samples a pass: SyncBatchNorm needs GPUs"
    resume = ("--resume", str(run.checkpoint("step-6")))
    again = trainings.run(tmp_path / "again", "ddp.py", *ODD, "--batch-norm", *resume, processes=2)
    assert run.losses() | again.losses() == run.losses()
    weights = torch.load(run.folder / "artifacts/model.pt", weights_only=True)
    assert {int(value) for name, value in weights.items() if "num_batches" in name} == {18}


TORCH_NPU = """
print("torch_npu is imported")
class npu:
    device_count = staticmethod(lambda: 0)
    set_device = staticmethod(lambda number: print("device", number))
"""


@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_on_npus_it_imports_their_library(script: str, trainings: Trainings, tmp_path: Path) -> None:
    """A stub without cards replaces torch_npu. Without cards, both scripts train on the CPU."""
    task = shutil.copy(ODD[1], tmp_path)
    (tmp_path / "torch_npu.py").write_text(TORCH_NPU)
    flags = ("--task", task, "--max-steps", "1", "--device", "npu")
    run = trainings.start(tmp_path / "run", script, *flags).finish()
    assert (run.code, run.out.splitlines()[:2]) == (0, ["torch_npu is imported", "device -1"])


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSALS = {
    "no data named": ([], {}, "digits.py: --train '' is not digits.csv.gz"),
    "no such data": (["--train", "no/such/file.csv.gz"], {}, "No such file"),
    "no such task": (["--task", "nothing.py"], {}, "ddp.py: --task 'nothing.py' is not a file"),
    "three processes": ([*DIGITS_FLAGS], {"WORLD_SIZE": "3"}, "does not split over 3 processes"),
    "passes too large": ([*DIGITS_FLAGS, "--micro-batch", "48"], {}, "passes of 48 each"),
    "a batch of nothing": ([*DIGITS_FLAGS, "--global-batch", "0"], {}, "--global-batch 0 of 1437"),
    "a batch of all and more": ([*DIGITS_FLAGS, "--global-batch", "1438"], {}, "--global-batch 1438 of 1437"),
    "too few held out": ([*ODD, "--held-out", "1"], {"WORLD_SIZE": "2"}, "1 samples are held out"),
    "no checkpoint": ([*DIGITS_FLAGS, "--resume", "nowhere"], {}, "--resume 'nowhere' is not a checkpoint"),
    "half sums on a CPU": ([*DIGITS_FLAGS, "--compress", "bf16"], {}, "--compress bf16 needs GPUs"),
    "NPUs without their library": ([*DIGITS_FLAGS, "--device", "npu"], {}, "--device npu needs the package torch_npu"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_in_one_line(case: str, trainings: Trainings, tmp_path: Path) -> None:
    flags, env, words = REFUSALS[case]
    refused = trainings.start(tmp_path, "ddp.py", *flags, env=env).finish()
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert words in refused.err


@pytest.mark.proof
def test_refuses_the_checkpoint_of_another_run(two: Launched, trainings: Trainings, tmp_path: Path) -> None:
    flags = (*SHORT, "--resume", str(two.checkpoint("step-22")), "--lr", "1")
    refused = trainings.start(tmp_path, "ddp.py", *flags).finish()
    assert refused.code == 1
    assert refused.err.startswith("ddp.py: --resume: saved with {'seed': 0,")
    assert refused.err.count("\n") == 1
