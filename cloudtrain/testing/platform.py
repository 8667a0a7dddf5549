"""Define a provider's platform for the contract suite: faked at the wire, or a real account.

Jobs, plans, waiting and pulling are common to all platforms and written here. Only the platform's own parts are
abstract.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..provider_api.protocol import LogLine, Provider, Request
from ..runs.log_order import parse_line
from ..runs.run import Run
from ..runs.submit import Plan, send_plan
from . import probe
from .tables import RUN_ID, SECRET, Fields, Place, Sample, Seen, plan_of

__all__ = ["FakePlatform", "Impossible", "numbered", "to_end"]

POLL = 0.5
"""Seconds between two looks at a job of the suite. A look at a run in a bucket is a dozen calls of its store."""
PATIENCE = 120.0
"""Longest time of a job of the suite, and longest wait for one of its lines, in seconds."""


class Impossible(Exception):
    """Error: this platform has no such fault; the message says why."""


class FakePlatform(abc.ABC):
    """One platform and a store of it, both empty. Made with a folder for the suite's own files."""

    provider: Provider
    """The provider under test, made with settings that lead to this platform."""
    store: str
    """URL of an empty store that its nodes can reach."""
    nowhere: str
    """A native id in the platform's form, of a job that never existed."""

    def __init__(self, folder: Path, *, provider: Provider, store: str, nowhere: str, secret: str = "") -> None:
        self.folder, self.provider, self.store, self.nowhere = folder, provider, store, nowhere
        self.sample = Sample.of(type(provider))
        #: ``place.secret`` refers to a secret that has the value `tables.SECRET` on this platform.
        self.place = Place(folder / "place", store=store, provider=provider.name, secret=secret or self.sample.secret)

    # ----------------------------------------------------------------------------------------------- the platform's own

    @abc.abstractmethod
    def node(self, request: Request, number: int) -> AbstractContextManager[Mapping[str, str]]:
        """Return the environment in which the platform starts node ``number``, for `Provider.node_environment`."""

    @abc.abstractmethod
    def preempt(self, run: Run, number: int) -> None:
        """Take node ``number`` back as the platform would: its stop signal, its grace, its restart of all nodes."""

    @abc.abstractmethod
    def kill(self, run: Run, number: int) -> None:
        """Lose node ``number``, without a notice."""

    @abc.abstractmethod
    def fault(self, category: str) -> AbstractContextManager[Fields]:
        """Return a context whose fields make a job meet ``category`` (capacity, quota, auth, image). Raises
        `Impossible`."""

    def check(self, request: Request) -> None:
        """Raise unless the platform itself would accept the request: the vendor's own validator."""
        json.dumps(request.body, allow_nan=False)

    def named_by_options(self, request: Request) -> Any:
        """Return the part of the request whose fields a job's ``options`` name."""
        return request.body

    # ------------------------------------------------------------------------------------------ common to all platforms

    def plan(self, *parts: Fields, run_id: str = RUN_ID) -> Plan:
        """Return the plan of a job that this platform accepts, with the fields of ``parts`` (later ones win)."""
        return plan_of(self.provider, self.place, self.sample.job, *parts, run_id=run_id)

    def send(self, plan: Plan) -> Run:
        """Submit the plan for real."""
        return send_plan(plan, environ={probe.SECRET: SECRET})

    def await_line(self, run: Run, text: str) -> None:
        """Wait until every node of the run has printed a line with ``text``."""
        nodes = set(range(run.job.resources.instance_count))
        deadline = time.monotonic() + PATIENCE
        while not nodes <= {line.node for line in run.logs() if line.text == text}:
            if time.monotonic() > deadline or run.status().final:
                raise AssertionError(f"{run!r} did not print {text!r} on every node")
            time.sleep(POLL)

    def seen(self, run: Run) -> Seen:
        """Wait for the run, pull it, and read its ranks' records."""
        result = run.wait(timeout=PATIENCE, poll=POLL)
        folder = self.folder / "pulled" / run.run_id
        run.pull(folder)
        found = sorted(folder.glob("artifacts/rank-*.json"), key=lambda p: int(p.stem.removeprefix("rank-")))
        return Seen(ranks=tuple(json.loads(p.read_bytes()) for p in found), result=result, folder=folder)


def to_end(provider: Provider, native_id: str, cursor: Any = None) -> tuple[list[LogLine], Any]:
    """Return all further lines of the platform's own log of a job that has ended, and the cursor after them."""
    lines: list[LogLine] = []
    while True:
        page = provider.logs(native_id, cursor)
        cursor = json.loads(json.dumps(page.cursor))
        lines += page.lines
        if not page.more and not page.lines:
            return lines, cursor


def numbered(provider: Provider, native_id: str) -> list[tuple[str, int, int]]:
    """Return (attempt, node, number) of every numbered line of the platform's own log, in the order of its pages."""
    lines = map(parse_line, to_end(provider, native_id)[0])
    return [(*line.stream, line.seq) for line in lines if line.stream is not None]
