"""What every test run has in common: loopback servers, hypothesis profiles, and no skip where none is allowed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from jobs import Once

pytest_plugins = ["servers", "containers", "trainings", "trials", "clients", "doctoring"]

#: Examples of a property-based test that does not say how many it wants.
EXAMPLES, PROOF_EXAMPLES = 50, 1000

settings.register_profile("default", max_examples=EXAMPLES, deadline=None, derandomize=True)
settings.register_profile(
    "proof",
    max_examples=int(os.environ.get("CLOUDTRAIN_TRIALS") or 0) or PROOF_EXAMPLES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PROFILE = os.environ.get("CLOUDTRAIN_TEST_PROFILE", "default")
settings.load_profile(PROFILE)

_REFUSED = "CLOUDTRAIN_REQUIRE_ALL=1 lets nothing be skipped: "


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under the proof profile every property-based test is a proof, whether it says so or not."""
    if PROFILE == "proof":
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("proof")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, make)``: what ``make()`` gave to the first of all workers that asked, as JSON brings it back."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder

    def of(name: str, make: Callable[[], Any]) -> Any:
        kept = folder / f"once-{name}.json"
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # those who ask meanwhile wait, and find it
            if not kept.exists():
                data = json.dumps(make())
                kept.write_text(data)
        return json.loads(kept.read_text())

    return of


# ------------------------------------------------------------------------------------------------------- no silent skip


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if required() and (report.skipped or hasattr(report, "wasxfail")):
        report.longrepr = _REFUSED + _why(report)
        report.outcome = "failed"
        report.__dict__.pop("wasxfail", None)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if required() and report.skipped:
        report.longrepr = _REFUSED + _why(report)
        report.outcome = "failed"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for key in ("failed", "error") for r in terminalreporter.stats.get(key, ())]
    refused = [r for r in reports if str(r.longrepr).startswith(_REFUSED)]
    if refused:
        terminalreporter.section("skipped or expected to fail, which CLOUDTRAIN_REQUIRE_ALL=1 forbids")
        for report in refused:
            terminalreporter.line(f"{report.nodeid}: {str(report.longrepr).removeprefix(_REFUSED)}")


def required() -> bool:
    """Whether a skip, an xfail and an xpass are failures."""
    return os.environ.get("CLOUDTRAIN_REQUIRE_ALL") == "1"


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
