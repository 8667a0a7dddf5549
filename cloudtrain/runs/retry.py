"""Start further attempts from a waiting client after a failure, if the platform does not.

`Retry` sends attempts that an earlier client recorded but never sent. It starts the next attempt with the rest of the
Job's limits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

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
from ..provider_api.node_count import plan_attempt
from ..provider_api.protocol import Layout, Request, extras_of
from ..storage.lease import Lease
from ..storage.local_disk import local_path
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store, next_of
from ..validate import did_you_mean
from . import handover
from .attempts import NO_MACHINES, AttemptPolicy, Ending, Next, exception_of, usage_of
from .budget import hold
from .log_sources import patiently
from .machines import bad_machines, without_bad_machines
from .run import Run
from .summary import plural

__all__ = [
    "Retry",
    "category_of",
    "deliver",
    "error_of",
    "secret_values",
    "write_context",
]

_KINDS: Mapping[str, type[CloudtrainError]] = {
    "quota": QuotaError,
    "capacity": CapacityError,
    "spec": SpecError,
    "auth": AuthError,
}


def write_context(store: Store, layout: Layout, run_id: str) -> None:
    """Write the context of the newest attempt, even if a slower client wrote another one meanwhile."""
    while True:
        newest = max(store.attempts(run_id))
        request = store.attempt_request(run_id, newest)
        # Another GPU may mean another number of ranks; most attempts have the same context.
        if request is not None and store.context(layout) != request.context:
            store.write_container(layout, request.context, secrets.token_bytes(32))
        if max(store.attempts(run_id)) == newest:
            return


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
    say = say or logging.getLogger("cloudtrain").warning
    store, attempt, arrival = run.store, request.attempt, extras_of(run.provider).arrival_s
    until: float | None = None  # by then a request without an answer has become a job, or never will
    is_ours = False  # if that request is of this client
    budget = run.record.get("budget")
    if budget and store.result(run.run_id) is None and not store.cancelled(run.run_id):
        hold(store, budget, run.run_id, run.job.at(run.provider_name))

    def send() -> str | None:
        nonlocal until, is_ours
        # Checked again after a lost answer: nothing starts once the user knows that it was cancelled or refused.
        over = store.refused(run.run_id, attempt) is not None or store.result(run.run_id) is not None
        if over or store.cancelled(run.run_id):
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
        until = None if lease.took_over is None else time.monotonic() + arrival - lease.took_over
        noted = store.submitted(run.run_id, attempt)
        if noted is None and store.refused(run.run_id, attempt) is not None:
            return None
        try:
            native = patiently(send) if noted is None else str(noted["native_id"])
        except (AuthError, *handover.REFUSALS) as exc:
            native = None if until is None else _late_job(run, request, f"was refused ({exc})", until, lease, say)
            if native is None:
                if isinstance(exc, refusals):
                    with contextlib.suppress(CloudtrainError):
                        store.write_refused(run.run_id, attempt, category=category_of(exc), reason=exc.with_hint())
                raise
        if native is None and until is not None and is_ours:
            # It may have been held up before it sent the request, so that no other client looks for the job any more.
            native = _late_job(run, request, "was cancelled", until, lease, say)
            until = None
        if native is None:
            lease.kept = until is not None  # that request may still become a job
            return None
        if noted is None:
            store.write_submitted(run.run_id, attempt, native)
    more = handover.fallbacks_of(run) or run.job.at(run.provider_name).resources.min_instance_count
    more = more or any(handover.next_gpu(run, request, c) is not None for c in NO_MACHINES)
    left = more and (next_of(store, run.run_id) is not None or max(store.attempts(run.run_id)) > attempt)
    ended = store.result(run.run_id)
    if left or store.cancelled(run.run_id) or (ended is not None and ended["native_id"] is None):
        with contextlib.suppress(NotFoundError):  # cancelled, or recorded as refused, while it was being sent
            patiently(partial(run.provider.cancel, native))
    return native


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


class Retry:
    """The retry policy of a waiting client after a failed attempt, if clients start the next one.

    Creating it sends an attempt that an earlier client recorded but never sent; `resend` does so for a client that dies
    later. `AttemptPolicy` decides what follows, on any client by the same records. ``environ`` has the values of
    ``env:`` references. ``clock`` gives Unix seconds.
    """

    def __init__(
        self,
        run: Run,
        say: Callable[[str], None] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._say, self._clock = run, say or (lambda _: None), clock
        self._say_wait = say
        self._environ = os.environ if environ is None else environ
        self._due: dict[tuple[str, int], float] = {}
        attempts = run.store.attempts(run.run_id)
        if attempts and run.store.result(run.run_id) is None:
            self.send(max(attempts))

    def begin(self) -> None:
        """Do nothing: a run without fallbacks has no next place."""

    def resend(self, attempt: int, now: float) -> None:
        """Send the newest attempt if it has been recorded but unsent for `ClientTimings.unsent` of the caller's clock
        (``now``, seconds): its client has died. Raises the errors of sending."""
        key = (self._run.url, attempt)
        if now >= self._due.setdefault(key, now + CLIENT_TIMINGS.unsent):
            self._due[key] = now + CLIENT_TIMINGS.unsent
            self.send(attempt)

    def send(self, number: int) -> None:
        """Send the newest attempt if it is recorded and has no outcome. Raises the errors of sending."""
        run, store = self._run, self._run.store
        if store.submitted(run.run_id, number) is not None or store.refused(run.run_id, number) is not None:
            return
        request = store.attempt_request(run.run_id, number)
        if store.cancelled(run.run_id):
            run.cancel()  # it may have been sent nevertheless
        elif request is not None and self._is_ours(number):
            self._say(f"sending attempt {number}, which was recorded and never sent")
            self._send(request, self._secrets())

    def _is_ours(self, attempt: int) -> bool:
        """Return whether this client may send it. Nodes that a machine starts are its own, and with a remote store no
        other machine sees if they run."""
        run = self._run
        if attempt == 0:
            return run.provider.retried_by != "supervisor" or local_path(run.store.url) is not None
        sent = [noted for k in range(attempt) if (noted := run.store.submitted(run.run_id, k)) is not None]
        return handover.clients_retry(run, str(sent[-1]["native_id"]) if sent else None)

    def __call__(self, result: Mapping[str, Any]) -> bool:
        """Start another attempt, here or elsewhere; False if none should follow, or the run was cancelled."""
        run = self._run
        if run._follow_handover():
            self.begin()
            return True
        store = run.store
        newest = max(store.attempts(run.run_id))
        if handover.newer_attempt_exists(store, run.run_id, newest, result) or self._is_alive(newest, result):
            return True
        policy, history = AttemptPolicy.of_job(run.job.at(run.provider_name)), handover.history_of(run, newest, result)
        ending, before = self._endings(newest, result)
        decision = policy.decide(history, ending=ending, before=before, used=usage_of(result, self._clock()))
        if isinstance(decision, Next):
            if store.result(run.run_id) is not None:
                return True  # another client, with other records of the nodes, has ended the run
            if self._start(decision, result):
                return True
        elif decision.reason:
            self._say(f"no further attempt: {decision.reason}")
        return policy.moves(history) and self.move(result)

    def move(self, result: Mapping[str, Any]) -> bool:
        """Return False: a run without fallbacks has no next place."""
        return False

    def _endings(self, attempt: int, result: Mapping[str, Any]) -> tuple[Ending, Ending | None]:
        """Return how the attempt and the one before ended, as clients recorded it first: all clients judge by that."""
        run, store = self._run, self._run.store
        if result["category"] in NO_MACHINES:
            return Ending(), None
        checkpoint, exception = run.checkpoint(), ""
        if run.provider.retried_by != "supervisor":  # a supervisor's death says nothing of the script
            exception = exception_of(result["category"], result.get("reason") or "", result.get("failure"))
        ending = Ending(exception=exception, checkpoint=checkpoint.key if checkpoint is not None else None)
        recorded = store.write_ended(run.run_id, attempt, asdict(ending))
        before = store.ended(run.run_id, attempt - 1) if attempt else None
        return Ending.of_record(recorded), Ending.of_record(before) if before else None

    def _start(self, decision: Next, result: Mapping[str, Any]) -> bool:
        """Record and send the attempt, without the machines that failed before ``result``.

        Return False if it cannot be planned, or the run was cancelled.
        """
        run, store, number = self._run, self._run.store, decision.number
        last, job = store.attempt_request(run.run_id, number - 1), run.job.at(run.provider_name)
        if last is None or store.cancelled(run.run_id):
            return False
        gpu_index = last.gpu_index if decision.choice is None else decision.choice
        # The next supervisor counts by itself what is used up.
        rest = {} if run.provider.retried_by == "supervisor" else decision.limits
        provider = without_bad_machines(run.provider, result["attempts"]) or run.provider
        try:
            limited, nodes = job.replace(**rest), decision.nodes
            request = plan_attempt(provider, limited, self._layout, number, gpu_index, nodes=nodes)
        except SpecError as exc:
            self._say(f"no further attempt: {exc.with_hint()}")
            return False
        values = self._secrets()
        if store.create_attempt(run.run_id, number, request):
            gpus = job.resources.gpu if decision.choice is not None else ()
            left_out = ", ".join(bad_machines(result["attempts"])) if provider is not run.provider else ""
            words = [f" with GPU {gpus[gpu_index]}"] if gpus else []
            words += [f" with {plural(nodes, 'node')}"] if job.resources.min_instance_count else []
            words += [f" without the machines that failed twice: {left_out}"] if left_out else []
            self._say(f"starting attempt {number}{','.join(words)}")
            try:
                self._send(request, values)
            except LostContactError as exc:
                if not exc.passing:
                    raise
                why = exc.with_hint()
                self._say(f"attempt {number} could not be sent yet: {why}")  # `resend` or the next client sends it
        return True  # or another client has started it

    def _is_alive(self, attempt: int, result: Mapping[str, Any]) -> bool:
        """Return whether an attempt that ended as ``result``, by a refusal, was accepted nevertheless: another client
        or an earlier call sent it."""
        run, store = self._run, self._run.store
        noted = store.submitted(run.run_id, attempt)
        if store.refused(run.run_id, attempt) is None or (noted and noted["native_id"] == result["native_id"]):
            return False
        request = store.attempt_request(run.run_id, attempt)
        if store.submitted(run.run_id, attempt) is None and request is not None:
            native = patiently(partial(run.provider.find, request))
            if native is None:
                return False
            store.write_submitted(run.run_id, attempt, native)
        return True

    def _secrets(self) -> dict[str, str]:
        """Return the values to send with an attempt: each is a job of its own, which knows no other one's.

        Raises `SpecError` for an unset variable; a client that has it can go on then.
        """
        return secret_values(self._run.job, self._environ)

    @property
    def _layout(self) -> Layout:
        return Layout.from_dict(self._run.record["layout"])

    def _send(self, request: Request, values: Mapping[str, str]) -> None:
        """Send a request and record a refusal, so that the run does not wait for that attempt."""
        run = self._run
        write_context(run.store, self._layout, run.run_id)
        if max(run.store.attempts(run.run_id)) > request.attempt:
            return  # another client sent it, saw it fail and has continued
        try:
            deliver(run, request, values, say=self._say_wait)
        except handover.REFUSALS as exc:
            self._say(f"attempt {request.attempt} was refused: {exc.with_hint()}")


def category_of(exc: Exception) -> str:
    """Return the category of an attempt that a provider refused with ``exc``."""
    return next((category for category, kind in _KINDS.items() if isinstance(exc, kind)), "infra")


def error_of(category: str) -> type[CloudtrainError]:
    """Return the error class for a refusal of ``category``, the inverse of `category_of`."""
    return _KINDS.get(category, PlatformError)


def secret_values(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the ``env:`` references by variable. Raises `SpecError` for an unset variable."""
    values = {}
    for name, reference in job.secrets.items():
        scheme, _, variable = reference.partition(":")
        if scheme == "env":
            if variable not in environ:
                near = did_you_mean(variable, environ) or f"set it first: export {variable}=VALUE"
                raise SpecError(f"{variable} is not set here", field=f"secrets.{name}", hint=near)
            values[variable] = environ[variable]
    return values
