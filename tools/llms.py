"""``docs/llms.txt``, a list of the pages for language models: ``python tools/llms.py > docs/llms.txt``.

It has the menu of ``mkdocs.yml`` and the first sentence of each page, in the form of https://llmstxt.org.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"  - ([^:]+):$")
_PAGE = re.compile(r"      - (?:.+: )?((?:recipes/)?[\w-]+\.md)$")


def lines() -> Iterator[str]:
    """Yield the file's lines."""
    yield from ("# cloudtrain", "", f"> {_first_sentence('../README.md')}", "")
    yield "For a short guide with commands, read [skill.md](skill.md)."
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    for line in menu.splitlines():
        if section := _SECTION.match(line):
            yield from ("", f"## {section[1]}", "")
        elif page := _PAGE.match(line):
            title = re.search(r"(?m)^# (.*)$", (ROOT / "docs" / page[1]).read_text(encoding="utf-8"))
            yield f"- [{title[1] if title else page[1]}]({page[1]}): {_first_sentence(page[1])}"


def _first_sentence(page: str) -> str:
    """Return the first sentence of a page below ``docs/``, without its links."""
    text = re.sub(r"^---\n.*?\n---\n", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraphs = re.sub(r"(?m)^#.*\n", "", text).split("\n\n")
    prose = " ".join(next(part for part in paragraphs if part.strip()[:1].isalpha()).split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose))[0]
    return re.sub(":$", ".", sentence)


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
