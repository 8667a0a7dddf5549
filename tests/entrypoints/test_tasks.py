"""The shipped tasks, their page, and a GPT that learns."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pages import blocks, section, table
from trainings import DIGITS, ROOT, TEXT, Launched, Trainings, torch

pytestmark = pytest.mark.slow

TASKS = {path.stem: path for path in (ROOT / "entrypoints/tasks").glob("*.py")}
BIN = Path(sys.executable).parent
NEEDED = ("build_model", "build_datasets", "compute_loss", "count")


def task(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TASKS[name])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(module: ModuleType, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize(("name", "data", "items"), [("digits", DIGITS, 4), ("gpt", TEXT, 4 * 64)])
def test_a_task_keeps_the_contract(name: str, data: Path, items: int) -> None:
    module = task(name)
    args = arguments(module, "--train", str(data))
    train, validation, test = module.build_datasets(args)
    assert len(train) > len(validation) >= len(test) > 0
    assert all(torch.equal(a, b) for a, b in zip(train[3], train[3], strict=True))
    batch = torch.utils.data.default_collate([train[index] for index in range(4)])
    assert module.count(batch) == items
    torch.manual_seed(0)
    model = module.build_model(args)
    loss, others = module.compute_loss(model, batch)
    assert loss.item() / items == pytest.approx(torch.tensor(10.0 if name == "digits" else 256.0).log().item(), rel=0.1)
    assert 0 <= others["accuracy"] <= items
    # The loss is a sum: the losses of two halves add up to the whole batch's.
    halves = [module.compute_loss(model, [part[half] for part in batch])[0] for half in (slice(2), slice(2, 4))]
    assert sum(halves).item() == pytest.approx(loss.item(), rel=1e-5)
    with torch.device("meta"):
        assert {p.device.type for p in module.build_model(args).parameters()} == {"meta"}


def test_the_page_tells_of_every_name_of_a_task() -> None:
    told = {row[0].strip("`").partition("(")[0]: row[1] for row in table(section("docs/entrypoints.md", "A task"))}
    assert tuple(name for name, needed in told.items() if needed == "yes") == NEEDED
    asked = set()
    for script in ("ddp.py", "fsdp.py"):
        text = (ROOT / "entrypoints" / script).read_text()
        asked |= set(re.findall(r"task\.(\w+)\(", text)) | set(re.findall(r'attr\(task, "(\w+)"', text))
    assert asked == set(told)


def test_the_gpt_counts_its_operations() -> None:
    """GPT-2's smallest model with 50,304 rows: 6 operations for each of its 85 million weights, the head's weights, and
    attention."""
    module = task("gpt")
    flags = ("--layers", "12", "--heads", "12", "--width", "768", "--context", "1024", "--vocabulary", "50304")
    with torch.device("meta"):
        model = module.build_model(arguments(module, *flags))
    weights = 12 * (12 * 768 * 768 + 13 * 768) + 2 * 768 + 50304 * 768
    assert module.flops_per_item(model) == 6 * weights + 12 * 12 * 768 * 1024


def test_the_data_is_where_a_channel_puts_it(tmp_path: Path) -> None:
    """Check a file and a folder that holds only that file."""
    for name, file in (("digits", DIGITS), ("gpt", TEXT)):
        module, folder = task(name), tmp_path / name
        folder.mkdir()
        shutil.copy(file, folder)
        one, other = (module.build_datasets(arguments(module, "--train", str(path)))[2] for path in (file, folder))
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        (folder / f"more{''.join(file.suffixes)}").touch()
        with pytest.raises(SystemExit, match=rf"^{name}\.py: --train "):
            module.build_datasets(arguments(module, "--train", str(folder)))


@pytest.mark.slow
@pytest.mark.proof
def test_the_gpt_learns(trainings: Trainings, tmp_path: Path) -> None:
    """Run 300 steps of a smaller model. A model that knows only the previous byte reaches 2.43 at best."""
    flags = ("--train", str(TEXT), "--layers", "2", "--width", "96", "--lr", "6e-3", "--max-steps", "300")
    run = trainings.run(tmp_path, "fsdp.py", *flags)
    assert run.metrics()[-1]["val_loss"] < 2.4


@pytest.mark.slow
@pytest.mark.proof
def test_the_task_of_the_page_runs(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("docs/entrypoints.md") if block.value("file") == "circle.py"]
    (commands,) = [block.text for block in blocks("docs/entrypoints.md") if block.value("example") == "circle"]
    shutil.copytree(ROOT / "entrypoints", tmp_path / "entrypoints")
    (tmp_path / "circle.py").write_text(block.text)
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for line in commands.splitlines():
        done = subprocess.run(
            line.split(), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        accuracy = re.search(r"^loss \S+ accuracy (\S+) on 500 held", done.stdout, re.MULTILINE)
        assert accuracy is not None
        assert float(accuracy[1]) > 0.95
        shutil.rmtree(tmp_path / "checkpoints")


@pytest.mark.slow
@pytest.mark.proof
def test_the_curve_of_the_page(tmp_path: Path) -> None:
    (command,) = [block.text for block in blocks("docs/entrypoints.md") if block.value("example") == "curve"]
    script, *flags = command.split("entrypoints/")[1].replace("examples/data/persuasion.txt.gz", str(TEXT)).split()
    run = Launched(tmp_path, script, *flags, processes=2).finish(1200)
    assert run.code == 0, run.err
    found = {line["step"]: line for line in run.metrics()}
    for step, _, loss, validation, accuracy in table(section("docs/entrypoints.md", "A curve")):
        assert found[int(step)]["loss"] == pytest.approx(float(loss), abs=0.05)
        if validation:
            assert found[int(step)]["val_loss"] == pytest.approx(float(validation), abs=0.03)
            assert found[int(step)]["val_accuracy"] == pytest.approx(float(accuracy), abs=0.01)
    assert found[max(found)]["val_loss"] < 1.6
