"""Fake every provider's platform for tests of a user's own code: plans stay real, and jobs are sent here.

`FakeCloud` replaces a provider's calls to its platform (submit, find, status, logs, cancel, storage). Plans, refusals
and settings stay the real ones, which need no network, no credentials and no SDK. ``requests`` keeps the sent requests.
They are then scripted (`succeed`, `fail`, …) or really run (`run_locally`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CATEGORIES, CloudtrainError, NotFoundError, QuotaError, SpecError
from ..job.job import Job
from ..provider_api.node import attempt_key
from ..provider_api.protocol import AttemptInfo, Layout, LogLine, LogPage, Provider, Request, Status
from ..provider_api.registry import find_provider, provider_names
from ..runs.attempts import NOT_RETRIED
from ..store import runtime_zip
from ..store.store import Store
from .local_job import LocalJob, LocalRun, Notice
from .requests import ANY, assert_request
from .script import Checkpoints, Files, Left, Outcome, failed, write

if TYPE_CHECKING:
    import pytest

__all__ = ["FakeCloud"]

REHEARSAL = "rehearsal"
"""A provider that users do not choose, so it is not among their names."""
PACE_SECONDS = 0.01
_build = functools.cache(runtime_zip.build)
"""Every test's store is empty, and the same runtime is put there."""


@dataclass
class _Native:
    """A platform's knowledge of one job."""

    request: Request
    provider: Provider
    status: Status
    lines: list[LogLine] = field(default_factory=list)
    attempts: list[AttemptInfo] = field(default_factory=list)
    local: LocalJob | None = None


class FakeCloud:
    """Fake of every provider's platform while a test runs; ``folder`` is for jobs that really run.

    `succeed`, `fail`, `preempt`, `capacity`, `refuse` and `hold` script the next attempt without a script. Each returns
    the cloud, so that calls can be chained. An attempt without a script succeeds, or is run after `run_locally`. If the
    platform starts a job again (a preemption; a retry by a supervisor), the job takes the next word of the script. A
    job that began scripted is never run.
    """

    def __init__(self, folder: Path) -> None:
        self.requests: list[Request] = []
        """Every request that was sent, in order, also those that were refused."""
        self._folder, self._script = folder, deque[Outcome]()
        self._local_run: LocalRun | None = None
        self._natives: dict[str, _Native] = {}
        self._sent: dict[tuple[str, int, int], str] = {}

    # ------------------------------------------------------------------------------------------------------ the script

    def succeed(
        self,
        *,
        logs: Sequence[str] = (),
        metrics: Sequence[Mapping[str, Any]] = (),
        artifacts: Files | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> FakeCloud:
        """Let the next attempt succeed and leave this; a checkpoint is ``{"step-10": {"model.pt": b"…"}}``."""
        return self._add(Outcome(left=Left(logs, metrics, artifacts, checkpoints)))

    def fail(
        self,
        exception: BaseException | str = "RuntimeError: scripted",
        *,
        rank: int = 0,
        node: int = 0,
        category: str = "",
        logs: Sequence[str] = (),
        metrics: Sequence[Mapping[str, Any]] = (),
        artifacts: Files | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> FakeCloud:
        """Let a rank of the next attempt raise ``exception``, once it has left this.

        ``category``: of the run (``stalled``, ``infra``…). The runtime's default is ``oom`` for out of memory, else
        ``user_error``.
        """
        if category and category not in CATEGORIES:
            raise ValueError(f"no category of a run is called {category!r}; there are {', '.join(CATEGORIES)}")
        left = Left(logs, metrics, artifacts, checkpoints)
        return self._add(failed(exception, node=node, rank=rank, kind=category, left=left))

    def preempt(
        self,
        *,
        logs: Sequence[str] = (),
        metrics: Sequence[Mapping[str, Any]] = (),
        artifacts: Files | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> FakeCloud:
        """Take the next attempt's machine away once it has left this; the platform then starts it again."""
        left = Left(logs, metrics, artifacts, checkpoints)
        reason = "node 0 got a stop signal (SIGTERM)"
        return self._add(Outcome(kind="preempted", category="preempted", reason=reason, left=left))

    def capacity(self, reason: str = "no machines (scripted)") -> FakeCloud:
        """Fail the next attempt for lack of machines: another GPU of the list may follow."""
        return self._add(Outcome(kind="failed", category="capacity", reason=reason))

    def refuse(self, error: CloudtrainError | str = "the quota is too small (scripted)") -> FakeCloud:
        """Refuse the next request: sending it raises ``error``, a `QuotaError` if that is text."""
        raised = QuotaError(error) if isinstance(error, str) else error
        if not isinstance(raised, CloudtrainError):
            raise TypeError(f"a provider raises errors of cloudtrain.errors, not {raised!r}")
        return self._add(Outcome(kind="refused", error=raised))

    def hold(self, state: str = "running", reason: str = "") -> FakeCloud:
        """Keep the next attempt as it is (``pending``, ``running``) until it is cancelled, or `release` is called."""
        if state not in ("pending", "running"):
            raise ValueError(f"a job is held pending or running, not {state!r}")
        return self._add(Outcome(kind="held", state=state, reason=reason))

    def release(self) -> None:
        """Continue every held job with the next word of the script."""
        for native_id, native in self._natives.items():
            if native.local is None and not native.status.final:
                held = native.attempts.pop()
                self._play(native_id, native, held.number, began=held.started)

    def run_locally(
        self,
        *,
        preempt_at_step: int | Sequence[int] = (),
        preempt_after: float | Sequence[float] = (),
        preempt_node: int = 0,
        processes: int | None = None,
        inputs: Mapping[str, str | Path] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> FakeCloud:
        """Really run, as processes of this machine, every attempt without a script.

        Its first starts are preempted when the script's metrics reach ``preempt_at_step``, or ``preempt_after``
        seconds, one value a start. The node gets the notice, and the usual grace. ``processes`` is ranks on each node;
        default: the job's own number, 1 if it asks for GPUs, which are not looked for. ``inputs`` are paths by channel
        and ``secrets`` values by name. They replace what only the platform can read.
        """
        steps = [preempt_at_step] if isinstance(preempt_at_step, int) else [*preempt_at_step]
        after = [preempt_after] if isinstance(preempt_after, (int, float)) else [*preempt_after]
        if steps and after:
            raise ValueError("preempt_at_step or preempt_after, not both")
        notices = [Notice(step=step, node=preempt_node) for step in steps]
        notices += [Notice(after=seconds, node=preempt_node) for seconds in after]
        self._local_run = LocalRun(notices=notices, processes=processes, inputs=inputs or {}, secrets=secrets or {})
        return self

    # ---------------------------------------------------------------------------------------------------- sent requests

    def assert_request(self, path: str, *, equals: Any = ANY, request: Request | None = None) -> Any:
        """Return the value at ``path`` (``ResourceConfig.InstanceCount``, ``nodes.0.env``) of a request's body, by
        default the last one's. Raises AssertionError if there is none, or it is not ``equals``."""
        if request is None and not self.requests:
            raise AssertionError("nothing has been sent")
        chosen = self.requests[-1] if request is None else request
        return assert_request(chosen, path, equals=equals)

    # ----------------------------------------------------------------------------------------------------- the platform

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace every provider's platform until the test is over."""
        cloud = self

        def submit(self: Provider, request: Request, secrets: Mapping[str, str] | None = None) -> str:
            return cloud._submit(self, request, secrets or {})

        calls: dict[str, Any] = {
            "submit": submit,
            "find": lambda _, request: cloud._sent.get(_key(request)),
            "status": lambda _, native_id: cloud._status(native_id),
            "logs": lambda _, native_id, cursor=None: cloud._logs(native_id, cursor),
            "cancel": lambda _, native_id: cloud._cancel(native_id),
            "storage": lambda _, url: {},
            "principal": lambda _: None,
            "objects": lambda _: (),
            "image_digest": lambda _, request: None,
            "min_poll_s": PACE_SECONDS,
            "max_poll_s": PACE_SECONDS,
        }
        monkeypatch.setattr(runtime_zip, "build", _build)
        for name in (*provider_names(), REHEARSAL):
            with contextlib.suppress(ImportError):  # a third party's broken package fails where a test names it
                kind = find_provider(name)
                for call, instead in calls.items():
                    monkeypatch.setattr(kind, call, instead, raising=False)

    def close(self) -> None:
        """Stop the jobs that still run."""
        for native in self._natives.values():
            if native.local is not None:
                native.local.close()

    def _add(self, outcome: Outcome) -> FakeCloud:
        self._script.append(outcome)
        return self

    def _submit(self, provider: Provider, request: Request, secrets: Mapping[str, str]) -> str:
        if _key(request) in self._sent:
            return self._sent[_key(request)]
        self.requests.append(request)
        if self._local_run is not None and not self._script:
            folder = self._folder / f"job-{len(self.requests)}"
            local = LocalJob(
                folder=folder, provider=provider, request=request, local_run=self._local_run, secrets=secrets
            )
            self._natives[local.native_id] = _Native(request, provider, Status(state="pending"), local=local)
            self._sent[_key(request)] = local.native_id
            return local.native_id
        if self._script and (error := self._script[0].error) is not None:
            self._script.popleft()
            raise error
        native_id = f"fake-{request.run.rpartition('/')[2]}-{request.attempt}"
        native = self._natives[native_id] = _Native(request, provider, Status(state="pending"))
        self._sent[_key(request)] = native_id
        self._play(native_id, native, f"{request.attempt}.0")
        return native_id

    def _play(self, native_id: str, native: _Native, number: str, *, began: float | None = None) -> None:
        """Play the attempt ``number`` and the platform's later ones, until the script ends them."""
        url, _, run_id = native.request.run.rpartition("/runs/")
        store, nodes = Store(url), int(native.request.context["nodes"])
        while True:
            outcome = self._script.popleft() if self._script else Outcome()
            if outcome.error is not None:
                raise SpecError("refuse() is said of a request, and this attempt has been taken", field="script")
            before = native.attempts[-1].number if native.attempts else _last(store, run_id)
            started, began = began or time.time(), None
            info, lines = write(store, run_id, number, outcome, nodes=nodes, before=before, started=started)
            native.attempts.append(dataclasses.replace(info, native_id=native_id))
            native.lines += lines
            following = self._following(native, number, outcome, store, run_id)
            if following is None:
                break
            number = following
        state = {"held": outcome.state, "succeeded": "succeeded"}.get(outcome.kind, "failed")
        native.status = Status(
            state=state,
            native=outcome.kind,
            reason=outcome.reason,
            category=outcome.category,
            attempts=tuple(native.attempts),
            started=native.attempts[0].started,
            finished=native.attempts[-1].ended,
        )

    def _following(self, native: _Native, number: str, outcome: Outcome, store: Store, run_id: str) -> str | None:
        """Return the attempt that the platform itself starts next, recorded as its supervisor records it."""
        k, _, r = number.partition(".")
        if outcome.kind == "preempted":
            return f"{k}.{int(r) + 1}"
        if native.provider.retried_by != "supervisor" or outcome.kind != "failed" or outcome.category in NOT_RETRIED:
            return None
        record = store.run(run_id)
        job = Job.from_dict(record["job"]).at(record["provider"])
        if int(k) >= job.retries:
            return None
        request = native.provider.plan(job, Layout.from_dict(record["layout"]), attempt=int(k) + 1)
        store.create_attempt(run_id, int(k) + 1, request)
        store.write_submitted(run_id, int(k) + 1, self._sent[_key(native.request)])
        return f"{int(k) + 1}.0"

    def _native(self, native_id: str) -> _Native:
        if native_id not in self._natives:
            raise NotFoundError(f"no job {native_id}")
        return self._natives[native_id]

    def _status(self, native_id: str) -> Status:
        native = self._native(native_id)
        return native.status if native.local is None else native.local.status()

    def _logs(self, native_id: str, cursor: Any) -> LogPage:
        native = self._native(native_id)
        if native.local is not None:
            return native.local.logs(cursor)
        return LogPage(lines=tuple(native.lines[cursor or 0 :]), cursor=len(native.lines))

    def _cancel(self, native_id: str) -> None:
        native = self._native(native_id)
        if native.local is not None:
            native.local.cancel()
        elif not native.status.final:
            native.status = dataclasses.replace(
                native.status, state="cancelled", category="cancelled", reason="cancelled", finished=time.time()
            )


def _key(request: Request) -> tuple[str, int, int]:
    return request.run, request.attempt, request.gpu_index


def _last(store: Store, run_id: str) -> str:
    """Return the attempt that a further one follows: the newest with a record."""
    return max((str(record["attempt"]) for record in store.starts(run_id)), key=attempt_key, default="")
