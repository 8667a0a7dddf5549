"""Set the ranks' variables of NCCL, and read its flight recorder: the last collectives of each rank, for a hang.

The recorder writes a file a rank when a collective times out, or after a write to its pipe. `torchfrtrace` of torch
reads the folder of such files. The names are those of torch 2.13.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from .timings import TIMINGS

ENTRIES = 2000
_DUMP, _PIPE = "trace-rank-", "trigger-"
_DEBUG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
_OLDER = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""The newer name wins in torch, so it must not be set over a user's older one."""


def words(env: Mapping[str, str], dumps: Path, *, debug: bool) -> dict[str, str]:
    """Return the variables that ``env`` lacks: the recorder on, its files in ``dumps``; ``debug``: NCCL's messages."""
    ours = {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps / _DUMP),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(dumps / _PIPE),
        **(_DEBUG if debug else {}),
    }
    return {name: value for name, value in ours.items() if name not in env and _OLDER.get(name) not in env}


class Recorder:
    """The flight recorders of this node's ranks; ``folder`` is the one that `words` gave them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked: dict[str, float] = {}

    def trigger(self) -> None:
        """Ask every rank that listens for a dump. Never waits; a rank without NCCL has no pipe."""
        for pipe in self.folder.glob(f"{_PIPE}*.pipe"):
            with contextlib.suppress(OSError):
                fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(fd, b"1")
                finally:
                    os.close(fd)
                self._asked[_DUMP + pipe.stem.removeprefix(_PIPE)] = time.time()

    def answered(self) -> bool:
        """Return whether every rank that was asked has written its file since, and no file grows any more."""
        return all(self._settled(self.folder / name, asked) for name, asked in self._asked.items())

    @staticmethod
    def _settled(file: Path, asked: float) -> bool:
        try:
            written = file.stat().st_mtime
        except OSError:
            return False
        # A file system's clock lags a little behind the clock of `asked`.
        return written >= asked - 1.0 and time.time() - written >= TIMINGS.dump_settled

    def keep(self, target: Path) -> list[str]:
        """Copy the ranks' dumps into ``target``. Return their names; none if there is no dump."""
        found = sorted(path for path in self.folder.glob(f"{_DUMP}*") if path.is_file())
        if found:
            target.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copyfile(path, target / path.name)
        return [path.name for path in found]
