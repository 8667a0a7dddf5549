"""cloudtrain: one description of a distributed PyTorch job, the same run contract on every platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import CloudtrainError, SpecError, UnsupportedError
    from .estimator import Estimator
    from .job.job import Input, Job, Resources, Source
    from .runs.run import Run

__all__ = [
    "CloudtrainError",
    "Estimator",
    "Input",
    "Job",
    "Resources",
    "Run",
    "Source",
    "SpecError",
    "UnsupportedError",
    "__version__",
]

_HOME = {
    "CloudtrainError": "errors",
    "SpecError": "errors",
    "UnsupportedError": "errors",
    "Estimator": "estimator",
    "Run": "runs.run",
    "Input": "job.job",
    "Job": "job.job",
    "Resources": "job.job",
    "Source": "job.job",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: every rank that imports the small runtime module also pays for `import cloudtrain`.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
