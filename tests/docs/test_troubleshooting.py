"""The page on troubleshooting quotes cloudtrain's messages: the code contains each one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rows import for_each

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADING = re.compile(r"(?m)^### (.*)$")
GROUPS = (
    "Before it is sent",
    "Waiting for machines",
    "At the start, on the node",
    "While it trains",
    "At the end",
    "In CI",
)
#: Put together of several texts of the code: which these are, in order.
PARTS = {
    "rank … on node … raised …": ["rank … on node …", "… raised ……"],
    "[… the platform's log does not answer; lines come from the store: …]": [
        "the platform's log does not answer; lines come from the store: …"
    ],
}
#: Messages of other programs that the page quotes.
OTHERS = {"ncclSystemError", "ncclRemoteError", "connection refused", "CUDA out of memory"}


@cache
def texts() -> frozenset[str]:
    """Return every text of the code, with `…` for placeholders. Docstrings and patterns are in it too, which does no
    harm."""
    return frozenset(
        text for path in (ROOT / "cloudtrain").rglob("*.py") for text in _texts(ast.parse(path.read_text()))
    )


def _texts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            yield node.value if isinstance(node.value, str) else node.value.decode("utf-8", "replace")


def messages() -> list[str]:
    """Return the messages that the headings quote."""
    found = [quoted for heading in HEADING.findall(PAGE.read_text()) for quoted in re.findall(r"`([^`]+)`", heading)]
    return [text for text in found if text not in OTHERS]


def is_said(message: str) -> bool:
    """Return True if one text of the code has the message's fixed words, in order and on one line."""
    fixed = [piece for piece in message.split("…") if piece.strip(" :;,()")]
    pattern = re.compile("[^\n]{0,60}?".join(map(re.escape, fixed)))
    return bool(fixed) and any(pattern.search(text) for text in texts())


@pytest.mark.costly
@for_each("message", sorted(set(messages())))
def test_each_message_is_one_of_the_code(message: str) -> None:
    for part in PARTS.get(message, [message]):
        assert is_said(part), f"the code does not have {part!r}"


def test_what_the_code_does_not_say_is_found_out() -> None:
    assert not is_said("no machines within max_wait … hours")
    assert not is_said("… leads out of the code to …; make a copy, or exclude it")
    assert not is_said("…: …")


def test_the_page_has_its_groups_and_enough_in_each() -> None:
    sections = re.split(r"(?m)^## ", PAGE.read_text())[1:]
    assert tuple(section.partition("\n")[0] for section in sections) == GROUPS
    assert all(len(HEADING.findall(section)) >= 3 for section in sections)
    assert len(HEADING.findall(PAGE.read_text())) >= 40
