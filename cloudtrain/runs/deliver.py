"""Send the request of an attempt: one client at a time, and never one that the platform may have already."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial

from ..errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
)
from ..job.job import Job
from ..provider_api.protocol import Layout, Request, extras_of
from ..storage.lease import Lease
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store, next_of
from ..validate import did_you_mean
from . import handover
from .attempts import NO_MACHINES
from .log_sources import patiently
from .run import Run

_KINDS: Mapping[str, type[CloudtrainError]] = {
    "quota": QuotaError,
    "capacity": CapacityError,
    "spec": SpecError,
    "auth": AuthError,
}


def write_context(store: Store, layout: Layout, run_id: str) -> None:
    """Write the context of the newest attempt, even if a slower client wrote another one meanwhile."""
    while True:
        newest = store.newest_attempt(run_id)
        request = store.attempt_request(run_id, newest)
        # Another GPU may mean another number of ranks; most attempts have the same context.
        if request is not None and store.context(layout) != request.context:
            store.write_container(layout, request.context, secrets.token_bytes(32))
        if store.newest_attempt(run_id) == newest:
            return


def reserve(store: Store, budget: str, run_id: str, job: Job) -> None:
    """Reserve the limits of a run's ``job`` in its ``budget`` (empty: none), unless the run is cancelled.

    Raises `SpecError` as `Budget.reserve` does.
    """
    if budget and not store.cancelled(run_id):
        from .budget import open_budget  # it loads the sweeps, and a plan needs neither
        from .sweeps.spec import CURRENCIES

        cap = {currency: most for currency in CURRENCIES if (most := getattr(job, currency)) is not None}
        open_budget(store, budget).reserve(run_id, cap)


def deliver(
    run: Run,
    request: Request,
    values: Mapping[str, str],
    *,
    refusals: tuple[type[CloudtrainError], ...] = handover.REFUSALS,
    say: Callable[[str], None] | None = None,
) -> str | None:
    """Send the request of an attempt, unless another client has, and record its native id.

    Return None if it was refused before, or cancelled before it was sent. Raises the errors of sending. ``refusals``
    are recorded, so that no other client sends it. ``say`` is called before a wait for another client, or for the job
    of a request without an answer. Without it, Python's log gets a warning.
    """
    store, budget = run.store, run.record.get("budget")
    if budget and store.result(run.run_id) is None:
        reserve(store, budget, run.run_id, run._own_job)
    native = _sent(run, request, values, refusals, say or _warn)
    if native is not None and native not in run._known.stopped and _is_over(run, request, native):
        with contextlib.suppress(NotFoundError):  # cancelled, or recorded as refused, while it was being sent
            run._stop(native)
    return native


def _warn(text: str) -> None:
    import logging  # a plan sends nothing

    logging.getLogger("cloudtrain").warning(text)


def _sent(
    run: Run,
    request: Request,
    values: Mapping[str, str],
    refusals: tuple[type[CloudtrainError], ...],
    say: Callable[[str], None],
) -> str | None:
    """Send the request under its lease, and record the native id or the refusal, as `deliver` does."""
    store, attempt, arrival = run.store, request.attempt, extras_of(run.provider).arrival_s
    until: float | None = None  # by then a request without an answer has become a job, or never will
    is_ours = False  # if that request is of this client
    is_barred = False  # if the request must no longer be sent

    def send() -> str | None:
        nonlocal until, is_ours, is_barred
        # Checked again after a lost answer: nothing starts once the user knows that it was cancelled or refused.
        is_barred = store.refused(run.run_id, attempt) is not None or store.result(run.run_id) is not None
        is_barred = is_barred or store.cancelled(run.run_id)
        if is_barred:
            return run.provider.find(request)  # it may have been sent before
        lease.check()
        try:
            return run.provider.submit(request, values)
        except LostContactError as exc:
            if not exc.throttled and extras_of(run.provider).may_have_sent(request):
                until, is_ours = time.monotonic() + arrival, True
                with contextlib.suppress(CloudtrainError, OSError):
                    lease.renew()  # from now on the request may arrive, for clients that look at a cancelled run
            raise

    with handover.sending(store, run.run_id, request, arrival=arrival, say=say) as lease:
        if (noted := store.submitted(run.run_id, attempt)) is not None:
            return str(noted["native_id"])
        if store.refused(run.run_id, attempt) is not None:
            return None
        until = None if lease.took_over is None else time.monotonic() + arrival - lease.took_over
        try:
            native = patiently(send)
        except handover.ANSWERS as exc:
            native = None if until is None else _late_job(run, request, f"was refused ({exc})", until, lease, say)
            if native is None:
                if isinstance(exc, refusals):
                    with contextlib.suppress(CloudtrainError):
                        store.write_refused(run.run_id, attempt, category=category_of(exc), reason=exc.with_hint())
                raise
            is_barred = True  # it came so late that the run may have been cancelled meanwhile
        if native is None and until is not None:
            if is_ours:  # it may have been sent so late after a cancel that no other client looks for the job any more
                native = _late_job(run, request, "was cancelled", until, lease, say)
            else:
                lease.kept = True  # that request may still become a job
        if native is not None:
            if is_barred and _is_over(run, request, native):  # before it is recorded: then no client looks for it
                lease.kept = True  # if this fails, other clients look for it
                with contextlib.suppress(NotFoundError):
                    run._stop(native)
                lease.kept = False
            store.write_submitted(run.run_id, attempt, native)
        return native


def _is_over(run: Run, request: Request, native: str) -> bool:
    """Return whether the run was cancelled, or has continued without the job ``native`` while that was being sent."""
    store, ended = run.store, run.store.result(run.run_id)
    if store.cancelled(run.run_id) or (ended is not None and ended["native_id"] != native):
        return True
    refused, fewer = store.refused(run.run_id, request.attempt), run._own_job.resources.min_instance_count
    more = refused or handover.fallbacks_of(run) or fewer
    if not more and not any(handover.next_gpu(run, request, category) is not None for category in NO_MACHINES):
        return False
    return next_of(store, run.run_id) is not None or store.newest_attempt(run.run_id) > request.attempt


def _late_job(
    run: Run, request: Request, why: str, until: float, lease: Lease, say: Callable[[str], None]
) -> str | None:
    """Return the job of a request without an answer, after the platform refused the next one, or a cancel.

    Return None if there is none at ``until``, by the monotonic clock. If this fails, the lease stays.
    """
    lease.kept = True
    if (left := until - time.monotonic()) > 0:
        why = f"attempt {request.attempt} {why}, but a request before that got no answer"
        say(f"{why}; looking for its job for {math.ceil(left)} s")
    while True:
        is_last = time.monotonic() >= until
        native = patiently(partial(run.provider.find, request))
        if native is not None or is_last:
            lease.kept = False
            return native
        time.sleep(min(CLIENT_TIMINGS.platform_pause, max(0.0, until - time.monotonic())))


def category_of(exc: Exception) -> str:
    """Return the category of an attempt that a provider refused with ``exc``."""
    return next((category for category, kind in _KINDS.items() if isinstance(exc, kind)), "infra")


def error_of(category: str) -> type[CloudtrainError]:
    """Return the error class for a refusal of ``category``, the inverse of `category_of`."""
    return _KINDS.get(category, PlatformError)


def secret_values(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the ``env:`` references by variable. Raises `SpecError` for an unset or empty variable."""
    values = {}
    for name, reference in job.secrets.items():
        scheme, _, variable = reference.partition(":")
        if scheme == "env":
            if not environ.get(variable):  # not shown: after --secret TOKEN=env:$TOKEN it is the secret
                near = did_you_mean(variable, environ) or "write a variable's name after env:, without $, and set it"
                text = "its environment variable is not set here, or empty"
                raise SpecError(text, field=f"secrets.{name}", hint=near)
            values[variable] = environ[variable]
    return values
