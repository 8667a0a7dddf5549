"""Find the newest checkpoint that a script wrote to the store by itself, below CLOUDTRAIN_CHECKPOINT_URL.

``torch.distributed.checkpoint`` writes ``.metadata`` last. So an entry with one is complete, unless a file is newer:
while an entry is written over, the old ``.metadata`` stays until the new one comes. The store is listed through fsspec,
in the Python that runs the script: a script can list where it can write. Nothing is copied.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import StorageError
from ..validate import unix_seconds
from .checkpoint_model import METADATA, Checkpoint, written_directly
from .timings import TIMINGS

_LIST = """
import json, sys
from datetime import datetime, timezone

def said(exc):
    return next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)

def refused(exc):
    while exc is not None:
        text = type(exc).__name__ + str(exc)
        answer = getattr(exc, "response", None)
        answer = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        codes = {str(getattr(exc, name, None)) for name in ("status", "status_code", "code")} | {str(answer)}
        if isinstance(exc, PermissionError) or codes & {"401", "403"} or str(exc).startswith("Forbidden"):
            return "xpired" not in text
        if "NoCredentials" in text or "DefaultCredentialsError" in text:
            return True
        exc = exc.__cause__ or exc.__context__
    return False

url = sys.argv[1]
try:
    import fsspec
    from fsspec.core import url_to_fs
    fsspec.get_filesystem_class(url.partition("://")[0])
except (ImportError, ValueError) as exc:
    print(json.dumps({"missing": str(exc)}))
    sys.exit()

def listed():
    fs, root = url_to_fs(url)
    root = root.rstrip("/")

    def changed(path, info):
        times = (info.get(key) for key in ("LastModified", "mtime", "updated", "last_modified", "created"))
        value = next((value for value in times if value is not None), None)
        if value is None:
            value = fs.modified(path)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        return value

    try:
        folders = [info["name"].rstrip("/") for info in fs.ls(root, detail=True) if info["type"] == "directory"]
    except FileNotFoundError:
        folders = []
    found = {}
    if folders:
        found.update(fs.find(root, detail=True))
    seen = {path[len(root):].strip("/").partition("/")[0] for path in found}
    for folder in folders:
        if folder != root and folder.rpartition("/")[2] not in seen:  # find leaves out what it cannot list; ls says why
            found.update((info["name"], info) for info in fs.ls(folder, detail=True))
    files = []
    for path, info in found.items():
        entry, _, below = path[len(root):].strip("/").partition("/")
        if below and info.get("type") != "directory":
            files.append([entry, below, changed(path, info)])
    return files

try:
    print(json.dumps({"files": listed()}))
except (ImportError, NotImplementedError) as exc:  # no library, or a file system without a listing
    print(json.dumps({"missing": type(exc).__name__ + ": " + said(exc)}))
except Exception as exc:
    word = "refused" if refused(exc) else "failed"
    print(json.dumps({word: type(exc).__name__ + ": " + said(exc)}))
"""

_File = tuple[str, str, float]  # the entry, the path below it, and when it last changed


class RefusedError(StorageError):
    """The store refuses the node, not because credentials expired: it took nothing of the script either, which has the
    same."""


def find_newest(
    url: str, *, python: str, environ: Mapping[str, str], say: Callable[[str], None], mounted: str = ""
) -> Checkpoint | None:
    """Return the newest complete checkpoint below ``url``; None if there is none.

    ``mounted`` is the folder that shows it, if there is one: that needs no library and no credentials. Raises
    `RefusedError` without the right to list it, `StorageError` when the store does not answer.

    Calls ``say`` for each entry that was being written over, and if ``python`` has no library to list such a store. In
    that case the script could not have written there either. Any other fault of a library is a `StorageError`.
    """
    entries: dict[str, dict[str, tuple[int, float]]] = {}
    try:
        for entry, path, changed in _listed(url, python, environ, mounted):
            entries.setdefault(entry, {})[path] = (0, changed)  # sizes are not needed here
    except ImportError as exc:
        say(f"{url} is not looked at for checkpoints: {exc}")
        return None
    whole: list[Checkpoint] = []
    for name, files in sorted(entries.items()):
        found = written_directly(url, name, files)
        if isinstance(found, str):
            say(f"checkpoint {url}/{name} is not complete ({found} is newer than its {METADATA}); skipped")
        elif found is not None:
            whole.append(found)
    return max(whole, key=lambda item: item.order, default=None)


def _listed(url: str, python: str, environ: Mapping[str, str], mounted: str) -> list[_File]:
    folder = mounted or (url.startswith("file://") and url[len("file://") :])  # as fsspec reads it: the path as it is
    for pause in (*TIMINGS.store_pauses, None):
        try:
            return list(_local(Path(folder))) if folder else _asked(url, python, environ)
        except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as exc:
            if pause is None:
                kind = RefusedError if isinstance(exc, PermissionError) else StorageError
                late = isinstance(exc, subprocess.TimeoutExpired)  # its text is the whole program
                why = f"no answer in {TIMINGS.store_list:.0f} s" if late else exc
                raise kind(f"{url} cannot be listed: {why}") from None
        time.sleep(pause)
    raise AssertionError


def _local(root: Path) -> Iterator[_File]:
    def failed(exc: OSError) -> None:
        if not isinstance(exc, FileNotFoundError):
            raise exc

    for folder, _, names in os.walk(root, onerror=failed):
        for file in (Path(folder, name) for name in names):
            entry, _, below = file.relative_to(root).as_posix().partition("/")
            try:
                changed = file.stat().st_mtime
            except FileNotFoundError:
                continue  # removed meanwhile, or a link to nothing
            if below:
                yield entry, below, changed


def _asked(url: str, python: str, environ: Mapping[str, str]) -> list[_File]:
    done = subprocess.run(
        [python, "-c", _LIST, url],
        env=dict(environ),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMINGS.store_list,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ValueError(last or f"exit code {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    for word, kind in (("missing", ImportError), ("refused", PermissionError), ("failed", ValueError)):
        if word in answer:
            raise kind(" ".join(answer[word].split()))
    return [(str(entry), str(path), unix_seconds(changed)) for entry, path, changed in answer["files"]]
