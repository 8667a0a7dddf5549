"""The tree: which files below a folder ship, and by which rule the others do not.

In a git checkout git lists the files (tracked, modified, and untracked but not ignored). Elsewhere pathspec's
``GitIgnoreSpec`` reads the ``.gitignore`` files. Above both stand the built-in rules, then ``source.exclude``, then
``.cloudtrainignore``. Its ``!a/b`` brings back what git ignores, even inside a folder that is otherwise left out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SpecError, StorageError
from ..storage.local_disk import TEMP
from ..storage.timings import CLIENT_TIMINGS
from .ignore import Rule, Rules
from .own_files import PULL_STATE, pulled_files, reason

IGNORE = ".cloudtrainignore"
_NEVER = frozenset({
    ".DS_Store", ".cloudtrain", ".git", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", PULL_STATE,
    "__pycache__", "node_modules",
})  # fmt: skip


class ShippedFile(NamedTuple):
    """A file or link that ships: bundle path, path on disk, size in bytes, st_mode, target of a link."""

    path: str
    disk: str
    size: int
    mode: int
    link: str | None


class _Folder(NamedTuple):
    """A folder to list: its place on disk, its bundle path with ``/`` (``""`` for the root), and the rules in it.

    ``listed`` is git's own list; without one ``ignored`` are the rules of the ``.gitignore`` files. ``own`` are those
    of the `IGNORE` files. ``closed`` is the rule that excludes all of the folder but what a ``!a/b`` names.
    """

    disk: str
    path: str
    listed: _Listed | None
    ignored: Rules
    own: Rules
    closed: str | None

    def default(self, path: str) -> str | None:
        """Return the rule by which git, or the ignore files that it reads, leave ``path`` out."""
        if self.closed:
            return self.closed
        if self.listed:
            return self.listed.rule(path)
        rule = self.ignored.match(path)
        return rule.name if rule and not rule.negated else None


class Walk:
    """Goes through folders and sorts every file into ``entries`` (ships) and ``excluded`` (path, rule)."""

    def __init__(
        self, *, never: frozenset[str], exclude: Rules, git: bool, outputs: frozenset[tuple[int, int]]
    ) -> None:
        self.entries: list[ShippedFile] = []
        self.excluded: list[tuple[str, str]] = []
        self.named: set[str] = set()
        self.warnings: list[str] = []
        self.commit: dict[str, Any] | None = None
        self._never, self._exclude, self._git, self._outputs = never, exclude, git, outputs
        self._pulled: set[str] = set()
        self._moot: Rule | None = None
        """The rule of ``exclude`` that matches a whole dependency, which was asked for by name."""

    def add(self, folder: str, prefix: str) -> None:
        """Sort all that lies in ``folder``, which ships below ``prefix``."""
        self._moot = self._exclude.match(prefix) if prefix else None
        stack = [self._enter(_Folder(folder, prefix, None, Rules(), Rules(), None))]
        while stack:
            here = stack.pop()
            with tree_errors(here.path or here.disk), os.scandir(here.disk) as found:
                entries = list(found)
            stack.extend(self._list(here, entries, top=here.path == prefix))

    def _list(self, here: _Folder, entries: list[os.DirEntry[str]], *, top: bool) -> Iterator[_Folder]:
        names = {entry.name: entry for entry in entries}
        if not top:
            if marker := _marker(here.disk, names):
                self.excluded.append((here.path, marker))
                return
            if not here.closed:
                here = self._nested(here, names)
        if PULL_STATE in names:
            with tree_errors(here.path + PULL_STATE):
                self._pulled |= {here.path + path for path in pulled_files(names[PULL_STATE].path)}
        if here.listed is None and ".gitignore" in names:
            here = here._replace(ignored=here.ignored.plus(here.path, _read(here.disk, ".gitignore", here.path)))
        if IGNORE in names:
            here = here._replace(own=here.own.plus(here.path, _read(here.disk, IGNORE, here.path)))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._folder(here, entry)
            else:
                self._file(here, entry)

    def _folder(self, here: _Folder, entry: os.DirEntry[str]) -> Iterator[_Folder]:
        path = here.path + entry.name + "/"
        rule = _built_in(entry.name) or ("built-in: never shipped" if entry.path in self._never else "")
        if rule:
            self.excluded.append((path, rule))
            return
        closed = self._own(path, here.own)
        if closed is None:
            closed = here.default(path)
        if not closed or here.own.opens(path) or self._exclude.opens(path):
            yield here._replace(disk=entry.path, path=path, closed=closed)
        else:
            self.excluded.append((path, closed))

    def _file(self, here: _Folder, entry: os.DirEntry[str]) -> None:
        path, link = here.path + entry.name, entry.is_symlink()
        rule = _built_in(entry.name)
        if not rule and not link and not entry.is_file(follow_symlinks=False):
            rule = "built-in: not a regular file"
        verdict = rule or self._own(path, here.own)
        if verdict is None:
            verdict = here.default(path)
            if not verdict and entry.name.endswith(".ipynb"):  # it changes whenever it runs, and with it the digest
                verdict = f"built-in: notebook; !{entry.name} in {IGNORE} ships it"
        if verdict:
            self.excluded.append((path, verdict))
            return
        _check_name(path)
        with tree_errors(path):
            status = entry.stat(follow_symlinks=False)
            target = os.readlink(entry.path).replace(os.sep, "/") if link else None
        _check_name(target or "")
        if (status.st_dev, status.st_ino) in self._outputs:
            self.excluded.append((path, "built-in: this command writes to it"))
            return
        if not link and path not in self.named:
            with tree_errors(path):
                why = "cloudtrain pull wrote it" if path in self._pulled else reason(entry.path, status.st_size)
            if why:
                self.excluded.append((path, f"built-in: {why}"))
                return
        self.entries.append(ShippedFile(path, entry.path, 0 if link else status.st_size, status.st_mode, target))

    def _own(self, path: str, own: Rules) -> str | None:
        """Return the rule of cloudtrain's ignore files that excludes ``path``, ``""`` for ships, None for no rule."""
        rule = self._exclude.match(path)
        if rule is None or rule == self._moot:
            rule = own.match(path)
        if rule is None:
            return None
        if rule.negated and f"/{path}".endswith("/" + rule.text[1:].lstrip("/")):
            self.named.add(path)
        return "" if rule.negated else rule.name

    def _nested(self, here: _Folder, names: dict[str, os.DirEntry[str]]) -> _Folder:
        """Ask git again in a repository inside another, where its view of the outer one ends."""
        if ".git" in names and _is_repository(here.disk):
            return self._enter(here)
        if here.listed and here.path[len(here.listed.at) :].rstrip("/") in here.listed.files:
            self.warnings.append(f"submodule {here.path} is not checked out (git submodule update --init)")
        return here

    def _enter(self, here: _Folder) -> _Folder:
        """Return the folder with git's list, or with the ignore files that apply to it from above."""
        here = here._replace(listed=None, ignored=Rules())
        top = _repository(here.disk)
        if top and self._git:
            try:
                listed, commit = _ask_git(here.disk, top, here.path)
            except _GitError as exc:
                self.warnings.append(f"git did not answer for {here.disk} ({exc}); used its ignore files alone")
            else:
                self.commit = commit if here.path == "" else self.commit
                if not listed:
                    self.warnings.append(f"git ignores {here.disk} itself; used the ignore files below it alone")
                return here._replace(listed=listed)
        return here._replace(ignored=_above(here, top)) if top else here


def _built_in(name: str) -> str:
    if name in _NEVER or name.endswith(".pyc"):
        return f"built-in: {name if name in _NEVER else '*.pyc'}"
    return "built-in: unfinished file of cloudtrain" if name.startswith(TEMP) else ""


def _marker(folder: str, names: dict[str, os.DirEntry[str]]) -> str:
    if "pyvenv.cfg" in names:
        return "built-in: virtual environment (pyvenv.cfg)"
    if PULL_STATE in names and [*_read(folder, ".gitignore").values()] == ["*", ""]:  # pull made the folder
        return "built-in: cloudtrain pull wrote it"
    if ".cloudtrain" in names and names[".cloudtrain"].is_file(follow_symlinks=False):
        return "built-in: cloudtrain store"
    return ""


# ------------------------------------------------------------------------------------------------- what git would track


class _Listed(NamedTuple):
    """A folder as git lists it. Paths in it are relative to the folder, whose bundle path is ``at``."""

    at: str
    files: frozenset[str]
    ignored: dict[str, str]

    def rule(self, path: str) -> str | None:
        path = path[len(self.at) :]
        if path.endswith("/"):
            return self.ignored.get(path)
        return None if path in self.files else self.ignored.get(path, "git: not listed")


def _above(here: _Folder, top: str) -> Rules:
    """Return the rules of the repository ``top`` above a folder. Where they exclude it, it ships by its own alone."""
    names = relative_below(here.disk, top).split("/") if here.disk != top else []
    rules = Rules().plus(here.path, _read(top, ".git/info/exclude"), above="".join(f"{name}/" for name in names))
    for depth in range(len(names)):
        lines = _read(top, "/".join([*names[:depth], ".gitignore"]))
        rules = rules.plus(here.path, lines, above="/".join(names[depth:]) + "/")
    rule = rules.match(here.path) if names else None
    return Rules() if rule and not rule.negated else rules


def _read(folder: str, name: str, prefix: str = "") -> dict[str, str]:
    """Return the lines of an ignore file by their ``file:line:pattern``; none for a file that is not there."""
    try:
        text = Path(folder, name).read_text("utf-8-sig", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return {}
    except OSError as exc:
        raise StorageError(f"cannot read {prefix}{name}: {exc.strerror}") from None
    lines = (line.rstrip("\r") for line in text.split("\n"))
    return {f"{prefix}{name}:{i}:{line.rstrip()}": line for i, line in enumerate(lines, 1)}


def _is_repository(folder: str) -> bool:
    git = os.path.join(folder, ".git")
    return os.path.isfile(git) or os.path.exists(os.path.join(git, "HEAD"))


def _repository(folder: str) -> str | None:
    """The nearest folder, ``folder`` or above, that is the top of a git work tree."""
    while not _is_repository(folder):
        if os.path.dirname(folder) == folder:
            return None
        folder = os.path.dirname(folder)
    return folder


class _GitError(Exception):
    """Git is absent, broken, too old or refuses the repository."""


def _ask_git(folder: str, top: str, at: str) -> tuple[_Listed | None, dict[str, Any] | None]:
    """Git's list of ``folder`` and the state of its commit; (None, None) when the folder itself is ignored."""
    status = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignored=matching", "--", ".")
    tracked = _git(folder, "ls-files", "-z", "--cached")
    commit, untracked, ignored = _parse_status(_git(folder, *status))
    base = relative_below(folder, top) + "/" if folder != top else ""
    if any(base.startswith(path) for path in ignored):
        return None, None
    if not all(path.startswith(base) for path in (*untracked, *ignored)):
        raise _GitError(f"it reports another top folder of the repository than {top}")
    files = frozenset([*tracked, *(path[len(base) :] for path in untracked)])
    rules = _git_rules(folder, [path[len(base) :] for path in ignored])
    return _Listed(at, files, rules), commit


def _parse_status(fields: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Commit, untracked and ignored paths (relative to the top) of ``git status --porcelain=v2 -z``."""
    commit: dict[str, Any] = {"commit": None, "branch": None, "dirty": False}
    untracked, ignored = [], []
    rest = iter(fields)
    for item in rest:
        kind, _, value = item.partition(" ")
        if kind == "!":
            ignored.append(value)
        elif kind != "#":
            commit["dirty"] = True
            if kind == "?":
                untracked.append(value)
            elif kind == "2":
                next(rest)  # the old name of a renamed file
        elif value.startswith("branch.oid ") and not value.endswith(" (initial)"):
            commit["commit"] = value.split()[1]
        elif value.startswith("branch.head ") and not value.endswith(" (detached)"):
            commit["branch"] = value.removeprefix("branch.head ")
    return commit, untracked, ignored


def _git_rules(folder: str, ignored: list[str]) -> dict[str, str]:
    """``file:line:pattern`` for each ignored path; folders keep their trailing ``/``."""
    unknown = {path.rstrip("/"): path for path in ignored if not _built_in(path.rstrip("/").rpartition("/")[2])}
    rules = dict.fromkeys(ignored, "git: ignored")
    if unknown:
        question = os.fsencode("\0".join(unknown))
        answer = iter(_git(folder, "check-ignore", "-v", "-z", "--stdin", stdin=question))
        for source, line, pattern, path in zip(answer, answer, answer, answer, strict=False):
            if path in unknown:
                rules[unknown[path]] = f"{source}:{line}:{pattern}"
    return rules


def _git(folder: str, *arguments: str, stdin: bytes = b"") -> list[str]:
    """Return the NUL-ended fields that git prints. With ``stdin``, exit code 1 is an answer too: nothing matched."""
    # A hook or an outer git may have left its own repository in the environment; fsmonitor would start a command that
    # the repository names.
    local = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
    environ = {key: value for key, value in os.environ.items() if key not in local}
    command = ["git", "-C", folder, "-c", "core.fsmonitor=false", *arguments]
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, timeout=CLIENT_TIMINGS.git, env=environ, check=False
        )
    except OSError as exc:
        raise _GitError(f"cannot start git: {exc.strerror}") from None
    except subprocess.TimeoutExpired:
        raise _GitError(f"no answer in {CLIENT_TIMINGS.git:.0f} s") from None
    if done.returncode > 1 or (done.returncode and not stdin):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _GitError(lines[0] if lines else f"exit {done.returncode}")
    return os.fsdecode(done.stdout).split("\0")[:-1]


# ----------------------------------------------------------------------------------------------------- paths and errors


def relative_below(path: str, folder: str) -> str:
    """``path`` relative to ``folder``, posix; empty when it is not below it."""
    try:
        relative = os.path.relpath(path, folder).replace(os.sep, "/")
    except ValueError:  # another drive
        return ""
    return "" if relative == "." or relative.split("/")[0] == ".." else relative


@contextlib.contextmanager
def tree_errors(path: str) -> Iterator[None]:
    """Turn an `OSError` about a path of the tree into one line."""
    try:
        yield
    except OSError as exc:
        raise StorageError(f"cannot read {path!r}: {exc.strerror or exc}") from None


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{os.fsencode(path)!r} is not a UTF-8 file name", field="source", hint="rename it") from None
