"""Gitignore patterns: the lines of a file, and which of them decides over a path.

What a single pattern means is the business of the ``pathspec`` package. This module applies the rest of gitignore(5):
a pattern with a slash is relative to the folder of its file and one without is for the mere name; the last match in the
nearest file decides; a rule is for the path itself (whoever walks does not enter an ignored folder).
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
"""Ends every pattern and path, and is in none: pathspec's patterns also match all that lies below what they name."""
_NEVER = re.compile(rb"(?!)")
_UNTIL_SPACES = re.compile(rb"(?: *(?:\\.|[^ \\]|\\$))*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One pattern line. ``origin`` is ``file:line``; ``str()`` of a rule is ``file:line:pattern``, as git prints it."""

    origin: str
    text: str
    pattern: bytes
    """Less ``!`` and the slashes at both ends."""
    negated: bool
    folders_only: bool
    anchored: bool
    """Relative to the folder of the rule's file, rather than for a name in any folder below it."""

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
    def _depth(self) -> int | None:
        """Slashes of each path that matches; pathspec lets ``[!a]`` be one more."""
        return None if b"**" in self.pattern.split(b"/") else self.pattern.count(b"/")

    @cached_property
    def _above(self) -> tuple[re.Pattern[bytes], ...]:
        """The folders that lead to what the pattern names."""
        names = self.pattern.split(b"/")
        return tuple(_regex(b"/".join(names[:i])) for i in range(1, len(names) + (names[-1] == b"**")))

    def matches(self, path: bytes, folder: bool) -> bool:
        """Whether ``path``, relative to the folder of the rule's file, is itself meant (not a folder above it)."""
        if self.folders_only and not folder:
            return False
        if not self.anchored:
            path = path[path.rfind(b"/") + 1 :]
        elif self._depth is not None and self._depth != path.count(b"/"):
            return False
        return self._regex.match(path + _END) is not None

    def names_below(self, folder: bytes) -> bool:
        """Whether the pattern is a path that can lie inside ``folder`` (relative as in `matches`)."""
        return self.anchored and any(above.match(folder + _END) for above in self._above)


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
    lines = enumerate(data.removeprefix(_BOM).replace(b"\r\n", b"\n").split(b"\n"), 1)
    rules = (parse_line(line, f"{origin}:{number}") for number, line in lines if not line.startswith(b"#"))
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
        anchored=b"/" in path,
    )


def _regex(pattern: bytes) -> re.Pattern[bytes]:
    """What a path relative to the pattern's folder must match, once both end in `_END`."""
    try:
        from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern as Pattern
    except ModuleNotFoundError:  # before 1.0
        from pathspec.patterns import GitWildMatchPattern as Pattern

    if not re.fullmatch(rb"(?:\\.|[^\\])+", pattern, re.DOTALL):
        return _NEVER
    inside = b"/*" if pattern.split(b"/")[-1] == b"**" else b""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of re, for what looks like a set in a set
        try:
            found = Pattern(b"/" + pattern + inside + _END).regex
        except (re.error, ValueError):
            return _NEVER
        return re.compile(found.pattern, re.DOTALL) if found else _NEVER  # "." is also a newline in a folder's name
