"""A first-time user with nothing but the README: runs its commands, and keeps the terminal's output.

    python proof/first_time_user.py FOLDER  # in a clean clone and a fresh venv; writes docs/first-run.md again

Every command comes from the README. Its output is a transcript, and docs/first-run.md consists of three transcripts. A
test makes them again, and compares them without the parts that differ in each run (`normal`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests/kit"))

from pages import BIN, Block, blocks, page  # noqa: E402  the tests read pages in the same way

PAGE = "docs/first-run.md"
HOME = "/home/you/cloudtrain"
"""Stand-in on the page for the folder of the clone."""
SETUP, FIRST = "Two commands on a new machine", "Your first job"
SECONDS = 1200
"""Time limit of one command: the first one downloads torch."""


@dataclass(frozen=True)
class Typed:
    """One typed command, its output, and its exit code."""

    command: str
    output: str
    code: int

    def to_text(self) -> str:
        """Return the command as on the page."""
        end = f"(exit code {self.code})\n" if self.code else ""
        return f"$ {self.command}\n{self.output}{end}"


class Terminal:
    """A shell that keeps its folder and its environment from one command to the next, like a terminal."""

    def __init__(self, folder: Path, environ: Mapping[str, str], state: Path) -> None:
        self.folder, self.environ, self._state = folder, dict(environ), state

    def type(self, command: str) -> Typed:
        keep = f"code=$?; {{ pwd; env -0; }} > {self._state}; exit $code"
        done = subprocess.run(
            ["sh", "-c", f"{command}\n{keep}"], cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        where, _, variables = self._state.read_text().partition("\n")
        self.folder = Path(where)
        self.environ = dict(item.split("=", 1) for item in variables.split("\0") if "=" in item)
        return Typed(command, done.stdout, done.returncode)


def steps(heading: str) -> list[Block]:
    """Return the README's blocks under ``## heading``, in order."""
    wanted, here = f"## {heading}", ""
    starts = {}
    for number, line in enumerate(page("README.md").splitlines(), 1):
        here = line if line.startswith("## ") else here
        starts[number] = here
    return [block for block in blocks("README.md") if starts[int(block.where.rpartition(":")[2])] == wanted]


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell block: continued lines joined, and without comments."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if command := re.sub(r"\s+# .*", "", line).strip():
            yield command


def follow(terminal: Terminal, todo: list[Block], *, by_hand: bool = False) -> Iterator[tuple[Block, list[Typed]]]:
    """Follow the blocks, and yield each with its typed commands. With ``by_hand`` also those that change the shell,
    which no page's test runs."""
    for block in todo:
        if name := block.value("file"):
            (terminal.folder / name).write_text(block.text, encoding="utf-8")
        elif block.language == "sh" and (block.run or by_hand):
            typed = [terminal.type(command) for command in commands(block.text)]
            for one in typed:
                wanted = int(block.value("exit") or 0) if one is typed[-1] else 0
                assert one.code == wanted, f"{block.where}: exit {one.code}, not {wanted}\n{one.to_text()}"
            yield block, typed


def first_job(terminal: Terminal, *, by_hand: bool = False) -> tuple[list[Typed], list[Typed]]:
    """Follow the README's first job. Return the commands up to the results, and those from the broken row on."""
    good: list[Typed] = []
    bad: list[Typed] = []
    for block, typed in follow(terminal, steps(FIRST), by_hand=by_hand):
        (bad if bad or block.value("exit") else good).extend(typed)
    return good, bad


def set_up(terminal: Terminal) -> list[Typed]:
    """Type the first of the README's two commands, which also trains."""
    [block] = steps(SETUP)
    return [terminal.type(next(commands(block.text)))]


def terminal_of(folder: Path, state: Path, *, path: str = "") -> Terminal:
    """Return a user's own terminal, without variables that configure cloudtrain; ``path`` comes first in $PATH."""
    drop = re.compile(r"CLOUDTRAIN_|AWS_|AZURE_|GOOGLE_|PET_|TORCHELASTIC_|XDG_|.*RANK$|WORLD_SIZE$|MASTER_|PYTEST_")
    also = re.compile(r"VIRTUAL_ENV|MAKE|MFLAGS|TORCH$|CI$|GITHUB_|GITLAB_")
    environ = {key: value for key, value in os.environ.items() if not drop.match(key) and not also.match(key)}
    environ["PATH"] = os.pathsep.join(filter(None, [path, environ.get("PATH", os.defpath)]))
    return Terminal(folder, environ, state)


# ------------------------------------------------------------------------------------------------------------ the page


def readable(typed: list[Typed], clone: Path) -> str:
    """Return a transcript for the page, without this machine's folders and the package index's warnings."""
    text = "".join(one.to_text() for one in typed)
    for place in (str(clone.resolve()), str(clone)):
        text = text.replace(place, HOME)
    text = re.sub(r"/[^ \"]*/cloudtrain-[^/ ]+/[^/ ]+/code/", "/tmp/cloudtrain-…/code/", text)
    return re.sub(r"(?m)^WARNING: .*\n", "", text)


def normal(transcript: str) -> str:
    """Return the parts of a transcript that are the same in each run.

    Times, sizes, rates, ports and ids go. So do the lines of ranks other than the first to fail, which are a race.
    """
    text = re.sub(r"(?m)^\[n\d+ r(\d+)\] .*\n", lambda match: match[0] if match[1] in "03" else "", transcript)
    text = re.sub(r"(?m)^\[n\d+ r0\] (\[rank0\]|\[W|W\d+ ).*\n", "", text)
    text = re.sub(r"(?m)^.*?[~^]{2,}\s*$\n", "", text)  # below the lines of a traceback, from Python 3.11 on
    text = re.sub(r"\d{8}-\d{6}-([a-z]+)-[0-9a-f]{4}", r"RUN-\1", text)
    text = re.sub(r"\d+(\.\d+)? ([KMGT]i)?B\b", "SIZE", text)
    text = re.sub(r"(?m)^(ok +\w+: ).*", r"\1…", text)  # doctor's findings are this machine's
    text = re.sub(r", in \d+s, SIZE/s", "", text)  # only steps of a second or more show it
    return re.sub(r"\d+\.\d+(e-?\d+)?|(?<=samples_per_s )\d+", "NUMBER", text)


HEAD = """# What a first run prints

This page shows what the commands of the README print. To make the page again, run `python proof/first_time_user.py
FOLDER`. This program clones the repository into FOLDER and runs each command of the README. A test runs the commands
too, and compares the output with this page. Ids, sizes and rates differ in each run: this page has the values of one
run.

## From nothing to a trained model

On a new machine, {python}:

"""
SECOND = """
## A job of your own, to pulled checkpoints

The script is the one from the [README](../README.md#your-first-job).

"""
THIRD = """
## A failure, understood

One row of the data is broken, and rank 3 reads it. The other three ranks wait for rank 3 in a collective. They would
stay there, so cloudtrain stops them. It does not report them as the cause of the failure.

"""
TAIL = """
After `failed`, you read in this order:

1. The category. [exit-codes.md](exit-codes.md) explains it. Exit code 1 is the job's own error, so the same job will
   fail again.
2. The rank and the node.
3. The exception.
4. The file and the line in your code.
5. The traceback.
6. The commands that show you more.

Programs read the same with `--json`, under `failure` ([json.md](json.md)).
"""


def text_of(demo: str, good: str, bad: str, python: str) -> str:
    """Return the page."""
    parts = [HEAD.format(python=python), SECOND, THIRD]
    blocks = [f"```text example={name}\n{text}```\n" for name, text in zip(NAMES, (demo, good, bad), strict=True)]
    return "".join(part + block for part, block in zip(parts, blocks, strict=True)) + TAIL


NAMES = ("demo", "first-job", "failure")


def on_page() -> dict[str, str]:
    """Return the transcripts of docs/first-run.md, by name."""
    return {name: block.text for block in blocks(PAGE) if (name := block.value("example"))}


def whole(folder: Path) -> tuple[str, str, str]:
    """Make all three transcripts, from a clean clone in the new folder ``folder``."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    terminal = terminal_of(folder, folder.parent / f"{folder.name}.state")
    demo = set_up(terminal)
    assert demo[0].code == 0, demo[0].to_text()
    good, bad = first_job(terminal, by_hand=True)
    return readable(demo, folder), readable(good, folder), readable(bad, folder)


def short(folder: Path) -> tuple[str, str]:
    """Make the last two transcripts, with the tools of this environment."""
    terminal = terminal_of(folder, folder.parent / f"{folder.name}.state", path=str(BIN))
    good, bad = first_job(terminal)
    return readable(good, folder.parent), readable(bad, folder.parent)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    demo, good, bad = whole(Path(argv[0]).resolve())
    version = ".".join(map(str, sys.version_info[:2]))
    (ROOT / PAGE).write_text(text_of(demo, good, bad, f"Python {version} on Linux"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
