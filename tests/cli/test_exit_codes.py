"""The table of exit codes: every class of errors.py and every category of a run, through the command line itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import foldercloud
import pytest

from cloudtrain import cli, errors
from cloudtrain.errors import EXIT_CODES, CloudtrainError

PAGE = Path(__file__).parents[2] / "docs/exit-codes.md"


def subclasses(kind: type[CloudtrainError]) -> Iterator[type[CloudtrainError]]:
    """Yield ``kind`` and all its subclasses."""
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


#: The classes that end a command. Two more are elsewhere: the nodes' class, and the Estimator's, whose code is its
#: result's.
CLASSES = [kind for kind in dict.fromkeys(subclasses(CloudtrainError)) if kind.__module__ == errors.__name__]


def rows() -> dict[int, tuple[list[str], list[str]]]:
    """Return the categories and the classes that the page names, by exit code."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {int(row[0]): (re.findall(r"`(\w+)`", row[1]), re.findall(r"`(\w+)`", row[2])) for row in cells}


def test_every_class_and_every_category_stands_in_its_row_and_in_no_other() -> None:
    told_categories = {word: code for code, (categories, _) in rows().items() for word in categories}
    told_classes = {word: code for code, (_, classes) in rows().items() for word in classes}
    assert told_categories == EXIT_CODES
    assert told_classes == {kind.__name__: kind.exit_code for kind in CLASSES}
    assert sum(len(words) for row in rows().values() for words in row) == len(CLASSES) + len(EXIT_CODES)
    assert list(rows()) == list(range(10))


def test_every_error_is_exported() -> None:
    """A user who catches one must be able to name it."""
    assert {kind.__name__ for kind in CLASSES} <= set(errors.__all__)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with one run, ``r1``, on foldercloud."""
    folder = tmp_path_factory.mktemp("exits")
    foldercloud.install(folder / "site")
    (folder / "site/foldercloud.py").unlink()  # the module comes from this process
    (folder / "jobs").mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "cloudtrain.toml").write_text(f'provider = "foldercloud"\n[foldercloud]\nfolder = "{folder}/jobs"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        patch.chdir(folder)
        assert cli.main(["submit", "train.py", "--run-id", "r1", "--detach"]) == 0
        yield folder


@pytest.mark.parametrize("kind", CLASSES, ids=[kind.__name__ for kind in CLASSES])
def test_an_error_of_each_class_ends_the_command_with_its_code(
    kind: type[CloudtrainError], store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        words = ("memory", "resources.gpu", "no") if issubclass(kind, errors.UnsupportedError) else ("it is\nso",)
        raise kind(*words)

    monkeypatch.setattr(foldercloud.Provider, "status", broken)
    capsys.readouterr()
    assert cli.main(["status", "r1"]) == kind.exit_code
    plain = capsys.readouterr()
    assert (plain.out, plain.err.count("\n"), plain.err[:7]) == ("", 1, "error: ")
    assert cli.main(["status", "r1", "--json"]) == kind.exit_code
    output = json.loads(capsys.readouterr().out)
    assert output["exit_code"] == kind.exit_code
    assert output["field"] == ("resources.gpu" if issubclass(kind, errors.UnsupportedError) else "")
    assert f"error: {output['error']}\n" == plain.err


@pytest.mark.parametrize("category", EXIT_CODES)
def test_a_run_of_each_category_ends_a_wait_with_its_code(
    category: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = foldercloud.Provider(folder=str(store / "jobs"))
    state = "cancelled" if category == "cancelled" else "failed"
    jobs.stand("r1.0", state=state, category=category, reason="why")
    try:
        assert cli.main(["wait", "r1", "--json"]) == EXIT_CODES[category]
        output = json.loads(capsys.readouterr().out)
        assert (output["category"], output["exit_code"]) == (category, EXIT_CODES[category])
        assert cli.main(["status", "r1"]) == 0
    finally:
        (store / ".cloudtrain/runs/r1/result.json").unlink()
        jobs.stand("r1.0", state="running")


def test_an_interrupt_is_7_and_a_mistake_of_ours_9(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, code in ((KeyboardInterrupt, 7), (ZeroDivisionError, 9)):

        def broken(*_: object, kind: type[BaseException] = kind) -> None:
            raise kind

        monkeypatch.setattr(foldercloud.Provider, "status", broken)
        assert cli.main(["status", "r1"]) == code
        assert capsys.readouterr().err.startswith("error: ")


def test_a_message_that_quotes_a_whole_file_is_cut_in_its_middle() -> None:
    error = errors.SpecError(f"no job: {'x' * 50_000}: write a table", field="job")
    assert str(error).startswith("job: no job: xxx")
    assert str(error).endswith("xxx: write a table")
    assert len(str(error)) <= errors.MOST >= len(error.message)
    assert str(errors.StorageError("y" * errors.MOST)) == "y" * errors.MOST
