"""Hand a run over to its next fallback place. Exactly one client can record the handover.

Each place has a run of its own, with the same id, in its own store. Its run.json names the places that may follow
(``fallbacks``) and the refusals of earlier ones (``refusals``). A handover is a record, ``next.json``, created
exclusively in the folder of the run that is left. By then nothing of that run lives or can come to life:

* the run ended for lack of machines and never ran, by the platform's word; or
* the platform refused it. One client at a time sends an attempt, by a lease. It records a refusal before it gives the
  lease back, so the next client sees that and does not send. A refused run is ended the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import AuthError, CapacityError, NotFoundError, PlatformError, QuotaError, SpecError, StorageError
from ..provider_api.protocol import Layout, Provider, Request, extras_of
from ..storage.files import Loaded
from ..storage.lease import Lease, held_leases, is_released, load_lease
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store, next_of, run_folder, to_json
from .attempts import NO_MACHINES, AttemptPolicy, History
from .resume_nodes import nodes_that_restore

if TYPE_CHECKING:
    from ..job.job import Resources
    from .run import Run

REFUSALS = (CapacityError, PlatformError, QuotaError, SpecError)
"""Errors with which a provider refuses a request."""
ANSWERS = (AuthError, *REFUSALS)
"""Errors that answer a request: it becomes no job."""

Record = Mapping[str, Any]


# --------------------------------------------------------------------------------------------- clients that are sending


@contextlib.contextmanager
def sending(
    store: Store, run_id: str, request: Request, *, arrival: float, say: Callable[[str], None]
) -> Iterator[Lease]:
    """Hold the lease of the request's attempt: one client at a time sends it, or records that it was refused.

    An answer of the platform releases the lease. After any other end it stays, because the request may still arrive.
    ``arrival`` is the time in seconds that it may take, if this machine sees that its sender has ended.
    """
    waits = f"waiting: another client may be sending attempt {request.attempt} of {store.url}/{run_folder(run_id)}"
    with Lease(
        store.files, _lease_key(run_id, request), seconds=CLIENT_TIMINGS.sending, after=arrival, say=say, waits=waits
    ) as lease:
        try:
            yield lease
        except ANSWERS:
            raise
        except BaseException:
            lease.kept = True
            raise


def cut_off(store: Store, run_id: str, attempt: int) -> bool:
    """Return whether a client has begun to send the attempt without an answer: the platform may have it."""
    return unanswered(store, run_id, attempt) is not None


def unanswered(store: Store, run_id: str, attempt: int) -> Loaded | None:
    """Return the lease of a client that has begun to send the attempt without an answer; None if there is none."""
    request = store.attempt_request(run_id, attempt)
    found = load_lease(store.files, _lease_key(run_id, request)) if request is not None else None
    return None if found is None or is_released(found) else found


def _lease_key(run_id: str, request: Request) -> str:
    return f"{run_folder(run_id)}/attempts/{request.attempt}/sending-{request.gpu_index}.json"


def moving(store: Store, run_id: str) -> Lease:
    """Return a lease that shows the clients that follow the run that this client moves it to its next place.

    Each client has its own, so none waits for another.
    """
    return Lease(store.files, f"{_moving_folder(run_id)}/{secrets.token_hex(8)}.json", seconds=CLIENT_TIMINGS.lease)


def is_moving(store: Store, run_id: str, seen: dict[str, tuple[str, float]], now: float) -> bool:
    """Return whether a client moves the run now; ``seen`` and ``now`` are those of `held_leases`."""
    return bool(held_leases(store.files, _moving_folder(run_id), seen, now))


def _moving_folder(run_id: str) -> str:
    return f"{run_folder(run_id)}/moving"


# ------------------------------------------------------------------------------------------------------------ decisions


def decide(store: Store, run_id: str, following: str, result: Record) -> bool:
    """Record that the run ended with ``result`` and continues at ``following``. Return False if another place won."""
    record = {"run": following, "result": dict(result), "time": time.time()}
    if store.files.create(f"{run_folder(run_id)}/next.json", to_json(record)):
        return True
    noted = next_of(store, run_id)
    return noted is not None and noted.get("run") == following


def newer_attempt_exists(store: Store, run_id: str, newest: int, result: Record) -> bool:
    """Return whether ``result`` is of an attempt before ``newest``, which another client has recorded."""
    if not newest or store.refused(run_id, newest):
        return False
    noted = store.submitted(run_id, newest)
    return noted is None or str(noted["native_id"]) != result["native_id"]


def region_of_provider(provider: Provider) -> str:
    """Return the region in the provider's settings; empty if they name none."""
    specs = dataclasses.fields(provider.settings)
    return ", ".join(str(getattr(provider.settings, spec.name)) for spec in specs if spec.metadata.get("place"))


# -------------------------------------------------------------------------------------- further attempts and places


def unsent_attempt(run: Run) -> int | None:
    """Return the newest attempt (0 if none is recorded) unless it was sent or refused or the run is over; else None."""
    store, run_id = run.store, run.run_id
    newest = store.newest_attempt(run_id)
    known = any(look(run_id, newest) is not None for look in (store.submitted, store.refused))
    return None if known or store.cancelled(run_id) or store.result(run_id) is not None else newest


def fallbacks_of(run: Run) -> list[dict[str, Any]]:
    """Return the fallback places recorded in run.json (usually none)."""
    try:
        return list(run.record.get("fallbacks") or ())
    except NotFoundError:
        return []


def refusals_of(run: Run, natives: Collection[int] = ()) -> list[dict[str, Any]]:
    """Return every refusal so far, oldest first: earlier places, then refused attempts here (those without a native id
    in ``natives``)."""
    found = list(run.record.get("refusals") or ())
    for k in sorted(set(run.store.attempts(run.run_id)) - set(natives)):
        refused, request = run.store.refused(run.run_id, k), run.store.attempt_request(run.run_id, k)
        if refused and request is not None:
            found.append(refusal_of(run, refused, request.gpu_index))
    return found


def refusal_of(run: Run, refused: Record, gpu_index: int) -> dict[str, Any]:
    """Return this place's refusal for one GPU of the list, with category and reason from ``refused``."""
    gpus = run._own_job.resources.gpu
    return {
        "run": run.url,
        "provider": run.provider_name,
        "place": region_of_provider(run.provider),
        "gpu": gpus[gpu_index] if gpu_index < len(gpus) else None,
        "category": refused["category"],
        "reason": refused["reason"],
    }


def close_left(left: Store, store: Store, run_id: str, result: Record) -> None:
    """Finish the handover from ``left`` to ``store`` if its client died: pass on a cancel, and keep the result."""
    if left.result(run_id) is not None:
        return
    with contextlib.suppress(AuthError):  # a client without write access cannot start it either
        if left.cancelled(run_id):
            store.cancel(run_id)
    # Not earlier: a client that looks for unfinished runs in the store that was left must still find it.
    if store.attempts(run_id) or store.cancelled(run_id) or store.result(run_id) is not None:
        with contextlib.suppress(AuthError, StorageError):  # read-only verbs come here too
            left.write_result(run_id, result)


def clients_retry(run: Run, native_id: str | None) -> bool:
    """Return whether clients start further attempts: as the provider says, or in place of a killed supervisor."""
    if run.provider.retried_by == "client":
        return True
    return native_id is not None and extras_of(run.provider).abandoned(native_id)


def history_of(run: Run, newest: int, result: Record) -> History:
    """Return the facts about the run's attempts here up to ``newest``, which ended as ``result``.

    The caller has listed the attempts: another client may record one meanwhile, of which ``result`` says nothing.
    """
    store, run_id, category = run.store, run.run_id, result["category"]
    requests = [store.attempt_request(run_id, k) for k in range(newest + 1)]
    unserved, last, wanted = category in NO_MACHINES, requests[-1], run._own_job.resources
    counts, bound = wanted.node_counts, ""
    if wanted.min_instance_count and result["state"] == "failed":
        resume = Layout.from_dict(run.record["layout"]).resume
        counts, bound = nodes_that_restore(run.checkpoint(), resume, counts, store=store, settings=run._settings)
    return History(
        state=result["state"],
        category=category or "",
        newest=newest,
        choices=tuple(request.gpu_index if request is not None else 0 for request in requests),
        refused=store.refused(run_id, newest) is not None,
        cancelled=store.cancelled(run_id),
        starts=clients_retry(run, result["native_id"]),
        next_gpu=next_gpu(run, last, category) if unserved and last is not None else None,
        may_leave=unserved and bool(fallbacks_of(run)) and not _has_run(run, result),
        nodes=tuple(nodes_of(request, wanted) for request in requests),
        node_counts=counts,
        bound=bound,
    )


def nodes_of(request: Request | None, wanted: Resources) -> int:
    """Return the number of nodes that a recorded request asks for; without a record, that of its job."""
    return int((request.context.get("nodes") if request is not None else None) or wanted.instance_count)


def _has_run(run: Run, result: Record) -> bool:
    """Return whether the run has ever had machines here, by the platform's word or by a trace of its nodes."""
    started = any(row["started"] for row in result["attempts"])
    return bool(started or result["checkpoint"] or run.store.starts(run.run_id) or run.store.exits(run.run_id))


def may_continue(run: Run, result: Record) -> bool:
    """Return whether a waiting client may start another attempt after a failure, here or elsewhere."""
    if result["state"] != "failed":
        return False
    newest = run.store.newest_attempt(run.run_id)
    policy, history = AttemptPolicy.of_job(run._own_job), history_of(run, newest, result)
    if policy.retries_here(history) or policy.moves(history) or policy.is_bound(history):
        return True
    open_here = history.starts and not history.cancelled
    return open_here and newer_attempt_exists(run.store, run.run_id, newest, result)


def next_gpu(run: Run, request: Request, category: str) -> int | None:
    """Return the index of the next GPU of the list after ``request``, if it can be requested here; else None."""
    job, gpu_index = run._own_job, request.next_gpu_index(category)
    if run.provider.retried_by != "client" or gpu_index >= len(job.resources.gpu):
        return None
    try:
        run.provider.plan(job, Layout.from_dict(run.record["layout"]), 0, gpu_index)
    except SpecError:
        return None
    return gpu_index
