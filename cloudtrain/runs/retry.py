"""Take the next step of a waiting client: another attempt, if the platform starts none, or the run's next place."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CapacityError, ConflictError, LostContactError, QuotaError, SpecError, StorageError
from ..job.job import Job
from ..provider_api.node_count import plan_attempt
from ..provider_api.protocol import Layout, Request, extras_of
from ..storage.files import Progress
from ..storage.local_disk import local_path
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store, manifest_key
from . import handover
from .attempts import NO_MACHINES, AttemptPolicy, Ending, Next, exception_of, usage_of
from .deliver import deliver, secret_values, write_context
from .log_sources import patiently
from .machines import bad_machines, without_bad_machines
from .run import Run
from .submit import Fallbacks, Plan, plan_of_record, send_plan
from .summary import plural


class Retry:
    """The next steps of a waiting client after a failed attempt: another attempt, or the next place of the run.

    Clients start another attempt unless the platform does. If no further attempt can have machines, the run and its
    handle move to the next place. Creating a `Retry` sends an attempt that an earlier client recorded but never sent;
    `resend` does so for a client that dies later. `AttemptPolicy` and `handover` decide what follows, on any client by
    the same records.

    ``environ`` has the values of ``env:`` references. ``clock`` gives Unix seconds. ``plans`` are those of the
    submitting client. Any other client makes the next plan from the records, and copies code and data from the store
    that is left. ``progress`` and ``moved`` are called as files are staged.
    """

    def __init__(
        self,
        run: Run,
        say: Callable[[str], None] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        plans: Sequence[Plan] = (),
        progress: Callable[[str], None] | None = None,
        moved: Progress | None = None,
    ) -> None:
        self._run, self._say, self._clock = run, say or (lambda _: None), clock
        self._say_wait = say
        self._environ = os.environ if environ is None else environ
        self._plans, self._progress, self._moved = {plan.run_url: plan for plan in plans}, progress, moved
        self._due: dict[tuple[str, int], float] = {}
        run._follow_handover()
        attempts = run.store.attempts(run.run_id)
        if attempts and run.store.result(run.run_id) is None:
            self.send(max(attempts))
        self.begin()

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
        newest = store.newest_attempt(run.run_id)
        if handover.newer_attempt_exists(store, run.run_id, newest, result) or self._is_alive(newest, result):
            return True
        policy, history = AttemptPolicy.of_job(run._own_job), handover.history_of(run, newest, result)
        ending, before = self._endings(newest, result)
        decision = policy.decide(history, ending=ending, before=before, used=usage_of(result, self._clock()))
        if isinstance(decision, Next):
            if store.result(run.run_id) is not None:
                return True  # another client, with other records of the nodes, has ended the run
            if self._start(decision, result):
                return True
        elif decision.reason:
            self._say(f"no further attempt: {decision.reason}")
        return policy.moves(history) and self._move(result)

    def _endings(self, attempt: int, result: Mapping[str, Any]) -> tuple[Ending, Ending | None]:
        """Return how the attempt and the one before ended, as clients recorded it first: all clients judge by that."""
        run, store = self._run, self._run.store
        if result["category"] in NO_MACHINES:
            return Ending(), None
        checkpoint, exception = run.checkpoint(), ""
        if run.provider.retried_by != "supervisor":  # a supervisor's death says nothing of the script
            exception = exception_of(result["category"], result.get("reason") or "", result.get("failure"))
        ending = Ending(exception=exception, checkpoint=checkpoint.key if checkpoint is not None else None)
        recorded = store.write_ended(run.run_id, attempt, dataclasses.asdict(ending))
        before = store.ended(run.run_id, attempt - 1) if attempt else None
        return Ending.of_record(recorded), Ending.of_record(before) if before else None

    def _start(self, decision: Next, result: Mapping[str, Any]) -> bool:
        """Record and send the attempt, without the machines that failed before ``result``.

        Return False if it cannot be planned, or the run was cancelled.
        """
        run, store, number = self._run, self._run.store, decision.number
        last, job = store.attempt_request(run.run_id, number - 1), run._own_job
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
        if run.store.newest_attempt(run.run_id) > request.attempt:
            return  # another client sent it, saw it fail and has continued
        try:
            deliver(run, request, values, say=self._say_wait)
        except handover.REFUSALS as exc:
            self._say(f"attempt {request.attempt} was refused: {exc.with_hint()}")

    # ----------------------------------------------------------------------------------------------- the next place

    def _move(self, result: Mapping[str, Any]) -> bool:
        """Move the run to its next place, which ended here with ``result``. Return True."""
        run = self._run
        refusals = list(result.get("refusals") or ())
        for row in result["attempts"]:  # accepted, but ended without machines
            request = run.store.attempt_request(run.run_id, int(str(row["number"]).partition(".")[0]))
            if row["category"] in NO_MACHINES and request is not None:
                refusals.append(handover.refusal_of(run, row, request.gpu_index))
        if not refusals:
            request = run.store.attempt_request(run.run_id, run.store.newest_attempt(run.run_id))
            refusals.append(handover.refusal_of(run, result, request.gpu_index if request is not None else 0))
        from ..store.copies import PreviousPlace

        left = PreviousPlace(run.store, Layout.from_dict(run.record["layout"]))
        (record, *rest) = handover.fallbacks_of(run)
        following = self._plans.get(str(record["run"])) or self._recorded(record, rest)
        chain = dataclasses.replace(following.fallbacks, refusals=tuple(refusals), left=left)
        plan = dataclasses.replace(following, fallbacks=chain)
        self._say(f"{refusal_text(refusals[-1])}; continuing on {name_of(plan)}")

        def leave() -> None:
            reason = f"{result['reason']}; it continued at {plan.run_url}"
            if not handover.decide(run.store, run.run_id, plan.run_url, run._kept({**result, "reason": reason})):
                raise ConflictError(f"{run.url} was moved elsewhere by another client", field="run_id")
            if run.store.cancelled(run.run_id):  # the cancelling client looks here next, so one of the two acts
                plan.store.cancel(plan.run_id)

        try:
            with handover.moving(run.store, run.run_id):  # it may copy data for hours
                self._send_plan(plan, decide=leave)
        finally:
            run._follow_handover()
        return True

    def begin(self) -> None:
        """Start the run in its new place if the client that moved it there has died."""
        run = self._run
        if run._handed_over and not run.store.attempts(run.run_id) and not run.store.cancelled(run.run_id):
            self._say(f"starting it in {run.store.url}, to which it had come")
            self._send_plan(self._recorded(run.record, handover.fallbacks_of(run)))
            run._follow_handover()

    def _send_plan(self, plan: Plan, decide: Callable[[], object] | None = None) -> None:
        """Send the plan; report a refusal for lack of machines."""
        check_installed(plan)  # before anything is decided: another client may have the packages
        try:
            send_plan(plan, environ=self._environ, progress=self._progress, moved=self._moved, decide=decide)
        except (CapacityError, QuotaError) as exc:
            self._say(f"{name_of(plan)} refused it: {exc.with_hint()}")

    # -------------------------------------------------------------------------------------- the next place, as recorded

    def _recorded(self, record: Mapping[str, Any], rest: Sequence[Mapping[str, Any]]) -> Plan:
        """Return the plan of a place made from its record alone; ``rest`` are the places after it."""
        from ..store.copies import with_own_copies

        settings = self._run._settings
        provider = settings.provider_of(record)
        layout, job = Layout.from_dict(record["layout"]), Job.from_dict(record["job"])
        store = Store(layout.store, storage=provider.storage, moving=settings.moving_of(record))
        own = with_own_copies(layout)  # else planned by an earlier version
        if own != layout and not store.has_run(layout.run_id):
            layout = own
        fallbacks = Fallbacks(
            rest=tuple(rest),
            first=str(self._run.record.get("first") or self._run.url),
            refusals=tuple(record.get("refusals") or ()),
        )
        plan = plan_of_record(
            record,
            job,
            layout,
            store=store,
            provider=provider,
            settings=settings,
            fetch=self._held,
            fallbacks=fallbacks,
        )
        try:
            for name, item in layout.inputs.items():
                if item.source is None and item.url.startswith(f"{layout.store}/data/"):
                    self._bring(item.url.removeprefix(f"{layout.store}/data/").partition("/")[0], store, name)
        except BaseException:
            store.withdraw(plan.run_id)
            raise
        return plan

    def _held(self, key: str) -> bytes:
        """Return the previous place's content of ``key``. Raises `StorageError` if missing: this cloudtrain differs
        from the submitter's, and a third-party provider needs a runtime of its own."""
        run = self._run
        try:
            return run.store.files.read(key)
        except FileNotFoundError:
            again = f"submit the same job again with --run-id {run.run_id}, by the same version of cloudtrain"
            why = f"{run.store.url}/{key} is missing, so the next store cannot get it"
            raise StorageError(why, hint=again) from None

    def _bring(self, digest: str, store: Store, name: str) -> None:
        """Copy a data tree from this run's store into ``store`` and check each digest, unless it is complete there."""
        old, manifest = self._run.store, manifest_key(digest)
        store.announce(self._run.run_id, [digest], say=self._say)  # from here on no client deletes the tree
        if store.files.exists(manifest):
            return
        listed = old.record(manifest)
        if listed is None:
            again = f"submit the same job again with --run-id {self._run.run_id} on a machine that has the data"
            raise StorageError(f"inputs.{name}: {old.url} has no copy of it for {store.url}", hint=again)
        self._say(f"copying {name} to {store.url}")
        import tempfile

        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            for path, item in sorted(listed["files"].items()):
                here = Path(folder, hashlib.sha256(path.encode()).hexdigest())
                old.files.download(f"data/{digest}/{path}", here, sha256=item["sha256"], size=item["size"])
                store.files.upload(here, f"data/{digest}/{path}", progress=self._moved)
                os.unlink(here)
        store.files.write(manifest, old.files.read(manifest))


def name_of(plan: Plan) -> str:
    """Return the provider and region of a plan, for people."""
    return " ".join(filter(None, [plan.provider_name, handover.region_of_provider(plan.provider)]))


def check_installed(plan: Plan) -> None:
    """Raise `SpecError` if the packages of a cloud's plan are not installed here, so this client could not send it."""
    if "file" in plan.provider.schemes:
        return
    check = next(extras_of(plan.provider).checks("", None), None)
    if check is not None and check.name == "sdk" and check.status == "failed":
        raise SpecError(check.detail, field=f"fallback {plan.settings.profile}".strip(), hint=check.fix)


def refusal_text(refusal: Mapping[str, Any]) -> str:
    """Return a refusal in one line, for people: the provider, its region, the GPU and the reason."""
    where = " ".join(filter(None, [refusal["provider"], refusal["place"], refusal["gpu"]]))
    return f"{where}: {refusal['reason']}"
