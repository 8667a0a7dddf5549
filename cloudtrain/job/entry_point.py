"""Find the script of a job, the file or module of its entry point, and check its syntax. Runs nothing."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from ..errors import SpecError, StorageError
from ..validate import did_you_mean
from .job import Job, Source
from .shipped_files import relative_below

FIELD = "source.entry_point"
KEEPS_BATCH = re.compile(
    rb"PLANNED_WORLD_SIZE|planned_world_size|\baccumulation_steps\(|\bruntime\.batch_size\("
    rb"|add_argument\(\s*[\"']--global-batch"
)
"""Uses of the planned number of ranks, or of a flag for the global batch, which the script splits."""
LISTED = 3
"""Most scripts that a hint names."""
_ZIP_END = b"PK\5\6"
"""Begins the last record of a zip file."""
USUAL = ("main.py", "train.py", "__main__.py")
"""Usual names of a folder's script."""
NEWER: tuple[tuple[tuple[int, int], re.Pattern[str]], ...] = (
    ((3, 11), re.compile(r"(?m)except\s*\*|\[.*\*\w.*\]|\*\w+\s*:\s*\*")),
    (
        (3, 12),
        re.compile(r"(?m)f-string|\b(?:[fF][rR]?|[rR][fF])['\"]|^\s*type\s+\w+|^\s*(async\s+)?(def|class)\s+\w+\s*\["),
    ),
    ((3, 13), re.compile(r"(?m)^\s*(type|def|class|async def)\b[^\n]*\[[^\]]*=")),
    ((3, 14), re.compile(r"(?m)\b(?:[tT][rR]?|[rR][tT])['\"]|^\s*except\b[^(:]*,|multiple exception types")),
    ((3, 15), re.compile(r"(?m)^\s*lazy\s+(import|from)\b|\[\s*\*\*?\w|\{\s*\*\*?\w")),
)
"""Python versions and the syntax that each introduced. A node may have a newer Python than this machine."""


def resolve(source: Source, *, cwd: Path) -> tuple[Path, str]:
    """Return the folder that ships and the entry point in it: posix relative, ``-m pkg.mod`` unchanged, or ``""``."""
    here = os.path.realpath(cwd)
    root = here
    if source.path is not None:
        root = os.path.realpath(os.path.join(here, source.path))
        if not os.path.isdir(root):
            raise SpecError(f"{source.path!r} is not a folder", field="source.path", hint=near(root))
    if source.module is not None:
        _module_file(root, source.module)
        return Path(root), source.entry_point
    if not source.entry_point:
        return Path(root), ""
    if source.path is not None:
        return Path(root), _script_below(root, here, source.entry_point)
    script = _script(os.path.join(here, source.entry_point), source.entry_point)
    inner = relative_below(script, here)
    return (Path(here), inner) if inner else (Path(script).parent, os.path.basename(script))


def check_keeps_batch(job: Job, files: Iterable[Path]) -> None:
    """Raise `SpecError` if neither the ``files`` that ship nor the job's arguments keep a global batch.

    With fewer nodes, such a job would have a smaller global batch.
    """
    if job.launcher != "torchrun":
        why = "fewer nodes need the launcher torchrun: cloudtrain does not know the ranks of another one"
        raise SpecError(why, field="resources.min_instance_count", hint="leave out launcher, or ask for one number")
    texts = [*job.args, *job.env.values(), *map(str, job.hyperparameters.values())]
    if any(KEEPS_BATCH.search(text.encode()) for text in texts):
        return
    for path in files:
        with contextlib.suppress(OSError):
            if path.suffix in (".py", ".sh") and KEEPS_BATCH.search(path.read_bytes()):
                return
    why = "no script uses the planned number of ranks or a global batch: fewer nodes would change the batch"
    how = "accumulate runtime.accumulation_steps() passes a step, or read CLOUDTRAIN_PLANNED_WORLD_SIZE"
    raise SpecError(why, field="resources.min_instance_count", hint=how)


def check_script(root: Path, entry_point: str) -> None:
    """Raise `SpecError` for a script that no Python can parse; it is compiled, never run.

    A script with syntax that is newer than this Python passes, as does a zip file, which Python runs too.
    """
    module = entry_point.removeprefix("-m ").strip() if entry_point.startswith("-m ") else ""
    path = _module_file(str(root), module) if module else os.path.join(root, entry_point)
    name = os.path.relpath(path, root).replace(os.sep, "/")
    if name.endswith(".pyc"):
        return
    try:
        source = Path(path).read_bytes()
        if _ZIP_END in source:
            from zipfile import is_zipfile  # it loads every kind of compression

            if is_zipfile(path):
                return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    except OSError as exc:
        raise StorageError(f"cannot read {name}: {exc.strerror or exc}") from None
    except SyntaxError as exc:
        line = (exc.text or "").strip()
        if any(sys.version_info < version and syntax.search(f"{exc.msg}\n{line}") for version, syntax in NEWER):
            return
        where = f"{name}:{exc.lineno}" if exc.lineno else name
        raise SpecError(f"{where}: {exc.msg}", field=FIELD, hint=f"fix this line: {line}" if line else "") from None
    except ValueError:
        raise SpecError(f"{name} is not a Python script: it holds NUL bytes", field=FIELD) from None
    except (RecursionError, MemoryError):
        return


def near(path: str) -> str:
    """Return a hint: the existing file or folder with a name like ``path``'s."""
    try:
        return did_you_mean(os.path.basename(path), sorted(os.listdir(os.path.dirname(path))))
    except OSError:
        return ""


def _script(path: str, given: str) -> str:
    """Return ``path`` with its folder resolved but not the script itself, which may be a link that ships as one."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        raise SpecError(f"{given!r} is a folder, not a script", field=FIELD, hint=_scripts_in(path, given))
    if not os.path.isfile(path):
        raise SpecError(f"{given!r} does not exist", field=FIELD, hint=near(path))
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _scripts_in(folder: str, given: str) -> str:
    """Return a hint that names the scripts of a folder, the usual ones first."""
    try:
        found = {name for name in os.listdir(folder) if name.endswith(".py") and name != "__init__.py"}
    except OSError:
        return ""
    if not found:
        return "name the script in it; there is no .py file directly in this folder"
    names = [*(name for name in USUAL if name in found), *sorted(found.difference(USUAL))][:LISTED]
    return f"name the script, such as {', '.join(os.path.normpath(os.path.join(given, name)) for name in names)}"


def _script_below(root: str, here: str, given: str) -> str:
    candidates = [os.path.join(root, given), os.path.join(here, given)]
    found = [path for path in candidates if os.path.isfile(path)]
    for path in found:
        if inner := relative_below(_script(path, given), root):
            return inner
    if found:
        raise SpecError(f"{given!r} lies outside of {root}, the folder that ships", field=FIELD)
    _script(candidates[0], given)
    raise AssertionError("unreachable")


def _module_file(root: str, module: str) -> str:
    """Return the file that ``python -m`` runs. Raises `SpecError` if there is none."""
    base = os.path.join(root, *module.split("."))
    for path in (f"{base}.py", os.path.join(base, "__main__.py")):
        if os.path.isfile(path):
            return path
    inner = module.replace(".", "/")
    why = f"no module {module} below {root}: neither {inner}.py nor {inner}/__main__.py"
    hint = near(f"{base}.py")
    if found := sorted(Path(root).glob(f"*/{inner}.py")):
        folder = os.path.relpath(os.path.join(root, found[0].relative_to(root).parts[0]))
        hint = f"let {folder} ship alone: --source-dir {folder} -m {module}"
    raise SpecError(why, field=FIELD, hint=hint)
