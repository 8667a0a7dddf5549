"""Every example, by the commands of its section in docs/examples.md, with checks of the results named there.

Only the proof trains with them: complete, which CI runs too, or with a killed rank.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs
from pages import blocks
from trainings import Trainings, torch

from cloudtrain.runs.run import Run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
COMMANDS = {name: block.text for block in blocks("docs/examples.md") if (name := block.value("example"))}
#: Tools rather than training examples: they make data.
TOOLS = {"make_cifar10"}
DIGITS = "examples/data/digits.csv.gz"
KILLED = pytest.mark.parametrize("killed", [pytest.param(False, id="whole"), pytest.param(True, id="killed")])
"""True if a rank is killed. Its restart imports everything again, which is most of an example's cost here."""
ENVIRON = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Give a folder with the examples as in a checkout, and the store of the commands' runs."""
    made = Jobs(tmp_path)
    shutil.copytree(EXAMPLES, made.code / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    made.store = made.code / ".cloudtrain"
    yield made
    made.close()


class Example:
    """The running commands of a section."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self.jobs, self.name, self.before = jobs, name, jobs.runs()
        self.process = jobs.start("-ec", COMMANDS[name], python=["sh"], **ENVIRON)

    def finish(self) -> str:
        """Wait for the end. Return all lines that the last run's ranks printed."""
        out, err = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, out + err
        return "\n".join(line.text for line in self.run.logs())

    def last(self) -> str:
        """Return rank 0's output in the last attempt, or with mp.spawn that of all ranks of node 0."""
        number = self.result()["attempts"][-1]["number"]
        return "\n".join(line.text for line in self.run.logs() if line.attempt == number and line.rank == 0)

    @property
    def run(self) -> Run:
        return self.jobs.run(self.jobs.runs()[-1])

    def result(self) -> dict[str, Any]:
        result = self.run.result()
        assert result["state"] == "succeeded"
        return result

    def ranks(self, pattern: str = "") -> list[int]:
        """Return the ranks' pids. torchrun, their parent, has the same command line, but not that variable."""
        found = self.jobs.processes().items()
        pids = [pid for pid, line in found if re.search(pattern or rf"worker\.py examples/{self.name}\.py", line)]
        return [pid for pid in pids if pattern or self.jobs.variable(pid, "TORCHELASTIC_RUN_ID")]

    def kill(self, count: int, pattern: str = "") -> None:
        """Kill one of ``count`` ranks by SIGKILL, once the store has a checkpoint.

        The ranks are frozen until then, so that a fast machine does not finish. It takes the second checkpoint or a
        later one: a first one that is half written and unchanged looks finished.
        """
        jobs = self.jobs
        pids = jobs.wait_for(lambda: len(found := self.ranks(pattern)) == count and found)
        folders = {Path(str(jobs.variable(pid, "CLOUDTRAIN_CHECKPOINT_DIR"))) for pid in pids}
        jobs.wait_for(lambda: any(len(list(folder.glob("[!.]*[!p]"))) >= 2 for folder in folders))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        run = jobs.store / "runs" / jobs.runs()[-1]
        jobs.wait_for(lambda: list(run.glob("live/checkpoints/*/0.0-*/commit.json")))
        os.kill(pids[-1], signal.SIGKILL)
        for pid in pids[:-1]:
            os.kill(pid, signal.SIGCONT)

    def resumed(self, number: str, *, killed: bool = True) -> int | None:
        """Return the number that ``number`` finds in the second attempt's checkpoint name; None for a run without a
        kill."""
        first, *more = self.result()["attempts"]
        assert len(more) == killed, (first, more)
        if not killed:
            return None
        match = re.fullmatch(number, more[0]["resumed_from"])
        assert match, (first, more)
        return int(match[1])


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """Return the groups of every line with ``pattern``; ``#`` in it is a number."""
    found = re.findall(pattern.replace("#", r"(-?[\d.]+(?:e[+-]\d+)?)"), text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return [tuple(map(float, groups if isinstance(groups, tuple) else (groups,))) for groups in found]


# --------------------------------------------------------------------------------------------------------- all examples


def test_each_example_has_its_section_its_test_and_no_import_of_cloudtrain() -> None:
    scripts = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in EXAMPLES.glob("*.py")}
    assert COMMANDS.keys() == scripts.keys() - TOOLS
    tests = Path(__file__).read_text(encoding="utf-8")
    for name, tree in scripts.items():
        assert name in TOOLS or f'Example(jobs, "{name}")' in tests, f"{name} has no test"
        text = ast.get_docstring(tree) or ""
        assert f"examples/{name}.py" in text, f"{name} lacks the command that runs it"
        imported = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {module for module in imported if module.split(".")[0] in ("cloudtrain", "entrypoints")}


#: Script, arguments, torchrun's variables (ranks), words of the refusal.
REFUSED = [
    ("data_parallel_vs_ddp", [], {}, "start it with torchrun"),
    ("data_parallel_vs_ddp", ["--global-batch", "9"], {"WORLD_SIZE": "2"}, "--global-batch 9 does not split over 2"),
    ("mp_spawn", ["--train", "no.gz"], {}, "--train 'no.gz' is no digits.csv.gz"),
    ("mp_spawn", ["--train", DIGITS, "--processes", "3"], {}, "--global-batch 64 does not split over 3"),
    ("model_parallel", [], {"WORLD_SIZE": "3"}, "one or two processes, not 3"),
    ("pipeline_parallel", [], {}, "start it with torchrun"),
    ("pipeline_parallel", ["--micro-batches", "5"], {"WORLD_SIZE": "2"}, "--micro-batches 5"),
    ("tensor_parallel", ["--layouts", "1x2x2"], {"WORLD_SIZE": "2"}, "1x2x2 is 4 processes, and there are 2"),
    ("tensor_parallel", ["--layouts", "1x1x2", "--train", "no.gz"], {"WORLD_SIZE": "2"}, "'no.gz' is no gzipped text"),
    ("make_cifar10", ["folder", "--records", "0"], {}, "--records 0 is not positive"),
    ("resnet_cifar10", ["--train", "empty"], {}, "holds no data_batch_*.bin"),
    ("resnet_cifar10", ["--train", "cut"], {}, "100 bytes are no 3073-byte records"),
    ("finetune", ["--train", DIGITS, "--rows", "9"], {}, "a batch is at most the rows"),
    ("finetune", ["--train", DIGITS, "--weights", DIGITS], {}, "is no model.pt of this script"),
    ("powersgd", ["--train", "no.gz"], {}, "--train 'no.gz' is no digits.csv.gz"),
    ("powersgd", ["--train", DIGITS], {"WORLD_SIZE": "3"}, "--global-batch 64 does not split over 3"),
    ("powersgd", ["--train", DIGITS, "--resume", "empty"], {}, "'empty' is no checkpoint of 1 processes"),
    ("lightning_digits", ["--data", "no.gz"], {}, "--data 'no.gz' is no digits.csv.gz"),
    ("accelerate_digits", ["--data", "no.gz"], {}, "--data 'no.gz' is no digits.csv.gz"),
    ("hf_trainer_digits", ["--data_file", "no.gz", "--output_dir", "out"], {}, "--data_file 'no.gz'"),
]

#: Runs all of them in one process, as importing torch is most of the work.
REFUSE = """
import json, os, runpy, sys
for script, arguments, environ, _ in json.load(sys.stdin):
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", **environ} if environ else {})
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(f"examples/{script}.py", run_name="__main__")
    except SystemExit as exit:
        print("refused:", json.dumps(exit.code))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
"""


@pytest.mark.proof
def test_bad_input_is_refused_in_one_line(jobs: Jobs) -> None:
    (jobs.code / "empty").mkdir()
    (jobs.code / "cut").mkdir()
    (jobs.code / "cut/data_batch_1.bin").write_bytes(bytes(100))
    done = subprocess.run(
        [sys.executable, "-c", REFUSE], input=json.dumps(REFUSED), cwd=jobs.code, env=jobs.environ | ENVIRON,
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    lines = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(lines) == len(REFUSED), done.stdout + done.stderr
    for (script, _, _, words), line in zip(REFUSED, lines, strict=True):
        assert line.startswith(f"{script}.py: "), line
        assert words in line
        assert "\n" not in line


# ---------------------------------------------------------------------------------------------------- forms of parallel


@pytest.mark.proof
def test_data_parallel_trains_like_ddp(jobs: Jobs) -> None:
    text = Example(jobs, "data_parallel_vs_ddp").finish()
    rows = {
        match[1].strip(): [float(value) for value in match.groups()[1:]]
        for match in re.finditer(r"(?m)^(.+?) +([\d.]+) ms/step  loss ([\d.]+) to ([\d.]+)  .* ([\d.e+-]+)$", text)
    }
    assert list(rows) == ["one process", "DataParallel", "threads by hand", "DDP"], text
    for milliseconds, first, last, apart in rows.values():
        assert milliseconds > 0
        assert last < first
        assert apart < 1e-4
    assert rows["DataParallel"][3] == 0, "without GPUs it must be the bare model, to the last bit"
    assert "no GPU: DataParallel is the bare model here" in text


@pytest.mark.proof
@KILLED
def test_mp_spawn_starts_its_ranks(jobs: Jobs, killed: bool) -> None:
    example = Example(jobs, "mp_spawn")
    if killed:
        example.kill(4, r"multiprocessing\.spawn")
    text = example.finish()
    ranks = set(numbers(r"rank # of 4: process # of node #", text))
    assert ranks == {(2 * node + local, local, node) for node in range(2) for local in range(2)}
    losses = numbers(r"epoch # loss #", example.last())
    resumed = example.resumed(r"epoch-(\d+)\.pt", killed=killed)
    assert [epoch for epoch, _ in losses] == list(range((resumed or 0) + 1, 6))
    assert losses[-1][1] < 0.3 < numbers(r"epoch 1 loss #", text)[0][0]


@pytest.mark.proof
def test_model_parallel_trains_as_one_process_does(jobs: Jobs) -> None:
    text = Example(jobs, "model_parallel").finish()
    shares = numbers(r"rank # holds #% of the weights and computed #% of the time", text)
    assert sorted(rank for rank, _, _ in shares) == [0, 1]
    assert all(45 <= held <= 55 and 0 < busy < 100 for _, held, busy in shares)
    ((first, last),) = numbers(r"two processes: loss # at first, # at last", text)
    assert last < 0.9 * first
    assert numbers(r"largest difference from one process: #", text)[0][0] < 1e-5


@pytest.mark.proof
def test_the_bubble_of_a_pipeline_matches_theory(jobs: Jobs) -> None:
    """Check at most 0.2 above it: the cost of each send and wake-up on two cores that four stages share."""
    text = Example(jobs, "pipeline_parallel").finish()
    rows = numbers(r", # micro-batches: bubble #, theory #; loss # to #, at most # from one process", text)
    assert [row[0] for row in rows] == [4, 16, 4, 16], "GPipe, then 1F1B"
    for m, bubble, theory, first, last, apart in rows:
        assert theory == round(3 / (m + 3), 3)
        assert theory - 0.05 <= bubble <= theory + 0.2
        assert last < first
        assert apart < 1e-5
    assert all(many[1] < few[1] for few, many in (rows[:2], rows[2:]))
    drawings = re.findall(r"(?m)^  stage (\d) \|([0-9a-z.]+)\|$", text)
    assert [stage for stage, _ in drawings] == list("0123") * 4
    assert all({"0", "a", "."} <= set(row) for _, row in drawings)
    in_order = [re.sub(r"[.]|(.)(?=\1)", "", row) for _, row in drawings]
    assert in_order[0] == "0123abcd", "GPipe: all forwards, then all backwards"
    assert in_order[11] == "0a1b2c3d", "1F1B: the last stage alternates"


@pytest.mark.proof
def test_each_layout_trains_as_one_process_does(jobs: Jobs) -> None:
    text = Example(jobs, "tensor_parallel").finish()
    rows = numbers(r"loss # to #, at most # from one process; rank 0 holds #% of the parameters", text)
    assert re.findall(r"(?m)^(\dx\dx\d): loss", text) == ["1x1x4", "1x2x2", "2x2x1"]
    for first, last, apart, held in rows:
        assert first == pytest.approx(math.log(256), abs=0.3)
        assert last < 0.75 * first
        assert apart < 1e-4
        assert held <= 50


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.proof
def test_resnet_learns(jobs: Jobs) -> None:
    example = Example(jobs, "resnet_cifar10")
    text = example.finish()
    assert "each process normalises its own 25 rows of 50" in text
    assert len(example.result()["attempts"]) == 1
    check_accuracy(example)


@pytest.mark.proof
def test_a_killed_resnet_loses_no_step(jobs: Jobs) -> None:
    example = Example(jobs, "resnet_cifar10")
    (pid, *_) = jobs.wait_for(lambda: len(found := example.ranks()) == 2 and found)
    metrics = [Path(str(jobs.variable(rank, "CLOUDTRAIN_METRICS_FILE"))) for rank in (pid, *_)]
    jobs.wait_for(lambda: any(path.exists() and path.stat().st_size for path in metrics))
    os.kill(jobs.node(1), signal.SIGTERM)
    text = example.finish()
    assert [steps for _, steps in numbers(r"begins at step # of #", text)] == [60, 60]
    first, second = example.result()["attempts"]
    assert first["category"] == "preempted"
    stop_step = int(numbers(r"told to stop at step # of 60", text)[0][0])
    assert second["resumed_from"] == f"step-{stop_step}.pt"
    check_accuracy(example)


def check_accuracy(example: Example) -> None:
    pulled = example.jobs.tmp / "pulled"
    example.run.pull(pulled)
    rows = [json.loads(line) for line in (pulled / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert numbers(r"accuracy # on 100 test images", example.last())[0][0] >= 0.3, (
        "the accuracy must be above chance, one in ten"
    )
    assert (pulled / "artifacts/model.pt").exists()


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.mark.proof
def test_fine_tuning_takes_initial_weights(jobs: Jobs) -> None:
    example = Example(jobs, "finetune")
    text = example.finish()
    assert [line for line in text.splitlines() if line.startswith(("begins", "goes on"))] == [
        "begins with initial weights and a new head"
    ]
    assert numbers(r"accuracy # on 360 digits after 50 steps", text)[0][0] >= 0.6, (
        "the accuracy must be above chance, one half"
    )


@pytest.mark.proof
def test_fine_tuning_killed_takes_initial_weights_once(jobs: Jobs) -> None:
    """Check that the killed run's losses are those of an undisturbed run under bare torchrun, to the last bit."""
    example = Example(jobs, "finetune")
    jobs.wait_for(lambda: len(jobs.runs()) == 2, 120)
    example.kill(2)
    text = example.finish()
    step = example.resumed(r"step-(\d+)\.pt")
    starts = [line for line in text.splitlines() if line.startswith(("begins", "goes on"))]
    assert starts == ["begins with initial weights and a new head", f"goes on at step {step}"]
    tuned = numbers(r"accuracy # on 360 digits after 50 steps", text)[0][0]
    example.run.pull(jobs.tmp / "pulled")

    (jobs.code / "examples/cloudtrain.py").write_text("raise ImportError('examples do without cloudtrain')\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
    flags = ["--train", DIGITS, "--task", "parity", "--rows", "100", "--epochs", "10"]
    weights = ["--weights", "out/base/artifacts/model.pt"]
    for name, python, more in (("scratch", [sys.executable], []), ("whole", torchrun, weights)):
        (jobs.tmp / name).mkdir()
        done = subprocess.run(
            [*python, "examples/finetune.py", *flags, *more, "--checkpoint-dir", str(jobs.tmp / name)],
            env=jobs.environ | ENVIRON | {"CLOUDTRAIN_METRICS_FILE": str(jobs.tmp / name / "metrics.jsonl")},
            cwd=jobs.code, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        accuracy = numbers(r"accuracy # on 360 digits after 50 steps", done.stdout)[0][0]
        assert (accuracy < tuned - 0.05) if name == "scratch" else (accuracy == tuned)
    assert losses(jobs.tmp / "pulled") == losses(jobs.tmp / "whole")


FLOATS, SENT = 85002, 4914
"""Floats of powersgd.py's gradients, and of their factors of rank 4 with the biases, which are sent unchanged."""


@pytest.mark.proof
@KILLED
def test_powersgd_sends_factors(jobs: Jobs, trainings: Trainings, killed: bool) -> None:
    """Check that a killed run has the losses of an undisturbed one, to the last bit."""
    example = Example(jobs, "powersgd")
    if killed:
        example.kill(2)
    text = example.finish()
    example.resumed(r"step-(\d+)", killed=killed)
    rows = numbers(r"epoch # loss #, a gradient of rank # of 256", text)
    assert {epoch for epoch, _, _ in rows} == set(range(1, 7))
    assert all(rank > 32 if epoch == 1 else rank == 4 for epoch, _, rank in rows)
    words = r"accuracy # on 360 digits; a compressed step all-reduces # floats for #"
    ((accuracy, sent, floats),) = numbers(words, text)
    assert (sent, floats) == (SENT, FLOATS)
    assert accuracy >= 0.9
    if killed:
        example.run.pull(jobs.tmp / "pulled")
        flags = ("--train", str(ROOT / DIGITS))
        complete = trainings.run(jobs.tmp / "whole", str(EXAMPLES / "powersgd.py"), *flags, processes=2)
        assert losses(jobs.tmp / "pulled") == complete.losses()


COUNTING = """
import json, os, runpy
import torch.distributed as dist

def all_reduce(tensor, *args, **more):
    sent.append(tensor.numel())
    return plain(tensor, *args, **more)

plain, sent, dist.all_reduce = dist.all_reduce, [], all_reduce
runpy.run_path({script!r}, run_name="__main__")
with open(f"sent-{{os.environ['RANK']}}.json", "w") as stream:
    json.dump(sent, stream)
"""


@pytest.mark.proof
def test_powersgd_resumes_with_the_errors_of_each_rank(trainings: Trainings, tmp_path: Path) -> None:
    """Check bit for bit, and that it differs without them. The sends are counted where they happen, not by PowerSGD."""
    script, flags = str(EXAMPLES / "powersgd.py"), ("--train", str(ROOT / DIGITS), "--epochs", "4")
    (counting := tmp_path / "counting.py").write_text(COUNTING.format(script=script))
    complete = trainings.run(tmp_path / "whole", str(counting), *flags, processes=2)
    wanted = complete.losses()
    assert list(wanted) == list(range(1, 89))
    for rank in range(2):  # two passes before step 1 and 22 plain steps, 66 compressed ones; and the loss of each step
        sent = json.loads((complete.folder / f"sent-{rank}.json").read_text())
        assert sum(sent) == 24 * FLOATS + 66 * SENT + 88

    files = [complete.checkpoint("step-44") / f"powersgd-{rank}-of-2.pt" for rank in range(2)]
    one, other = (torch.load(file, weights_only=True)["error_dict"] for file in files)
    assert one.keys() == other.keys() == {0}
    assert not torch.equal(one[0], other[0])
    for name, first in (("step-22", 23), ("step-44", 45)):  # before the first compressed step, and between two of them
        resume = ("--resume", str(complete.checkpoint(name)))
        resumed = trainings.run(tmp_path / name, script, *flags, *resume, processes=2)
        assert resumed.losses() == {step: wanted[step] for step in range(first, 89)}

    for file in files:
        state = torch.load(file, weights_only=True)
        state["error_dict"][0].zero_()
        torch.save(state, file)
    resume = ("--resume", str(complete.checkpoint("step-44")))
    without = trainings.run(tmp_path / "without", script, *flags, *resume, processes=2).losses()
    assert without[45] == wanted[45], "the errors must count from the next step on"
    assert without[46] != wanted[46]


# ------------------------------------------------------------------------------------------------ third-party libraries


@pytest.mark.proof
@KILLED
def test_a_lightning_script(jobs: Jobs, killed: bool) -> None:
    example = Example(jobs, "lightning_digits")
    if killed:
        example.kill(2)
    text = example.finish()
    example.resumed(r"digits-epoch=(\d+)\.ckpt", killed=killed)
    assert ("Restored all states from the checkpoint" in text) == killed
    # 1437 digits in batches of 32 over two processes: 23 steps an epoch, however often an epoch restarted.
    ((world, steps, accuracy),) = numbers(r"# processes, # steps, accuracy #", text)
    assert (world, steps) == (2, 8 * 23)
    assert accuracy >= 0.9


@pytest.mark.proof
@KILLED
def test_an_accelerate_script(jobs: Jobs, killed: bool) -> None:
    example = Example(jobs, "accelerate_digits")
    if killed:
        example.kill(2)
    text = example.finish()
    assert set(numbers(r"# processes, DistributedType\.MULTI_CPU", text)) == {(2,)}
    assert ("Resumed from checkpoint" in text) == killed
    rows = numbers(r"epoch #: accuracy # on 360", example.last())
    resumed = example.resumed(r"epoch_(\d+)", killed=killed)
    assert [row[0] for row in rows] == list(range(0 if resumed is None else resumed + 1, 8))
    assert rows[-1][1] >= 0.9


@pytest.mark.proof
@KILLED
def test_a_script_for_hf_trainer(jobs: Jobs, killed: bool) -> None:
    example = Example(jobs, "hf_trainer_digits")
    if killed:
        example.kill(2)
    text = example.finish()
    assert (example.resumed(r"checkpoint-(\d+)", killed=killed) or 0) % 23 == 0
    assert numbers(r"# processes, # steps", text) == [(2, 8 * 23)]
    assert numbers(r"eval_accuracy +=? *#", text)[0][0] >= 0.7
