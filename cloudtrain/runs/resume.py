"""Resolve ``resume_from``: a run, a pulled folder, or a folder of the user's own.

A word is the id of a run, even if a folder has that name: `pull` makes one. A path or a URL is a run's folder, a folder
that `pull` filled, or the user's own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from ..errors import AuthError, NotFoundError, SpecError
from ..job.run_id import is_run_id
from ..runtime.checkpoint_model import resumable
from ..settings.settings import Settings
from ..storage.local_disk import local_path, normalize
from ..store.copies import followed
from ..store.store import Store, in_store
from ..validate import did_you_mean, url_scheme
from .pull import newest_pulled

FIELD = "resume_from"
_RUN = re.compile(r"(.+)/runs/([^/]+?)(?:/live/checkpoints)?")
_NO_STATE = re.compile(r"\.(py|pyc|ipynb|sh|md|rst|toml|ini|cfg|log|html|png|jpe?g|gif|svg|pdf|mp4|wav)", re.IGNORECASE)
"""Suffixes of programs, texts and pictures. A folder with nothing else holds no checkpoint."""


def is_bare(given: str) -> bool:
    """Return whether ``given`` is a word, which is the id of a run and never a folder."""
    return not url_scheme(given) and not {"/", os.sep} & set(given) and given not in (".", "..")


def checkpoints_url(given: str, *, store: Store, settings: Settings, cwd: Path, ask: bool, follows: bool) -> str:
    """Return the URL of ``given``: a run's complete checkpoints, one checkpoint, or the user's folder.

    With ``ask`` the platform may be asked for the location of a URL. With ``follows`` a run's store is read, even a
    remote one, for the run's newest place and its checkpoints. Without it only local files are read. Raises `SpecError`
    if ``given`` does not exist, or holds nothing to resume from.
    """
    bare = is_bare(given)
    if bare:
        if not is_run_id(given):
            hint = f"give the id of a run; for a file or folder, write ./{given}"
            raise SpecError(f"{given!r} is not the id of a run", field=FIELD, hint=hint)
        url = f"{store.url}/runs/{given}"
    else:
        try:
            url = normalize(settings.resolved(given, ask=ask), cwd=cwd)
        except SpecError as exc:
            raise SpecError(exc.message, field=FIELD, hint=exc.hint) from None
    path = local_path(url)
    if path is not None and not bare and (found := _pulled(path, given)) is not None:
        return normalize(str(found), cwd=cwd)
    url = followed(url, settings, ask=follows)
    path = local_path(url)
    run = _RUN.fullmatch(url)
    record = local_path(f"{run[1]}/runs/{run[2]}/run.json") if run is not None else None
    if run is None or not is_run_id(run[2]) or not (bare or record is None or record.exists()):
        if path is not None:
            _check_folder(path, given)
        return url
    if follows or path is not None:
        _check_run(run[1], run[2], settings, sends=follows, folder=cwd / given if bare else None)
    return f"{run[1]}/runs/{run[2]}/live/checkpoints"


def _pulled(path: Path, given: str) -> Path | None:
    """Return the newest checkpoint in a folder that `pull` filled, or in its ``checkpoints``; None for others."""
    known = newest_pulled(path.parent if path.name == "checkpoints" else path)
    if known is None:
        return None
    run, newest = known
    if newest is None:
        hint = f"to resume from the run itself: --resume-from {run}"
        raise SpecError(f"{given} was pulled and has no complete checkpoint", field=FIELD, hint=hint)
    return newest


def _check_folder(path: Path, given: str) -> None:
    """Raise `SpecError` for a user's folder or file that cannot hold a checkpoint."""
    if not os.path.exists(path):
        hint = "give the id of a run, or a folder that exists"
        raise SpecError(f"there is no {given}", field=FIELD, hint=hint)
    if path.is_dir() and not _has_state(path):
        hint = "give the id of a run, or the folder that holds the checkpoint's files"
        raise SpecError(f"{given} holds no checkpoint, only programs, texts or pictures", field=FIELD, hint=hint)


def _has_state(folder: Path) -> bool:
    """Return whether some file may be a part of a checkpoint; True if a folder cannot be read."""
    unread: list[OSError] = []
    for _, _, names in os.walk(folder, onerror=unread.append):
        if not all(_NO_STATE.fullmatch(PurePath(name).suffix) for name in names):
            return True
    return bool(unread)


def _check_run(place: str, run_id: str, settings: Settings, *, sends: bool, folder: Path | None) -> None:
    """Raise `SpecError` if the store at ``place`` has no such run, or the run has no complete checkpoint.

    Unless the job is sent now (``sends``), an unfinished run may still save one. A store that this client cannot read
    is accepted: the nodes may be able to. ``folder`` is the path that the id would name.
    """

    def look(found: Store) -> SpecError | None:
        if not found.has_run(run_id):
            hints = [did_you_mean(run_id, found.runs())]
            hints += [f"for the folder of that name: ./{run_id}"] if folder and folder.exists() else []
            hint = "; ".join(filter(None, hints)) or f"to see the runs there: cloudtrain list --store {place}"
            return NotFoundError(f"no run {run_id!r} in {place}", field=FIELD, hint=hint)
        over = found.result(run_id) is not None
        if (sends or over) and not resumable(found.checkpoints(run_id)):
            hint = f"name another run, or leave {FIELD} out to start from the beginning\n"
            hint += f"if the script saved it elsewhere: cloudtrain pull {run_id}, then name its folder in there"
            hint = hint if over else f"wait until it has saved one: cloudtrain status {place}/runs/{run_id}"
            if written := found.direct(run_id):
                hint = f"its script wrote one to the store itself: --resume-from {place}/{written[-1].key}"
            return SpecError(f"run {run_id!r} has no complete checkpoint", field=FIELD, hint=hint)
        return None

    try:
        wrong = in_store(place, settings, look)
    except (AuthError, SpecError):
        return
    if wrong is not None:
        raise wrong
