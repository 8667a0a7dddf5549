"""The documents keep their word: every block runs or is checked, links lead somewhere, tables are what the code says.

The info string of a fenced block says what becomes of it, from the top of a page to its end in one folder:

``LANG file=NAME``            written there (and checked as LANG is)
``sh run``, ``python run``    run there, with the tools of this environment and a store of its own; must exit 0
``sh run exit=N``             the same, must exit N
``sh run docker``             the same, where an engine of containers answers, on the images of tests/images
``toml``, ``json``            must parse, and be a Job where it has an entry point
``python``                    must compile
``sh``                        each ``make`` target and each ``cloudtrain`` command line must exist; nothing is run
``text``                      free
``text output``               all that the block run before printed; `…` stands for what differs, or for whole lines

``example=NAME`` marks a block that a test of its own compares with the code.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Block, blocks, commands, environment, page, prose, section, table
from rows import for_each

from cloudtrain import cli, errors
from cloudtrain.cli.key_value import first_spelling
from cloudtrain.cli.output import Screen
from cloudtrain.job.job import Job, anchored
from cloudtrain.settings.settings import Settings
from cloudtrain.validate import toml_loads

GENERATED = {"docs/providers.md"}
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        {p.relative_to(ROOT).as_posix() for folder in ("docs", "docs/recipes") for p in (ROOT / folder).glob("*.md")}
        - GENERATED
    ),
]
CHECKED = {"sh", "python", "toml", "json", "text"}
RUN = {"sh", "python"}
SECONDS = 240


# ------------------------------------------------------------------------------------------------------------- reading


# ---------------------------------------------------------------------------------------------------------- every block


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is_and_is_right(name: str, tmp_path: Path) -> None:
    ran = False
    for block in blocks(name):
        assert block.language in CHECKED, f"{block.where}: a block needs one of {', '.join(sorted(CHECKED))}"
        known = all(
            word in ("run", "docker", "output") or word.startswith(("file=", "exit=", "example="))
            for word in block.words
        )
        assert known, f"{block.where}: {' '.join(block.words)}"
        assert not block.run or block.language in RUN, f"{block.where}: {block.language} cannot be run"
        assert not block.output or ran, f"{block.where}: output of what?"
        ran = block.run
        try:
            check(block, tmp_path)
        except (errors.CloudtrainError, ValueError, SyntaxError) as exc:
            pytest.fail(f"{block.where}: {exc}")


IN_CI = {
    *(f"docs/{name}.md" for name in ("docker", "rehearse", "runtime", "serving", "survival", "sweeps")),
    *(f"docs/recipes/{name}.md" for name in ("mlflow", "streaming", "tensorboard", "wandb")),
}
"""Pages whose jobs import torch on several ranks, or start containers. CI runs them in its slice of the proof."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    docker = [pytest.mark.docker] if any("docker" in block.words for block in blocks(name)) else []
    return [*docker, pytest.mark.proof] if name in IN_CI else docker


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks_of(name))
        for name in PAGES
        if name != "README.md" and any(block.run for block in blocks(name))  # that one: test_first_time_user.py
    ],
)
def test_what_a_page_tells_to_run_runs(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, shell_path: str
) -> None:
    folder, home = tmp_path / "page", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    if any("docker" in block.words for block in blocks(name)):
        request.getfixturevalue("images")("torch")
    printed = ""
    for block in blocks(name):
        if block.output:
            if not printed_as(block.text).fullmatch(printed):
                pytest.fail(f"{block.where}: it printed\n{printed}", pytrace=False)
        elif file := block.value("file"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(block.text, encoding="utf-8")
        elif block.run:
            command = ["sh", "-e"] if block.language == "sh" else [sys.executable, "-"]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**environment(home), "PATH": shell_path},
                input=block.text,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            wanted = int(block.value("exit") or 0)
            assert done.returncode == wanted, f"{block.where}: exit {done.returncode}, not {wanted}\n{done.stdout}"
            printed = done.stdout


@pytest.mark.slow
@pytest.mark.proof
def test_the_provider_of_the_page_passes_the_whole_suite(tmp_path: Path) -> None:
    for block in blocks("docs/extending.md"):
        if (file := block.value("file")) in ("spool.py", "nas.py", "test_spool.py", "pyproject.toml"):
            (tmp_path / file).write_text(block.text, encoding="utf-8")
    install = "pip install --quiet --no-deps --no-build-isolation --target site ."
    done = subprocess.run(
        ["sh", "-ec", f"{install}; PYTHONPATH=site python -m pytest -q test_spool.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 130
    assert "skipped" not in done.stdout


def printed_as(text: str) -> re.Pattern[str]:
    """Return the pattern of a page's output. `…` alone on a line matches any lines; within a line, any text."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "…" else ".*?".join(map(re.escape, line.split("…"))) + r"\n"
        for line in text.splitlines()
    ]
    return re.compile("".join(lines))


PLAIN = {"commas": 1.0, "relative": 0.03, "long": 0.05}
"""Most of each: commas and semicolons a sentence, relative words a word, sentences of more than 30 words. The pages of
uv, httpx, dstack and FastAPI lie below these bars."""


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose, without code, tables, headings and lists of links."""
    text = re.sub(r"\A---\n.*?\n---\n|```.*?```|<[^>]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        if not paragraph.lstrip().startswith(("#", "|", "!!!", ">")):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if len(re.findall(r"[A-Za-z'-]+", sentence)) >= 4:
                    yield sentence


def test_the_pages_are_in_plain_english() -> None:
    made = {"docs/json.md", "docs/first-run.md", "docs/portability.md"}
    found = [each for name in PAGES if name not in made for each in _sentences((ROOT / name).read_text())]
    words = [re.findall(r"[A-Za-z'-]+", sentence) for sentence in found]
    relative = re.compile(r"\b(which|that|whose|what|whoever|where|as)\b", re.IGNORECASE)
    figures = {
        "commas": sum(map(len, (re.findall("[,;]", sentence) for sentence in found))) / len(found),
        "relative": sum(len(relative.findall(each)) for each in found) / sum(map(len, words)),
        "long": sum(len(each) > 30 for each in words) / len(found),
    }
    assert len(found) > 2000
    assert all(figures[name] <= PLAIN[name] for name in PLAIN), figures


def test_output_is_compared_line_by_line() -> None:
    said = printed_as("one\n…\nstep … loss 1\n")
    assert said.fullmatch("one\nx\ny\nstep 3 loss 1\n")
    assert said.fullmatch("one\nstep 3 loss 1\n")
    assert not said.fullmatch("one\nstep 3 loss 1\nmore\n")
    assert not said.fullmatch("one\nstep 3\n loss 1\n")


def check(block: Block, folder: Path) -> None:
    """Raise for a block that is wrong, as far as possible without running it."""
    if block.language == "python":
        compile(block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    elif block.language == "sh":
        for words in commands(block.text):
            check_command(words)
    elif block.language in ("toml", "json"):
        toml = block.language == "toml"
        data = toml_loads(block.text, where=block.where) if toml else json.loads(block.text)
        if block.value("file") == "cloudtrain.toml":
            (folder / "cloudtrain.toml").write_text(block.text, encoding="utf-8")
            Settings.load(environ={}, cwd=folder).make_provider()
        elif "entry_point" in data or "entry_point" in data.get("source", {}):
            Job.from_dict(anchored(data, folder))


# ------------------------------------------------------------------------------------------------------- command lines


def check_command(words: list[str]) -> None:
    """Raise `SpecError` or ValueError for a make target or a cloudtrain command that does not exist."""
    if words[0] == "make":
        targets = set(re.findall(r"(?m)^([a-z-]+):", page("Makefile")))
        for word in words[1:]:
            if "=" not in word and not word.startswith("-") and word not in targets:
                raise ValueError(f"the Makefile has no target {word}")
    elif words[0] == "cloudtrain":
        tokens, args = cli.split(words[1:])
        cli.parse(tokens, args, Screen(io.StringIO(), io.StringIO()))


@pytest.mark.costly
@for_each("name", PAGES)
def test_commands_named_in_the_text_exist(name: str) -> None:
    """Check spans such as `make demo`. Of `cloudtrain VERB`, which a sentence may shorten, check the verb and its
    flags."""
    for span in re.findall(r"`((?:make|cloudtrain) [^`]+)`", prose(name)):
        words = span.split()
        if words[0] == "make":
            check_command(words)
        elif words[1].isalpha() and words[1].islower():
            assert words[1] in {*cli.VERBS, "help"}, f"{name}: {span}"
            if words[1] == "help":
                continue
            given = {word.partition("=")[0] for word in cli.split(words[2:])[0] if word.startswith("-")}
            flags = {first_spelling(word) for word in given}
            known = {name for item in cli.make_app()[words[1]].assemble_argument_collection() for name in item.names}
            assert flags <= known | {"--help"}, f"{name}: {span}"


# --------------------------------------------------------------------------------------------------------------- links


@for_each("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{name}: {broken}"


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --------------------------------------------------------------------------------------------- tables against the code


def picture() -> dict[str, list[str]]:
    """Return the modules that the design page's picture names, by package: each as often as it stands there."""
    found: dict[str, list[str]] = {}
    package = ""
    for line in page("docs/design.md").partition("Lowest first:")[2].split("```")[1].splitlines()[1:]:
        package = line[3:16].strip() or package
        parts = re.sub(r"^[a-z]+ {2,}", "", line[17:].strip()).split(" · ")
        found.setdefault(package, []).extend(name for part in parts for name in part.partition(":")[0].split(", "))
    return found


def test_the_design_names_every_module() -> None:
    package = ROOT / "cloudtrain"
    holding_code = {"cli/__init__", "engine/__init__", "runtime/__init__"}
    wanted: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        name = path.relative_to(package).with_suffix("").as_posix()
        if path.stem != "__init__" or name in holding_code:
            wanted.setdefault(name.partition("/")[0], set()).add(path.stem)
    wanted["providers"] |= {path.name for path in (package / "providers").iterdir() if (path / "__init__.py").is_file()}
    drawn = picture()
    for name in wanted:
        if (package / name).is_dir():
            assert sorted(drawn[name]) == sorted(wanted[name]), name


def test_the_modules_that_the_design_refers_to_exist() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", page("docs/design.md"))
    package = ROOT / "cloudtrain"
    assert named
    assert not [name for name in named if not (ROOT / name).is_file() and not any(package.rglob(name))]


def codes() -> set[int]:
    """Return every exit code."""
    base = errors.CloudtrainError
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, base)]
    return {0, cli.EXIT_DETACHED, *errors.EXIT_CODES.values(), *(kind.exit_code for kind in kinds)}


def test_the_exit_codes_are_those_of_the_errors() -> None:
    assert [int(row[0]) for row in table(section("docs/cli.md", "Exit codes"))] == sorted(codes())


def test_each_category_stands_at_its_exit_code() -> None:
    told = {
        category: int(code)
        for code, categories, *_ in table(section("docs/cli.md", "Exit codes"))
        for category in re.findall(r"`(\w+)`", categories)
    }
    assert told == errors.EXIT_CODES


def test_the_command_line_page_has_every_verb_and_no_other() -> None:
    rows = [[f"`cloudtrain {name} {verb.usage}`", verb.help] for name, verb in cli.VERBS.items()]
    first = section("docs/cli.md", "Verbs").partition("\nEach verb")[0]
    assert table(first) == [[cell.replace("|", "\\|") for cell in row] for row in rows]


@pytest.mark.costly
def test_the_variables_of_a_script_are_those_that_a_node_sets() -> None:
    pattern = r"\bCLOUDTRAIN_(?:[A-Z]+_?)+"
    ours = variables() - {"CLOUDTRAIN_WORKER"}  # removed before the script's first line
    assert set(re.findall(pattern, page("docs/script.md"))) == ours
    told = {re.sub(r"(?<=_INPUT_).+", "", name) for name in re.findall(pattern, page("README.md"))}  # of any channel
    assert told, "a script of the README uses some"
    assert told <= ours, told - ours


def variables() -> set[str]:
    """Return every CLOUDTRAIN_* variable that the runtime writes into a table of its own."""
    keys: list[ast.expr | None] = []
    for path in (ROOT / "cloudtrain" / "runtime").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keys += node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []
    starts = [key.values[0] if isinstance(key, ast.JoinedStr) else key for key in keys]
    names = {str(start.value) for start in starts if isinstance(start, ast.Constant)}
    return {name for name in names if name.startswith("CLOUDTRAIN_")}


@pytest.mark.slow
def test_the_example_of_a_result_has_the_shape_of_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('x')\n")
    command = ["cloudtrain", "submit", "train.py", "--max-runtime", "5m", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 1, done.stderr
    [example] = [block.text for block in blocks("docs/cli.md") if "example=result" in block.words]
    assert shape(json.loads(example)) == shape(
        {**json.loads(done.stdout), "checkpoint": {"name": "", "step": 0, "committed": ""}}
    )


def shape(value: Any) -> Any:
    """Return the names at every depth; of a list, those of its first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None
