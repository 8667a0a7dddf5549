"""Check that a node's files reach the store, on a platform whose own agent copies ``live/`` there.

The agent puts a mark beside each file that it has uploaded. An agent may stop silently, so a node watches the marks of
its checkpoints. If they stay away, the node logs that and uploads its files itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import CloudtrainError
from ..provider_api.node import SyncAgent
from .checkpoints import FileState, file_state, in_parallel, modest
from .timings import TIMINGS

SLOW_BYTES = 20_000_000.0  # bytes a second of the slowest agent. A file whose upload has begun gets that much more time


class Uploads:
    """The uploads of one node. ``expect`` names files, ``arrived`` returns which of them are in the store by now.

    Only files that the agent has marked, or the node has uploaded itself, count. ``say`` prints a line.
    """

    def __init__(
        self, live: Path, agent: SyncAgent, *, say: Callable[[str], None], clock: Callable[[], float] | None = None
    ) -> None:
        self._live, self.agent, self._say, self._clock = live, agent, say, clock or time.monotonic
        self._lock = threading.Lock()
        self._pending: dict[str, set[Path]] = {}
        self._newest = ""
        self._arrived: dict[str, bool] = {}
        self._sign = self._clock()  # time at which a file last reached the store
        self._ending: float | None = None
        self._hurried = False
        self._put: dict[Path, FileState] = {}
        self._shown = False  # true if the agent has ever marked a file
        self._busy: set[Path] = set()
        self._retry: dict[Path, float] = {}
        self._failed: set[str] = set()
        self._sweeper: threading.Thread | None = None
        self._began = time.time()
        self._swept = self._clock()
        self.dead = False  # true if the agent has stopped; the node uploads its files itself
        self.given_up: list[str] = []
        """Keys whose files are not known to be in the store, and are not waited for any more."""
        self._moved: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="uploads", daemon=True)

    def start(self, moved: Callable[[], None]) -> None:
        """Begin to look; call ``moved`` for each file that arrives."""
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
            self._newest = key

    def hurry(self) -> None:
        """Upload pending files at once, beside the agent: the node may not live until it has."""
        self._hurried = True

    def end(self) -> None:
        """Note the script's end: failed uploads are waited for no longer than `Timings.agent_give_up`."""
        self._ending = self._clock()

    def arrived(self) -> dict[str, bool]:
        """Return the keys settled since the last call: True if all their files are there, False if given up."""
        with self._lock:
            found, self._arrived = self._arrived, {}
        return found

    @property
    def blind(self) -> bool:
        """Return whether the node can neither upload files nor see them arrive, as the agent has never shown that."""
        return self.agent.put is None and not self._shown

    @property
    def idle(self) -> bool:
        """Return whether all expected files are there, and `arrived` has returned them."""
        with self._lock:
            return not self._pending and not self._arrived

    def stored(self, path: Path) -> bool:
        """Return whether the file, as it is now, is in the store; or is gone, and need not be."""
        now = file_state(path)
        return now is None or self._put.get(path) == now or self._marked(path, now)

    def _marked(self, path: Path, state: FileState) -> bool:
        """Return whether the agent has uploaded the file as it is."""
        with contextlib.suppress(OSError):
            found = os.stat(f"{path}{self.agent.uploaded}").st_mtime_ns >= state[1]
            self._shown = self._shown or found
            return found
        return False

    def finish(self, seconds: float) -> None:
        """Upload the node's other files at its end, for so many seconds at most, if the agent is dead."""
        if self.dead:
            last = threading.Thread(target=self._sweep, args=(True,), name="sweep", daemon=True)
            last.start()
            end = time.monotonic() + seconds
            for thread in (last, self._sweeper):
                if thread is not None:
                    thread.join(max(0.0, end - time.monotonic()))

    def _loop(self) -> None:
        modest()
        while not self._stop.wait(TIMINGS.agent_look):
            try:
                self.step()
            except Exception as exc:  # noqa: BLE001  the thread must outlive any one file's trouble
                self._complain(f"{type(exc).__name__}: {exc}")

    def step(self) -> None:
        """Look for marks, and upload files in place of a stopped agent."""
        with self._lock:
            pending = {key: set(files) for key, files in self._pending.items()}
        missing = self._missing(pending)
        came = (path for key, files in pending.items() for path in files - missing[key] if path not in self._put)
        if any(path.exists() for path in came):
            self._heard()
        self._settle(missing)
        left = set[Path]().union(*missing.values())
        if left and not self.dead:
            more = self._allowance(left)
            if self._clock() - self._sign >= TIMINGS.agent_dead + more:
                self._die()
            elif more:
                self._moved()  # a large file takes long
        if left and (self.dead or self._hurried):
            self._bring(pending, left)
            missing = self._missing({key: files for key, files in missing.items() if files})
            self._settle(missing)
            self._give_up({key for key, files in missing.items() if files})
        if self.dead and self._clock() - self._swept >= TIMINGS.upload_sweep:
            self._swept = self._clock()
            if self._sweeper is None or not self._sweeper.is_alive():
                self._sweeper = threading.Thread(target=self._sweep, name="sweep", daemon=True)
                self._sweeper.start()

    def _missing(self, expected: dict[str, set[Path]]) -> dict[str, set[Path]]:
        return {key: {path for path in files if not self.stored(path)} for key, files in expected.items()}

    def _bring(self, pending: dict[str, set[Path]], left: set[Path]) -> None:
        """Upload missing files, the newest key's first; stop between two files for a newer key."""
        newest, now = self._newest, self._clock()
        ordered = [path for key in reversed(pending) for path in sorted(pending[key] & left)]
        due = [path for path in ordered if now >= self._retry.get(path, now)]
        in_parallel(lambda path: self._upload(path) if self._newest == newest else None, due)

    def _give_up(self, keys: set[str]) -> None:
        """Settle, after the end, the files that cannot reach the store: they are not there."""
        if not self.dead or self._ending is None or not keys:
            return
        if self._clock() - max(self._ending, self._sign) >= TIMINGS.agent_give_up:
            self._say(f"not known to be in the store: checkpoint {', '.join(sorted(keys))}")
            with self._lock:
                for key in sorted(keys & self._pending.keys()):
                    del self._pending[key]
                    self._arrived[key] = False
                    self.given_up.append(key)

    def _heard(self) -> None:
        """Note that the agent has uploaded a file."""
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
                    self._arrived[key] = True

    def _allowance(self, left: set[Path]) -> float:
        """Return further seconds to wait while the agent uploads a large file."""
        most = 0
        for path in left:
            with contextlib.suppress(OSError):
                os.stat(f"{path}{self.agent.uploading}")
                most = max(most, path.stat().st_size)
        return most / SLOW_BYTES

    def _die(self) -> None:
        self.dead = True
        waited = f"{self._clock() - self._sign:.0f} s"
        what = "this node uploads them itself" if self.agent.put else "nothing else can upload them from here"
        self._say(f"the platform's sync has stopped: it has uploaded no file of a checkpoint for {waited}; {what}")

    def _upload(self, path: Path) -> None:
        with self._lock:
            if self.agent.put is None or path in self._busy:
                return
            self._busy.add(path)
        try:
            if (state := file_state(path)) is None:
                return
            self.agent.put(path.relative_to(self._live).as_posix(), path, self._moved)
        except FileNotFoundError:
            return
        except (CloudtrainError, OSError) as exc:
            self._retry[path] = self._clock() + TIMINGS.upload_retry
            self._complain(str(exc))
        else:
            self._put[path] = state
            self._sign = self._clock()
            self._moved()
        finally:
            with self._lock:
                self._busy.discard(path)

    def _complain(self, why: str) -> None:
        if why not in self._failed:
            self._failed.add(why)
            self._say(f"this node cannot upload its files: {why}")

    def _sweep(self, last: bool = False) -> None:
        """Upload this node's other files: logs, metrics, artifacts, records.

        Unless it is the ``last`` time, stop between two files as soon as a checkpoint is pending.
        """
        modest()
        try:
            files = [path for path in self._own() if not self.stored(path)]
            in_parallel(lambda path: self._upload(path) if last or not self._pending else None, files)
        except Exception as exc:  # noqa: BLE001  the next sweep tries again
            self._complain(f"{type(exc).__name__}: {exc}")

    def _own(self) -> Iterator[Path]:
        """Yield the files written since this node began. Older ones were restored, and are in the store.

        A merged segment bears the time of its last line, so the time of the inode's change counts.
        """
        for folder, _, names in os.walk(self._live):
            for path in (Path(folder, name) for name in names if not name.endswith(self.agent.marks)):
                with contextlib.suppress(OSError):
                    if path.stat().st_ctime >= self._began:
                        yield path
