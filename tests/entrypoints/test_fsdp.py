"""`entrypoints/fsdp.py` where cloudtrain cannot be imported. test_ddp.py tests its common part with ddp.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainings import ODD, TEXT, Launched, Quick, Trainings, torch

pytestmark = pytest.mark.slow

GPT = ("--train", str(TEXT), "--layers", "2", "--width", "64", "--global-batch", "32")
TASK = str(Path(__file__).parents[2] / "entrypoints/tasks/gpt.py")


@pytest.fixture(scope="module")
def four(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """Run 40 steps of a GPT on four processes, with a checkpoint in the middle."""
    flags = (*GPT, "--max-steps", "40", "--save-every", "20")
    return trainings.run(tmp_path_factory.mktemp("four"), "fsdp.py", *flags, processes=4)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("script", "processes", "more"),
    [
        ("fsdp.py", 4, []),
        ("fsdp.py", 2, []),
        ("fsdp.py", 1, ["--micro-batch", "8"]),
        ("fsdp.py", 4, ["--replicate", "2"]),
        ("ddp.py", 2, ["--task", TASK, "--lr", "3e-3", "--clip", "1"]),
    ],
    ids=["4", "2", "1", "2 x 2", "ddp"],
)
def test_others_go_on_from_a_checkpoint_of_four(
    script: str, processes: int, more: list[str], four: Quick, trainings: Trainings, tmp_path: Path
) -> None:
    """Compare bit for bit with the same layout, and within 1e-5 over 20 steps where the order of sums differs."""
    flags = (*GPT, *more, "--max-steps", "40", "--resume", str(four.checkpoint("step-20")))
    resumed = trainings.run(tmp_path, script, *flags, processes=processes)
    found, wanted = resumed.losses(), four.losses()
    assert list(found) == list(range(21, 41))
    assert max(abs(found[step] - wanted[step]) for step in found) <= (0 if processes == 4 and not more else 1e-5)


@pytest.mark.proof
def test_fsdp_goes_on_from_a_checkpoint_of_ddp(trainings: Trainings, tmp_path: Path) -> None:
    flags = (*ODD, "--lr", "3e-3", "--clip", "1")
    uninterrupted = trainings.run(tmp_path / "ddp", "ddp.py", *flags, processes=2)
    flags = (*flags, "--resume", str(uninterrupted.checkpoint("step-6")))
    resumed = trainings.run(tmp_path / "fsdp", "fsdp.py", *flags, processes=2)
    assert resumed.losses() == pytest.approx({s: x for s, x in uninterrupted.losses().items() if s > 6}, abs=1e-5)


@pytest.mark.proof
def test_a_preempted_run_resumes_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    flags = (*ODD, "--epochs", "12", "--dropout", "0.2")
    uninterrupted = trainings.run(tmp_path / "whole", "fsdp.py", *flags, processes=2)
    stopped = trainings.start(tmp_path / "stopped", "fsdp.py", *flags, processes=2)
    stopped.until(15)
    stopped.preempt_file.touch()
    assert stopped.finish().code == 0
    last = max(stopped.losses())
    assert stopped.out.splitlines()[-1] == f"preempted at step {last} of 72, saved"
    resume = ("--resume", str(stopped.checkpoint(f"step-{last}")))
    resumed = trainings.run(tmp_path / "resumed", "fsdp.py", *flags, *resume, processes=2)
    assert stopped.losses() | resumed.losses() == uninterrupted.losses()
    assert resumed.notes("step-72")["best"] == uninterrupted.notes("step-72")["best"]


@pytest.mark.parametrize("script", ["fsdp.py", "ddp.py"])
def test_a_notice_at_the_end_of_an_epoch_costs_no_validation(trainings: Trainings, tmp_path: Path, script: str) -> None:
    """Otherwise no later start validates that epoch, and the best model may be another."""
    flags = (*ODD, "--epochs", "2", "--save-every", "5")
    whole = trainings.run(tmp_path / "whole", script, *flags)
    stopped = trainings.start(tmp_path / "stopped", script, *flags, "--resume", str(whole.checkpoint("step-5")))
    stopped.preempt_file.touch()
    assert stopped.finish().out.splitlines()[-1] == "preempted at step 6 of 12, saved"
    rows = {row["step"]: row.get("val_loss") for row in whole.metrics()}
    assert {row["step"]: row.get("val_loss") for row in stopped.metrics()} == {6: rows[6]}
    assert rows[6] is not None
    assert stopped.notes("step-6").get("best") == whole.notes("step-6").get("best")


def steps_of(run: Quick, name: str, parameter: str) -> float:
    """Return how many gradients of a parameter AdamW has counted in a checkpoint."""
    return float(run.adam(name)[parameter]["step"])


@pytest.mark.proof
def test_a_parameter_without_a_gradient_so_far_resumes_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    """The second head gets its first gradient at step 10, also in a run that resumes from step 6."""
    flags = (*ODD, "--late", "9")
    uninterrupted = trainings.run(tmp_path / "whole", "fsdp.py", *flags, processes=2)
    resume = ("--resume", str(uninterrupted.checkpoint("step-6")))
    resumed = trainings.run(tmp_path / "resumed", "fsdp.py", *flags, *resume, processes=2)
    assert resumed.losses() == {step: loss for step, loss in uninterrupted.losses().items() if step > 6} != {}
    assert steps_of(uninterrupted, "step-6", "second.weight") == 0
    for run in (uninterrupted, resumed):
        assert steps_of(run, "step-18", "second.weight") == 9
        assert steps_of(run, "step-18", "head.weight") == 18


@pytest.mark.proof
@pytest.mark.parametrize(
    "flags",
    ["--cpu-offload --recompute", "--no-reshard --deterministic", "--replicate 2 --workers 1 --micro-batch 2"],
)
def test_what_saves_memory_or_time_changes_no_loss(
    flags: str, plain: Quick, trainings: Trainings, tmp_path: Path
) -> None:
    run = trainings.run(tmp_path, "fsdp.py", *ODD, *flags.split(), processes=2)
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-6)


@pytest.fixture(scope="module")
def plain(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """Run the tests' own task on two processes."""
    return trainings.run(tmp_path_factory.mktemp("plain"), "fsdp.py", *ODD, processes=2)


@pytest.mark.proof
def test_bf16_is_near(plain: Quick, trainings: Trainings, tmp_path: Path) -> None:
    run = trainings.run(tmp_path, "fsdp.py", *ODD, "--precision", "bf16", processes=2)
    assert run.losses() != plain.losses()
    assert run.losses() == pytest.approx(plain.losses(), rel=0.02)


@pytest.mark.proof
def test_compiled_blocks_are_near(plain: Quick, trainings: Trainings, tmp_path: Path) -> None:
    """torch's compiler warns of its own deprecations, so warnings are not errors here."""
    flags = (*ODD, "--compile", "--recompute", "--max-steps", "18")
    run = trainings.start(tmp_path, "fsdp.py", *flags, processes=1, env={"PYTHONWARNINGS": "ignore"}).finish(240)
    assert run.code == 0, run.err
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-4)


PLACES = ["backward 1"]
OTHERS = ["loss", "forward 0", "forward 1", "forward 2", "backward 0", "backward 2"]


@pytest.mark.parametrize("place", [*PLACES, *(pytest.param(place, marks=pytest.mark.proof) for place in OTHERS)])
def test_where_one_runs_out_of_memory_all_halve(place: str, plain: Quick, trainings: Trainings, tmp_path: Path) -> None:
    """Rank 1 fails in the middle of a pass, between the others' collectives, with 8 samples and with 4."""
    run = trainings.run(tmp_path, "fsdp.py", *ODD, "--full", place, processes=2)
    said = [line for line in run.out.splitlines() if line.startswith("out of memory")]
    assert said == [
        "out of memory: now 4 samples a pass, 2 passes a step",
        "out of memory: now 2 samples a pass, 4 passes a step",
    ]
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-6)


# --------------------------------------------------------------------------------------------------------------- output


@pytest.mark.proof
def test_what_is_written_under_bare_torchrun(tmp_path: Path) -> None:
    """Check metrics, event files, a trace, weights and checkpoints in the platform's folders."""
    pytest.importorskip("tensorboard")
    load = pytest.importorskip("safetensors.torch").load_file
    env = {
        "CLOUDTRAIN_CHECKPOINT_DIR": "there",
        "CLOUDTRAIN_ARTIFACT_DIR": "results",
        "CLOUDTRAIN_INPUT_TRAIN": str(TEXT),
    }
    flags = ("--layers", "2", "--width", "64", "--max-steps", "6", "--profile", "3:4")
    run = Launched(tmp_path, "fsdp.py", *flags, processes=2, env=env).finish()
    assert run.code == 0, run.err
    memory, epoch, result = run.out.splitlines()
    assert memory.startswith(
        "memory of a process: weights 0.3 MB, gradients 0.3 MB, AdamW 0.5 MB; gathered weights 0.5 MB"
    )
    assert epoch.startswith("step 6 epoch 1 loss 5.")
    assert result.endswith(" on 364 held-out samples, with the weights of step 6")
    for line in run.metrics():
        assert {"step", "epoch", "time", "loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s"} <= line.keys()
        assert line["tokens_per_s"] == pytest.approx(64 * line["samples_per_s"])
        assert 0 <= line["data_wait"] < 1
        assert line["peak_memory"] > 1e8
        assert "mfu" not in line  # only known GPUs have one
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"step-6", "best"}
    names = {path.name.partition(".")[0] for path in (tmp_path / "results").iterdir()}
    assert names == {"events", "model", "trace-3-4"}
    trace = json.loads((tmp_path / "results/trace-3-4.json").read_text())
    steps = [event for event in trace["traceEvents"] if str(event.get("name", "")).startswith("Optimizer.step")]
    assert len(steps) == 2
    weights = load(tmp_path / "results/model.safetensors")
    assert weights["blocks.0.qkv.weight"].shape == (192, 64)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_without_the_libraries_it_says_so(trainings: Trainings, tmp_path: Path) -> None:
    run = trainings.run(tmp_path, "fsdp.py", *ODD, "--max-steps", "2", hidden=("tensorboard", "safetensors"))
    assert "no event files: tensorboard is not installed" in run.out
    assert "wrote model.pt, as safetensors is not installed" in run.out
    weights = torch.load(tmp_path / "artifacts/model.pt", weights_only=True)
    assert weights["head.weight"].shape == (5, 16)


@pytest.mark.proof
def test_stops_early_and_points_at_the_best(trainings: Trainings, tmp_path: Path) -> None:
    """The labels are random, so what the model learns makes the validation worse sooner or later."""
    flags = (*ODD, "--noise", "--epochs", "60", "--patience", "3", "--lr", "0.05")
    run = trainings.run(tmp_path / "run", "fsdp.py", *flags, processes=2)
    losses = {line["step"]: line["val_loss"] for line in run.metrics() if "val_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 3 * 6 < 60 * 6
    assert (run.folder / "checkpoints/best").read_text() == f"step-{best}\n"
    assert run.checkpoint(f"step-{best}").is_dir()
    assert run.out.splitlines()[-1].endswith(f"with the weights of step {best}")
    notes = run.notes(f"step-{max(losses)}")
    assert (notes["best"]["step"], notes["best"]["loss"]) == (best, losses[best])
    # A run that resumes from there has nothing left to do.
    resume = ("--resume", str(run.checkpoint(f"step-{max(losses)}")))
    again = trainings.run(tmp_path / "again", "fsdp.py", *flags, *resume, processes=2)
    assert (again.metrics(), again.out.splitlines()[-1]) == ([], run.out.splitlines()[-1])


@pytest.mark.proof
def test_patience_begins_where_a_checkpoint_of_ddp_ends(trainings: Trainings, tmp_path: Path) -> None:
    flags = (*ODD, "--lr", "3e-3")
    uninterrupted = trainings.run(tmp_path / "ddp", "ddp.py", *flags, processes=2)
    flags = (*flags, "--patience", "1", "--resume", str(uninterrupted.checkpoint("step-12")))
    run = trainings.run(tmp_path / "fsdp", "fsdp.py", *flags, processes=2)
    assert list(run.losses()) == list(range(13, 19))


@pytest.mark.proof
def test_any_seed_and_another_precision_than_the_checkpoint(trainings: Trainings, tmp_path: Path) -> None:
    flags = (*ODD, "--seed", "1234567890")
    uninterrupted = trainings.run(tmp_path / "whole", "fsdp.py", *flags, processes=2)
    flags = (*flags, "--precision", "fp16", "--resume", str(uninterrupted.checkpoint("step-6")))
    run = trainings.run(tmp_path / "fp16", "fsdp.py", *flags, processes=2)
    assert run.losses() == pytest.approx({s: x for s, x in uninterrupted.losses().items() if s > 6}, rel=0.02)


REFUSALS = {
    "no data named": ([], {}, "gpt.py: --train '' is not a text"),
    "heads": ([*GPT, "--heads", "7"], {}, "gpt.py: --width 64 is not a multiple of --heads 7"),
    "three processes": ([*GPT], {"WORLD_SIZE": "3"}, "--global-batch 32 of 6565 does not split over 3 processes"),
    "copies": ([*GPT, "--replicate", "2"], {}, "fsdp.py: --replicate 2 must divide 1 ranks"),
    "nothing held out": ([*ODD, "--held-out", "0"], {}, "fsdp.py: nothing is held out"),
    "a trace of nothing": ([*GPT, "--profile", "10-13"], {}, "fsdp.py: --profile '10-13' is not two steps"),
    "a trace of what never comes": ([*GPT, "--profile", "3:9", "--max-steps", "4"], {}, "fsdp.py: --profile '3:9'"),
    "no checkpoint": ([*GPT, "--resume", "nowhere"], {}, "fsdp.py: --resume 'nowhere' is not a checkpoint"),
    "NPUs without their library": ([*GPT, "--device", "npu"], {}, "--device npu needs the package torch_npu"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_in_one_line(case: str, trainings: Trainings, tmp_path: Path) -> None:
    flags, env, words = REFUSALS[case]
    refused = trainings.start(tmp_path, "fsdp.py", *flags, env=env).finish()
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert words in refused.err
