"""Whether what a node writes to ``live/`` reaches the store, on a platform whose own agent copies it there.

The agent puts a mark beside each file that it has uploaded. An agent that stops does so without a word, so a node
watches the marks of its checkpoints. When they stay away, the node says so and uploads its files itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import CloudtrainError
from ..provider import SyncAgent
from ..values import is_mark
from .checkpoints import each, modest

__all__ = ["Uploads"]

DEAD_SECONDS = 240.0
"""An agent that has uploaded nothing of a checkpoint for so long has stopped."""
SLOW_BYTES = 20_000_000.0
"""Bytes a second of the slowest agent: a file whose upload has begun has this much more time."""
LOOK_SECONDS = 1.0
SWEEP_SECONDS = 30.0
"""While the agent is dead: how often the node looks for other files of its own to upload."""

_State = tuple[int, int]


class Uploads:
    """The uploads of one node. ``expect`` names files, ``arrived`` tells which of them are there by now.

    ``say`` prints a line.
    """

    def __init__(
        self,
        live: Path,
        agent: SyncAgent,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._live, self._agent, self._say, self._clock = live, agent, say, clock or time.monotonic
        self._lock = threading.Lock()
        self._pending: dict[str, set[Path]] = {}
        self._arrived: list[str] = []
        self._sign = self._clock()
        self._put: dict[Path, _State] = {}
        self._shown = False
        """Whether the agent has ever marked anything."""
        self._failed: set[str] = set()
        self._began = time.time()
        self._swept = self._clock()
        self.dead = False
        """Whether the agent has stopped; the node uploads its files itself."""
        self._moved: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="uploads", daemon=True)

    @property
    def temporary(self) -> str:
        """The end of the name of a file that is not whole yet: the agent leaves it alone."""
        return f".part{self._agent.ignored}"

    def start(self, moved: Callable[[], None]) -> None:
        """Begin to look; ``moved`` hears of each file that arrives."""
        self._moved = moved
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def expect(self, key: str, files: Sequence[Path]) -> None:
        """Wait for ``files``, which no longer change."""
        with self._lock:
            if not self._pending:
                self._sign = self._clock()
            self._pending[key] = set(files)

    def arrived(self) -> list[str]:
        """Return the keys whose files all arrived since the last call."""
        with self._lock:
            found, self._arrived = self._arrived, []
        return found

    @property
    def idle(self) -> bool:
        """Whether all that was expected is there, and `arrived` has told of it."""
        with self._lock:
            return not self._pending and not self._arrived

    def stored(self, path: Path) -> bool:
        """Whether the file, as it is now, is in the store; or is gone, and need not be."""
        try:
            now = _state(path)
        except OSError:
            return True
        return self._put.get(path) == now or self._marked(path, now)

    def marks(self, folder: Path) -> bool:
        """Return whether the agent has ever shown its work, in ``folder`` or elsewhere."""
        ends = (self._agent.uploading, self._agent.uploaded)
        if not self._shown:
            with contextlib.suppress(OSError):
                self._shown = any(name.endswith(ends) for name in os.listdir(folder))
        return self._shown

    def _marked(self, path: Path, state: _State) -> bool:
        """Whether the agent has uploaded the file as it is."""
        with contextlib.suppress(OSError):
            found = os.stat(f"{path}{self._agent.uploaded}").st_mtime_ns >= state[1]
            self._shown = self._shown or found
            return found
        return False

    def finish(self, seconds: float) -> None:
        """The node ends: while the agent is dead, upload what else is there, for so many seconds at most."""
        if self.dead:
            sweep = threading.Thread(target=self._sweep, name="sweep", daemon=True)
            sweep.start()
            sweep.join(seconds)

    # ------------------------------------------------------------------------------------------------------ the thread

    def _loop(self) -> None:
        modest()
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.step()
            except Exception as exc:  # noqa: BLE001  the thread must outlive any one file's trouble
                self._complain(f"{type(exc).__name__}: {exc}")

    def step(self) -> None:
        """Look for marks; upload what the agent does not."""
        with self._lock:
            pending = {key: set(files) for key, files in self._pending.items()}
        missing = {key: {path for path in files if not self.stored(path)} for key, files in pending.items()}
        came = [
            path
            for key, files in pending.items()
            for path in files - missing[key]
            if path not in self._put and path.exists()
        ]
        if came:
            self._heard()
        self._settle(missing)
        left = set[Path]().union(*missing.values())
        if left and not self.dead:
            more = self._allowance(left)
            if self._clock() - self._sign >= DEAD_SECONDS + more:
                self._die()
            elif more:
                self._moved()  # a large file takes long
        if self.dead:
            each(self._upload, sorted(left))
            self._settle({key: set() for key, files in missing.items() if files})
            if self._clock() - self._swept >= SWEEP_SECONDS:
                self._swept = self._clock()
                self._sweep()

    def _heard(self) -> None:
        """The agent has uploaded a file."""
        self._sign = self._clock()
        self._moved()
        if self.dead:
            self.dead = False
            self._say("the platform's sync uploads again; this node leaves its files to it")

    def _settle(self, missing: dict[str, set[Path]]) -> None:
        with self._lock:
            for key, left in missing.items():
                if left:
                    self._pending[key] = left
                else:
                    self._pending.pop(key, None)
                    self._arrived.append(key)

    def _allowance(self, left: set[Path]) -> float:
        """More seconds, while the agent is at work on a large file."""
        begun = [path for path in left if os.path.exists(f"{path}{self._agent.uploading}")]
        sizes = []
        for path in begun:
            with contextlib.suppress(OSError):
                sizes.append(path.stat().st_size)
        return max(sizes, default=0) / SLOW_BYTES

    def _die(self) -> None:
        self.dead = True
        waited = f"{self._clock() - self._sign:.0f} s"
        what = "this node uploads them itself" if self._agent.put else "nothing else can upload them from here"
        self._say(f"the platform's sync has stopped: it has uploaded no file of a checkpoint for {waited}; {what}")

    def _upload(self, path: Path) -> None:
        if self._agent.put is None:
            return
        try:
            state = _state(path)
            self._agent.put(path.relative_to(self._live).as_posix(), path, self._moved)
        except FileNotFoundError:
            return
        except (CloudtrainError, OSError) as exc:
            self._complain(str(exc))
        else:
            self._put[path] = state
            self._moved()

    def _complain(self, why: str) -> None:
        if why not in self._failed:
            self._failed.add(why)
            self._say(f"this node cannot upload its files: {why}")

    def _sweep(self) -> None:
        """Upload what else this node has written: logs, metrics, artifacts, records."""
        each(self._upload, [path for path in self._own() if not self.stored(path)])

    def _own(self) -> Iterator[Path]:
        """Yield what was written since this node began. What is older was restored, and is in the store.

        A merged segment bears the time of its last line, so the time of the inode's change counts.
        """
        for folder, _, names in os.walk(self._live):
            for path in (Path(folder, name) for name in names if not is_mark(name) and not name.endswith(".part")):
                with contextlib.suppress(OSError):
                    if path.stat().st_ctime >= self._began:
                        yield path


def _state(path: Path) -> _State:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
