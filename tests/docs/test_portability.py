"""docs/portability.md is made of its record, the record is of the cells as they are; a few of them run here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import cells
import portability
import pytest
from cells import CELLS, NOT, PROVIDERS
from trainings import Trainings

from cloudtrain.provider_api.registry import provider_names


def test_the_page_is_made_of_its_record() -> None:
    made = portability.page(portability.read())
    assert made == portability.PAGE.read_text(encoding="utf-8"), "run: python proof/portability.py --page"


@pytest.mark.slow
def test_the_record_is_of_the_cells_as_they_are() -> None:
    assert portability.stale(portability.read()) == [], "run: python proof/portability.py --new"


def test_every_provider_of_ours_is_a_column() -> None:
    own = {path.stem for path in Path(cells.ROOT, "cloudtrain/providers").iterdir() if path.stem[0] not in "_."}
    assert set(PROVIDERS) == own == own & set(provider_names())
    build = cells.BUILD.read_text()
    (names,) = (line for line in build.splitlines() if line.startswith("NAMES="))
    assert sorted(names.partition("(")[2].rstrip(")").split()) == sorted(cells.IMAGES)


@pytest.fixture
def record() -> dict[str, Any]:
    return copy.deepcopy(portability.read())


def test_losses_of_other_bits_are_told(record: dict[str, Any]) -> None:
    name = "ddp clean/docker"
    assert not portability.wrong(record, CELLS[name])
    record[name] |= {"curve": "0", "wrong": ""}
    assert "other losses than the clean run" in portability.wrong(record, CELLS[name])
    assert "**fails**" in portability.page(record)
    record["ddp clean/local"]["torch"] = "1.0"
    assert "no clean run on local of the same machine" in portability.wrong(record, CELLS[name])


@pytest.mark.slow
def test_a_record_that_is_not_of_the_code_is_stale(record: dict[str, Any]) -> None:
    record["gone/local"] = record.pop("fsdp clean/local")
    record["ddp clean/local"]["job"] = "0"
    assert portability.stale(record) == [
        "fsdp clean/local was never run",
        "gone/local is no longer a cell",
        "the job of 1 cells has changed since they ran, for example ddp clean/local",
    ]
    assert not set(NOT) & set(CELLS)


def test_words_about_the_code_make_no_cell_stale(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    digests = []
    for text in (
        '"""Train."""\n\nx = "# 1"  # one\n\n\ndef f():\n    """Return 2.\n\n    Always.\n    """\n    return 2\n',
        'x = "# 1"\ndef f():\n    return 2  # two\n',
        'x = "# 2"\ndef f():\n    return 2\n',
    ):
        script.write_text(text)
        digests.append(cells.content(script))
    assert digests[0] == digests[1] == b'x = "# 1"\ndef f():\n    return 2'
    assert digests[1] != digests[2]


# -------------------------------------------------------------------------------------------- a few of them, every time


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "name", ["image user/sagemaker", pytest.param("image nopython/azureml", marks=pytest.mark.proof)]
)
def test_an_image(name: str, images: Any, tmp_path: Path) -> None:
    images(CELLS[name].row.partition(" ")[2])
    found = cells.run(CELLS[name], tmp_path)
    assert found["wrong"] == ""


@pytest.mark.proof
@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["fsdp node lost/vertex", "ddp clean/modelarts"])
def test_a_cell_has_the_bits_of_a_plain_run(name: str, images: Any, trainings: Trainings, tmp_path: Path) -> None:
    images("torch")
    for folder in ("whole", "cell"):
        (tmp_path / folder).mkdir()
    training = cells.TRAININGS[CELLS[name].script]
    task, data = (
        cells.ROOT / f"entrypoints/tasks/{training['args'][3]}.py",
        cells.ROOT / "examples/data" / training["data"],
    )
    flags = [*training["args"][4:], "--task", str(task), "--train", str(data)]
    uninterrupted = trainings.run(tmp_path / "whole", training["entry_point"], *flags, processes=4).losses()
    found = cells.run(CELLS[name], tmp_path / "cell")
    assert found["wrong"] == ""
    assert json.loads(json.dumps(found))["bits"] == uninterrupted[max(uninterrupted)].hex()
    assert found["curve"] == cells.digest_of(uninterrupted)
