"""Setup of every test run: loopback servers, hypothesis profiles, and failures for skips that are not allowed."""

from __future__ import annotations

import copy
import fcntl
import functools
import gc
import json
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import botocore.loaders
import cyclopts
import cyclopts.argument._argument
import pytest
from hypothesis import HealthCheck, settings
from profiles import EXAMPLES, FEW, PROFILE, PROOF_EXAMPLES

from cloudtrain.store import runtime_zip

if TYPE_CHECKING:
    from jobs import Once

pytest_plugins = [
    "jobs", "servers", "third_party_fs", "containers", "trainings", "trials", "clients", "doctor_runs", "warm_cli",
    "built_wheel",
]  # fmt: skip

# Every test has its own store and needs the same zip in it. The zips of the providers share most of their modules.
runtime_zip.build = functools.cache(runtime_zip.build)
runtime_zip.digest = functools.cache(runtime_zip.digest)
runtime_zip._compiled = functools.cache(runtime_zip._compiled)

# No test cuts the power, so nothing has to reach the disk. A real fsync takes milliseconds.
os.fsync = lambda descriptor: None

# botocore reads a service's model, megabytes of JSON, for each session. The sessions of a worker share it.
_load_file = botocore.loaders.JSONFileLoader.load_file
_model = functools.cache(lambda path: _load_file(botocore.loaders.JSONFileLoader(), path))
botocore.loaders.JSONFileLoader.load_file = lambda self, file_path: _model(file_path)

# cyclopts makes some hundred objects for the flags of a verb at each command line. Make them once a process. Each
# command line gets copies, which hold its own words.
_assemble = cyclopts.App.assemble_argument_collection
_flags: dict[Any, cyclopts.ArgumentCollection] = {}


def _copied_flags(app: cyclopts.App, **more: Any) -> cyclopts.ArgumentCollection:
    key = (app.default_command, app.help_flags, *sorted(more.items()))
    if key not in _flags:
        _flags[key] = _assemble(app, **more)
    copies = {id(item): copy.copy(item) for item in _flags[key]}
    for item in copies.values():
        item.tokens = []
        item.children = cyclopts.ArgumentCollection(copies[id(child)] for child in item.children)
    return cyclopts.ArgumentCollection(copies.values())


cyclopts.App.assemble_argument_collection = _copied_flags

# Other tests import pydantic into this process. cyclopts then lets pydantic check every flag a second time, which takes
# half of the time of a `plan`. The real command has not imported pydantic when it parses its flags.
cyclopts.argument._argument.sys = SimpleNamespace(modules={})

settings.register_profile("fast", max_examples=FEW, deadline=None, derandomize=True)
settings.register_profile("default", max_examples=EXAMPLES, deadline=None, derandomize=True)
settings.register_profile(
    "proof",
    max_examples=int(os.environ.get("CLOUDTRAIN_TRIALS") or 0) or PROOF_EXAMPLES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(PROFILE)

_REFUSED = "CLOUDTRAIN_REQUIRE_ALL=1 lets nothing be skipped: "


_MARKED = re.compile(r"^pytestmark = (\[.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module in which ``-m`` selects no test: the SDKs and torch cost each worker seconds."""
    words = str(config.option.markexpr).split(" and ")
    left_out = {word.removeprefix("not ") for word in words if word.startswith("not ")}
    if collection_path.suffix != ".py" or not collection_path.stem.startswith("test_"):
        return None
    found = _MARKED.search(collection_path.read_text(encoding="utf-8"))
    marks = set(re.findall(r"pytest\.mark\.(\w+)", found[1])) if found else set()
    marks |= {"worlds"} if collection_path.stem.endswith("_world") else set()
    return True if marks & left_out else None


LIKE_LOCAL = (
    "test_docker",
    "test_sagemaker",
    "test_azureml",
    "test_vertex",
    "test_slurm",
    "test_kubernetes",
    "test_modelarts",
)
"""Modules whose contract jobs run in `make proof` only. Provider local shows the same behaviour in every suite."""


RACED = {
    "test_docker": "tests/providers/test_local.py: it has the same supervisor, and its lock",
    "test_sagemaker": "tests/providers/test_sagemaker.py::TestTrouble::test_many_clients_at_once_create_one_job",
    "test_azureml": "tests/providers/test_azureml_calls.py::test_many_clients_at_once_create_one_job",
    "test_vertex": "tests/providers/test_vertex_calls.py::test_many_clients_at_once_create_one_job",
    "test_slurm": "tests/providers/test_slurm_fire.py::test_clients_at_once_with_strikes_leave_one_job",
    "test_kubernetes": "tests/providers/test_kubernetes_fire.py::test_clients_at_once_under_fire_leave_one_job",
}
"""Modules whose race of two processes runs only in `make proof`. The named test races more clients at once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as proof or worlds.

    - Proof: jobs of other providers than local whose end our runtime decides.
    - Proof: under the proof profile, every property-based test.
    - Worlds: tests of the fake clouds themselves.

    This hook runs first, because xdist's own hook reads the groups.
    """
    for item in items:
        if item.path.stem.endswith("_world"):
            item.add_marker("worlds")
        if (scope := _scope(item)) is not None:
            _group(item, scope)
        alike = item.get_closest_marker("by_runtime") is not None and item.path.stem in LIKE_LOCAL
        alike |= item.name == "test_submitted_by_two_processes_is_one_job" and item.path.stem in RACED
        seeded = PROFILE == "proof" and getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if alike or seeded:
            item.add_marker("proof")


def pytest_collection_finish() -> None:
    """Let no garbage collection walk through the modules of all SDKs again."""
    gc.collect()
    gc.freeze()


def _group(item: pytest.Item, scope: str) -> None:
    """Let one worker run all items of ``scope``. xdist 3.8 does so by ``_nodeid``, which pytest 9.2 does not read."""
    item.add_marker(pytest.mark.xdist_group(scope))
    if vars(item.config.option).get("loadgroup") and hasattr(item, "_id"):
        item._id = type(item._id).parse(f"{item.nodeid}@{scope}")


def _scope(item: pytest.Item) -> str | None:
    """Return the name of the group of tests that one worker runs with this one; None if any worker may run it. Grouped
    tests share a fixture of their class or module, or are short. A test of minutes is a group alone. Quick trainings
    are forked from one process, which imports torch once for all of them."""
    if "trainings" in getattr(item, "fixturenames", ()):
        return "trainings"
    known = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    scopes = {one.scope for all_of_name in known for one in all_of_name if not one.argname.startswith("_xunit")}
    slow = item.get_closest_marker("slow") is not None
    path, _, rest = item.nodeid.partition("::")
    if "class" in scopes:
        return f"{path}-{rest.partition('::')[0]}-{slow}"
    return None if slow and "module" not in scopes else path


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return a function ``once(name, make)``: the first worker calls ``make()``, and all get its result through
    JSON."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder

    def of(name: str, make: Callable[[], Any]) -> Any:
        kept = folder / f"once-{name}.json"
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers wait here and then find the file
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
        report.longrepr = _REFUSED + _skip_reason(report)
        report.outcome = "failed"
        report.__dict__.pop("wasxfail", None)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if required() and report.skipped:
        report.longrepr = _REFUSED + _skip_reason(report)
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
    """Return True if a skip, an xfail and an xpass are failures."""
    return os.environ.get("CLOUDTRAIN_REQUIRE_ALL") == "1"


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
