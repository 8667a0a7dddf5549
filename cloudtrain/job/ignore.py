"""Ignore files: which of their rules decides over a path. `pathspec.GitIgnoreSpec` says what a pattern matches."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One line of an ignore file. ``name`` is ``file:line:pattern``, as git prints it; ``text`` is the pattern."""

    name: str
    text: str
    negated: bool


@dataclass(frozen=True)
class Rules:
    """The ignore files that apply to a folder, the strongest last. A folder's path ends with ``/``."""

    files: tuple[tuple[int, str, tuple[Rule, ...], Any, Any], ...] = ()
    """For each file: the length of its folder's path, the path from there to that folder, and its patterns."""

    def plus(self, base: str, lines: Mapping[str, str], *, above: str = "") -> Rules:
        """Add the ``lines`` (name: pattern) of a file in folder ``base``, or in the folder ``above`` levels over it."""
        if not lines:
            return self
        from pathspec import GitIgnoreSpec, PathSpec

        rules: list[Rule] = []
        files: list[Any] = []
        folders: list[Any] = []
        for name, text in lines.items():
            inside = re.sub(r"/\*\*\s*$", "/*", text)  # a/** does not leave out the folder a itself
            with warnings.catch_warnings(), contextlib.suppress(ValueError, re.error):  # git drops such a line, too
                warnings.simplefilter("ignore", FutureWarning)  # re warns of what looks like a set in a set
                found = zip(*(GitIgnoreSpec.from_lines([line]).patterns for line in (text, inside)), strict=True)
                for file, folder in found:
                    rules.append(Rule(name, text, file.include is False))
                    files.append(file)
                    folders.append(folder)
        specs = (GitIgnoreSpec(files, backend="simple"), PathSpec(folders, backend="simple"))
        return Rules((*self.files, (len(base), above, tuple(rules), *specs))) if rules else self

    def match(self, path: str) -> Rule | None:
        """Return the rule that decides over ``path``. The last match decides over a folder, as in git."""
        for cut, above, rules, files, folders in reversed(self.files):
            index: int | None = (folders if path.endswith("/") else files).check_file(above + path[cut:]).index
            if index is not None:
                rule: Rule = rules[index]
                return rule
        return None

    def opens(self, folder: str) -> bool:
        """Return whether a ``!a/b`` can match below ``folder``. A pattern without a slash opens no folder."""
        for cut, _, rules, *_ in self.files:
            inner = folder[cut:]
            for path in (rule.text[1:].strip("/") for rule in rules if rule.negated):
                start = re.split(r"[*?\[\\]", path)[0]
                deep = "**" in path or inner.count("/") <= path.count("/")
                if deep and (start.startswith(inner) or inner.startswith(start)):
                    return True
        return False
