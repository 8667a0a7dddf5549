"""Choose the checkpoint that a run starts from, best first, and put it where the script finds it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CloudtrainError, DigestError, SpecError, StorageError, reason_of
from . import checkpoints
from .archive import Archive
from .checkpoint_model import Checkpoint, companions, resumable
from .checkpoint_names import family
from .checkpoints import shape_of
from .history import was_direct
from .mounts import in_thread
from .store_checkpoints import RefusedError
from .timings import TIMINGS
from .workspace import Workspace

RUN_FOLDER = "/live/checkpoints"  # ending of the URL of another run's checkpoints; any other folder is the user's own
_OF_RUN = re.compile(rf".*/runs/([^/]+){RUN_FOLDER}(?:/([^/]+).*)?")

Message = dict[str, Any]


class Resume:
    """The resume of one node. ``live`` is this run's own folder, ``given`` the path here of ``resume_from``, a ``url``.

    ``source`` is the URL that the checkpoint at ``url`` was copied from, if it was. ``nodes`` are the planned number of
    nodes and that of this attempt, if they can differ.
    """

    def __init__(
        self,
        *,
        live: Path,
        given: str | None,
        url: str | None,
        say: Callable[[str], None],
        source: str | None = None,
        archive: Archive | None = None,
        marks: tuple[str, ...] = (),
        nodes: tuple[int, int] | None = None,
    ) -> None:
        self._archive, self._marks, self._nodes = archive, marks, nodes
        self._live, self.given = live, [Path(given).absolute()] if given and url else []
        """The folder of ``resume_from`` here, if there is one."""
        self._of_run = bool(url) and str(url).endswith(RUN_FOLDER)
        self._source = source or url or ""
        self._root_of_restored = ""
        self._say = say
        self._placed: list[Path] = []
        self.shapes: dict[str, Counter[str]] = {}
        """Files of the restored ones that this node itself had written, by `family`."""
        self._foreign: dict[str, set[str]] = {}
        """Files of them that other nodes had written, by name. Node 0 takes those of nodes that no longer exist."""
        self.damaged: list[Path] = []
        """Folders of this run that look complete and are not: ``live/checkpoints/…``, or ``live/archive/…``."""

    def candidates(self) -> Iterator[tuple[str, float, Message]]:
        """Yield name, time of saving and message for every node, best first: this run's own, then the given ones.

        The run's own are in ``live`` and in the archive. Each node downloads the archived one that it restores.

        The message also names the targets of the script's pointers, and the newest version of each name without a
        number. A script that looks for its ``last.ckpt`` would begin afresh without one. It would resume from an old
        one if it had written ``last-v1.ckpt`` beside it. Raises `SpecError` for one that this number of nodes cannot
        restore.
        """
        own = self._live / "checkpoints"
        here = checkpoints.complete(own, say=self._say, marks=self._marks)
        there = self._archive.found() if self._archive is not None else []
        found = sorted([*there, *here], key=lambda item: item.order)  # one in both places: that in ``live`` comes first
        for item in reversed(resumable(found)):
            yield self._candidate("archive" if item.archived else "own", own, item, here)
        for root in self.given:
            for item in reversed(resumable(checkpoints.complete(root, url=self._source, say=self._say))):
                yield self._candidate("given", root, item, ())

    def _candidate(
        self, root: str, folder: Path, item: Checkpoint, live: Sequence[Checkpoint]
    ) -> tuple[str, float, Message]:
        """Return one of `candidates`, which lies below ``folder``. Undamaged ones of ``live`` come back with it."""
        if self._nodes is not None:
            counts, why = item.node_counts(self._nodes)
            if self._nodes[1] not in counts:
                raise SpecError(why)
        named = {p.target for node in checkpoints.read_pointers(self._live).values() for p in node.values()}
        whole = [other for other in live if other.folder not in self.damaged]
        states = [other for other in resumable(live) if other.folder not in self.damaged]
        also = companions(item, whole, states, named)
        place, *more = (c.folder.relative_to(folder).as_posix() for c in (item, *also))
        return item.name, item.saved, {"t": "restore", "root": root, "folder": place, "also": more}

    def direct(self, space: Workspace) -> Checkpoint | None:
        """Return the newest checkpoint that the script wrote to the store by itself.

        Raises `CloudtrainError` if a store does not answer that the run has used so. A run that would begin afresh asks
        again for `Timings.store_silent` seconds: it may have used the store too, or its nodes may have no way there.
        """
        afresh = not checkpoints.complete(self._live / "checkpoints")
        deadline = time.monotonic() + (TIMINGS.store_silent if afresh else 0.0)
        while True:
            try:
                return space.direct()
            except CloudtrainError as exc:
                if was_direct(self._live):
                    raise
                if isinstance(exc, RefusedError) or time.monotonic() >= deadline:
                    self._say(f"{exc}; nothing there is resumed from")
                    return None
                self._say(f"{exc}; asking again, as nothing else is there to resume from")
            time.sleep(TIMINGS.store_again)

    def restore(self, message: Mapping[str, Any], space: Workspace) -> tuple[str, bool]:
        """Restore the checkpoint of ``message``. Return why not and whether it is damaged; ("", False) on success.

        Checkpoints of an earlier try are removed. By its times of change the restored one is the newest here, as a
        script may look for that; those that come back beside it are older.
        """
        self.clear()
        self._root_of_restored = message["root"]
        try:  # first, as there may be no room for more
            self._place(message["root"], message["folder"], space)
        except DigestError as exc:
            return str(exc), True
        except StorageError as exc:
            return str(exc), False
        for folder in message["also"]:
            try:
                self._place("own", folder, space)
            except (DigestError, StorageError) as exc:
                self._say(f"{exc}; left out")
        now = time.time()
        for age, path in enumerate(self._placed):  # in whole seconds: some file systems have no others
            checkpoints.date(path, now - age)
        if message["root"] != "given":
            self._point(space)
        return "", False

    def begin(self, message: Mapping[str, Any], space: Workspace, tell: Callable[[Message], None]) -> None:
        """Call `restore` in a thread, then ``tell`` with its answer: a notice must arrive while gigabytes come."""

        def work() -> None:
            try:  # it may take hours, as long as the mounts answer
                found = in_thread(lambda: self.restore(message, space), [self._live, *self.given])
                why, damaged = found or ("the node leaves", False)
            except (OSError, StorageError) as exc:
                why, damaged = reason_of(exc), False
            except Exception as exc:  # noqa: BLE001  in any case node 0 waits for an answer
                why, damaged = f"{type(exc).__name__}: {exc}", False
            tell({"t": "restored", "why": why, "damaged": damaged, "failures": []})

        threading.Thread(target=work, name="restore", daemon=True).start()

    def pass_over(self, message: Mapping[str, Any]) -> None:
        """Note that some node found the checkpoint of ``message`` damaged."""
        if message["root"] != "given":
            place = "checkpoints" if message["root"] == "own" else "archive"
            self.damaged.append(self._live / place / message["folder"])

    def clear(self) -> None:
        """Remove the restored files if the run does not resume from them: a script may look for the newest itself."""
        for path in self._placed:
            checkpoints.remove_path(path)
        self._placed.clear()
        self.shapes.clear()
        self._foreign.clear()

    @property
    def path(self) -> Path:
        """Return where the restored checkpoint is."""
        return self._placed[0]

    def set_aside(self, watch: checkpoints.Watch) -> None:
        for name, others in self._foreign.items():
            watch.set_aside(name, others)

    def _place(self, root: str, folder: str, space: Workspace) -> None:
        """Restore one checkpoint. Raises `DigestError` for a damaged one, `StorageError` for a disk, mount or store."""
        if root != "archive":
            base = self.given[0] if root == "given" else self._live / "checkpoints"
            self._place_from(base / folder, folder, space)
            return
        assert self._archive is not None
        whole = space.folder / "archive"
        self._say(f"downloading checkpoint {folder} from the archive")
        try:
            self._archive.bring(folder, whole)
            self._place_from(whole, folder, space)
        except OSError as exc:
            raise StorageError(f"cannot download checkpoint {folder}: {exc.strerror}") from None
        except ValueError as exc:
            raise DigestError(f"checkpoint {folder}: its entry in the archive is damaged ({exc})") from None
        finally:
            checkpoints.remove_path(whole)

    def _place_from(self, whole: Path, folder: str, space: Workspace) -> None:
        try:
            checkpoint = Checkpoint.of(json.loads((whole / checkpoints.COMMIT).read_bytes()), str(whole))
            target = space.watch().place(checkpoint.name, checkpoint.place)
            written: dict[int, set[str]] = {}
            for key in checkpoint.files:
                node, _, path = key.partition("/")
                written.setdefault(int(node[5:]), set()).add(path[len(checkpoint.name) + 1 :])
        except OSError as exc:
            raise StorageError(f"cannot read {whole / checkpoints.COMMIT}: {exc.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise DigestError(f"checkpoint {folder}: its {checkpoints.COMMIT} is none ({exc})") from None
        checkpoints.restore(checkpoint, target, node=space.node)
        self._placed.append(target)
        if own := written.get(space.node):
            self.shapes.setdefault(family(checkpoint.name), shape_of(own))  # the shape of the first one, the best
        here = range(space.nodes) if space.node == 0 else written.keys()
        others = set[str]().union(*(paths for node, paths in written.items() if node in here))
        self._foreign[checkpoint.name] = others - (own or set())

    def _point(self, space: Workspace) -> None:
        """Write this node's pointers again, to entries that are here."""
        watch = space.watch()
        here = watch.entries()
        for name, pointer in checkpoints.read_pointers(self._live).get(space.node, {}).items():
            if pointer.target in here and name not in here and "/" not in name:
                try:
                    watch.point(name, pointer)
                except OSError as exc:
                    self._say(f"cannot write {name} again: {exc.strerror}")
                self._placed.append(watch.place(name, None))

    def fallback(self, tried: int) -> tuple[str, str]:
        """Return the folder to start from if no checkpoint could be restored, after ``tried`` of them, and why not.

        A folder of the user's own is used as it is. A named run without a complete checkpoint is a mistake.
        """
        if not self.given:
            return "", ""
        if self._of_run or tried:
            return "", "resume_from: nothing complete and undamaged to resume from"
        if not os.path.exists(self.given[0]):
            return "", f"resume_from: nothing at {self._source}"
        return str(self.given[0]), ""

    def title(self, name: str) -> str:
        """Return the name that messages give the restored checkpoint ``name``: ``RUN/NAME`` if it is another run's.

        An empty ``name`` stands for the folder of `fallback`: its own name, after that of the folder that its
        ``checkpoints`` lies in.
        """
        run = _OF_RUN.fullmatch(self._source)
        if name and self._root_of_restored != "given":
            return name
        if run:
            return f"{run[1]}/{name or run[2]}"
        parts = self._source.rpartition("://")[2].split("/")
        return name or "/".join([*parts[-3:-2], parts[-1]] if parts[-2:-1] == ["checkpoints"] else parts[-1:])
