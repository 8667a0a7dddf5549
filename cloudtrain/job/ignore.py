"""Gitignore patterns: the lines of a file, and which of them decides over a path.

The ``pathspec`` package says what a single pattern matches. The rest of gitignore(5) is applied here: lines, negation,
folders, names against paths, and that the last match in the nearest file decides over a path itself (whoever walks
enters no ignored folder).

Some rare forms come out otherwise than in git: a backslash in brackets (``[\\]]``), before a slash (``a\\/b``), a slash
in brackets (``[a/]``), an unknown class (``[[:no:]]``), a path with a ``**`` folder and negated brackets, which then
match a slash (``a/**/b[!c]d``), and a path with ``**`` that is not a whole folder (``a/b**``, ``/***``): regular
asterisks, as gitignore(5) says, where git at times crosses folders.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Rule", "Rules", "parse", "parse_line"]

_BOM = b"\xef\xbb\xbf"
_END = b"\0"
"""Ends every pattern and path, and is in none: alone, pathspec's patterns match all below what they name as well."""
_NEVER = re.compile(rb"(?!)")
_UNTIL_SPACES = re.compile(rb"(?: *(?:\\.|[^ \\]|\\$))*", re.DOTALL)
_CLASSES = {  # of ASCII, without the slash; pathspec knows none
    b"[:alnum:]": b"0-9A-Za-z",
    b"[:alpha:]": b"A-Za-z",
    b"[:blank:]": b" \t",
    b"[:cntrl:]": b"\x01-\x1f\x7f",
    b"[:digit:]": b"0-9",
    b"[:graph:]": b"0-~!-.",
    b"[:lower:]": b"a-z",
    b"[:print:]": b"0-~ -.",
    b"[:punct:]": b":-@[-`{-~!-.",
    b"[:space:]": b"\t\n\r ",
    b"[:upper:]": b"A-Z",
    b"[:xdigit:]": b"0-9A-Fa-f",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One pattern line. ``origin`` is ``file:line``; ``str()`` of a rule is ``file:line:pattern``, as git prints it."""

    origin: str
    text: str
    pattern: bytes
    """Without ``!`` and without a slash at either end."""
    negated: bool
    folders_only: bool
    anchored: bool
    """For a path from the folder of the rule's file, rather than for a name in any folder below it."""

    def __str__(self) -> str:
        return f"{self.origin}:{self.text}"

    @property
    def literal(self) -> bool:
        """No wildcard in it: it names one path, or one file name."""
        return not re.search(rb"[*?\[\\]", self.pattern)

    @cached_property
    def _regex(self) -> re.Pattern[bytes]:
        return _regex(self.pattern)

    @cached_property
    def _slashes(self) -> int | None:
        """In whatever matches, unless that varies; pathspec lets ``[!a]`` match one more."""
        return None if b"**" in self.pattern.split(b"/") else self.pattern.count(b"/")

    @cached_property
    def _above(self) -> tuple[re.Pattern[bytes], ...]:
        """The folders on the way to what the pattern names."""
        names = self.pattern.split(b"/")
        count = len(names) if self.anchored and names[-1] == b"**" else len(names) - 1
        return tuple(_regex(b"/".join(names[: i + 1])) for i in range(count))

    def matches(self, path: bytes, folder: bool) -> bool:
        """Whether ``path``, relative to the folder of the rule's file, is itself meant (not a folder above it)."""
        if self.folders_only and not folder:
            return False
        if not self.anchored:
            path = path[path.rfind(b"/") + 1 :]
        elif self._slashes not in (None, path.count(b"/")):
            return False
        return self._regex.match(path + _END) is not None

    def names_below(self, folder: bytes) -> bool:
        """Whether the pattern is a path that can lie inside ``folder`` (relative as in `matches`)."""
        return any(above.match(folder + _END) for above in self._above)


@dataclass(frozen=True)
class Rules:
    """The pattern files that apply to a folder, the strongest last, each with where it lies (``""``, ``a/b/``)."""

    files: tuple[tuple[str, tuple[Rule, ...]], ...] = ()

    def plus(self, base: str, rules: tuple[Rule, ...]) -> Rules:
        return Rules((*self.files, (base, rules))) if rules else self

    def match(self, path: str, *, folder: bool) -> Rule | None:
        """The rule that decides over ``path``: the last that matches in the strongest file with any that does."""
        for base, rules in reversed(self.files):
            relative = os.fsencode(path[len(base) :])
            for rule in reversed(rules):
                if rule.matches(relative, folder):
                    return rule
        return None

    def opens(self, folder: str) -> bool:
        """Whether some ``!a/b`` names something below ``folder``, so that it is worth looking inside."""
        return any(
            rule.negated and rule.names_below(os.fsencode(folder[len(base) :]))
            for base, rules in self.files
            for rule in rules
        )


def parse(data: bytes, origin: str) -> tuple[Rule, ...]:
    """The rules of a file of patterns; ``origin`` is its name in `Rule.origin`."""
    lines = (data.removeprefix(_BOM) + b"\n").replace(b"\r\n", b"\n").split(b"\n")
    rules = (parse_line(line, f"{origin}:{i}") for i, line in enumerate(lines, 1) if not line.startswith(b"#"))
    return tuple(rule for rule in rules if rule.text)


def parse_line(line: bytes, origin: str) -> Rule:
    """The rule of one line that is neither blank nor a comment."""
    text = line[: kept.end()] if (kept := _UNTIL_SPACES.match(line)) else line
    pattern = text.removeprefix(b"!")
    path = pattern.removesuffix(b"/")
    return Rule(
        origin=origin,
        text=os.fsdecode(text),
        pattern=path.removeprefix(b"/"),
        negated=pattern != text,
        folders_only=path != pattern,
        anchored=b"/" in re.sub(rb"^/?(?:\*\*/)+", b"", path),
    )


def _regex(pattern: bytes) -> re.Pattern[bytes]:
    """What a path relative to the pattern's folder matches, once both end in `_END`."""
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern as Pattern

    if not re.fullmatch(rb"(?:\\.|[^\\])+", pattern, re.DOTALL):  # empty, or ends in a lone backslash
        return _NEVER
    if pattern.endswith(b"**") and pattern[-3:-2] in (b"", b"/"):
        pattern += b"/*"  # all in the folder; with `_END` at once, the two asterisks would be regular ones
    for name, members in _CLASSES.items():
        pattern = pattern.replace(name, members)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of re, about what looks like a set in a set
        try:
            found = Pattern(b"/" + pattern + _END).regex
            return re.compile(found.pattern, re.DOTALL) if found else _NEVER  # a folder's name may have a line break
        except (re.error, ValueError):
            return _NEVER
