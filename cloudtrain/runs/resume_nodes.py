"""Find the numbers of nodes that can resume a run."""

from __future__ import annotations

from ..errors import AuthError, NotFoundError, SpecError, StorageError
from ..runtime.checkpoint_model import Checkpoint, resumable
from ..settings.settings import Settings
from ..storage.files import Files, files
from ..store.store import Store, committed_in


def nodes_that_restore(
    own: Checkpoint | None, resume: str | None, wanted: tuple[int, ...], *, store: Store, settings: Settings
) -> tuple[tuple[int, ...], str]:
    """Return the numbers of ``wanted`` nodes (the most first) that can resume the run, and why no others can.

    The run resumes from its ``own`` newest checkpoint, else from what is at the URL ``resume``. If that cannot be
    read, only the most nodes may try.
    """
    found = own
    if own is None and resume:
        parent, _, name = resume.rpartition("/")
        if parent.endswith("/"):  # a whole bucket
            parent, name = resume, ""
        try:
            if resume.startswith(f"{store.url}/"):
                found = _newest_in(store.files, resume[len(store.url) + 1 :])
            else:
                found = settings.let_in(resume, lambda caller: _newest_in(files(parent, storage=caller), name))
        except (AuthError, NotFoundError, SpecError, StorageError) as exc:
            why = exc.message if isinstance(exc, SpecError) else str(exc)
            return wanted[:1], f"resume_from: {why}, so it needs {wanted[0]} nodes"
    counts, why = found.node_counts(wanted) if found is not None else (wanted, "")
    return counts or wanted[:1], why


def _newest_in(there: Files, root: str) -> Checkpoint:
    """Return the newest complete checkpoint below the folder ``root``, else all files there as one: the user's own.

    Raises `NotFoundError` if there are none.
    """
    committed, sizes = committed_in(there, root)
    if states := resumable(committed):
        return states[-1]
    if not sizes and not (root and there.exists(root)):
        raise NotFoundError(f"nothing at {there.url}/{root}".rstrip("/"))
    return Checkpoint(
        name=f"{there.url}/{root}".rstrip("/").rpartition("/")[2],
        key=root,
        committed=0.0,
        saved=0.0,
        files=dict.fromkeys(sizes, (0, "")),
    )
