"""Read the pages of the documentation: their fenced blocks, sections, tables and command lines."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

BIN = Path(sys.executable).parent


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; ``where`` is page:line, ``words`` are the words after the language."""

    where: str
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def run(self) -> bool:
        return "run" in self.words

    @property
    def output(self) -> bool:
        return "output" in self.words

    def value(self, name: str) -> str | None:
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), None)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    found: list[Block] = []
    fence, start, info, lines = "", 0, "", list[str]()
    for number, line in enumerate(page(name).splitlines(), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})(.*)", line)
        if mark and not fence:
            fence, start, info, lines = mark[1], number, mark[2].strip(), []
        elif mark and fence and mark[1].startswith(fence) and not mark[2].strip():
            language, *words = info.split() or [""]
            text = textwrap.dedent("\n".join(lines)) + "\n"
            found.append(Block(where=f"{name}:{start}", language=language, words=tuple(words), text=text))
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"{name}:{start}: the block is never closed"
    return found


def prose(name: str) -> str:
    """Return the page without its blocks."""
    return re.sub(r"(?ms)^\s*(`{3,}|~{3,}).*?^\s*\1\s*$", "", page(name))


def section(name: str, heading: str) -> str:
    """Return the text under ``## heading``."""
    text = page(name)
    assert f"\n## {heading}\n" in text, f"{name} has no section {heading!r}"
    return re.split(r"\n## ", text.split(f"\n## {heading}\n", 1)[1], maxsplit=1)[0]


def table(text: str) -> list[list[str]]:
    """Return the cells of the first Markdown table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def environment(home: Path) -> dict[str, str]:
    """Return a user's environment: this environment's tools first, no configuration of this machine, and no network."""
    ours = (
        r"CLOUDTRAIN_|AWS_|AZURE_|AZUREML_|ARM_|GOOGLE_|PET_|TORCHELASTIC_|XDG_|.*RANK$|.*WORLD_SIZE$|MASTER_|PYTEST_"
    )
    drop = re.compile(ours)
    env = {
        key: value for key, value in os.environ.items() if not drop.match(key) and not key.lower().endswith("_proxy")
    }
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    path = f"{BIN}{os.pathsep}{env.get('PATH', os.defpath)}"
    return {**env, **nowhere, "no_proxy": "127.0.0.1,localhost", "PATH": path, "HOME": str(home), "PIP_NO_INDEX": "1"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell text: words, without assignments, redirections and operators."""
    line = ""
    for more in text.replace("\\\n", " ").splitlines():
        line = f"{line}\n{more}" if line else more
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:
            continue  # a quotation that continues in the next line
        line = ""
        yield from _simple(tokens)
    if line:
        raise ValueError(f"no closing quotation: {line!r}")


def _simple(tokens: list[str]) -> Iterator[list[str]]:
    words: list[str] = []
    redirected = False
    for token in [*tokens, ";"]:
        if token and set(token) <= set("();|&"):
            if words:
                yield words
            words = []
        elif token and set(token) <= set("<>"):
            redirected = True
        elif redirected:
            redirected = False
        elif words or not re.match(r"[A-Za-z_]\w*=", token):
            words.append(token)
