"""cloudtrain: one description of a distributed PyTorch job, the same run contract on every platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import CloudtrainError, SpecError, UnsupportedError
    from .estimator import Estimator, attach, plan, submit
    from .job.job import Input, Job, Resources, Source
    from .runs.run import Run
    from .runs.submit import Plan
    from .runs.sweeps.sweep import Sweep

__all__ = [
    "CloudtrainError",
    "Estimator",
    "Input",
    "Job",
    "Plan",
    "Resources",
    "Run",
    "Source",
    "SpecError",
    "Sweep",
    "UnsupportedError",
    "__version__",
    "attach",
    "plan",
    "submit",
]

_HOME = {
    "CloudtrainError": "errors",
    "SpecError": "errors",
    "UnsupportedError": "errors",
    "Estimator": "estimator",
    "attach": "estimator",
    "plan": "estimator",
    "submit": "estimator",
    "Run": "runs.run",
    "Plan": "runs.submit",
    "Sweep": "runs.sweeps.sweep",
    "Input": "job.job",
    "Job": "job.job",
    "Resources": "job.job",
    "Source": "job.job",
}


def __dir__() -> list[str]:
    return __all__  # a notebook completes these


def __getattr__(name: str) -> Any:
    # Loaded on first use: every rank that imports the small runtime module also pays for `import cloudtrain`.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .errors import shorten_tracebacks

    shorten_tracebacks()
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
