"""Show how busy the nodes of a run were: one line of text, and curves over the minutes of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .curves import Curve, curves

NAMES = {
    "gpu": "GPU",
    "gpu_memory": "GPU memory",
    "cpu": "CPU",
    "memory": "memory",
    "disk": "disk",
    "data_wait": "data wait",
}
"""The numbers of `runtime.usage.UsageSampler` in the order in which they are shown, with their names."""


def usage_text(row: Mapping[str, float]) -> str:
    """Return ``GPU 87%, CPU 40%, …`` for a row of `LiveRunReader.usage`."""
    return ", ".join(f"{shown} {row[name]:.0f}%" for name, shown in NAMES.items() if name in row)


def usage_curves(usage: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Curve]:
    """Return a curve for each number, in percent, over the minutes since the first sample of the run."""
    began = min((row["time"] for rows in usage.values() for row in rows), default=0.0)
    placed = {
        attempt: [
            {"step": (row["time"] - began) / 60} | {shown: row[name] for name, shown in NAMES.items() if name in row}
            for row in rows
        ]
        for attempt, rows in usage.items()
    }
    found = {curve.name: curve for curve in curves(placed)}
    return [replace(found[shown], axis="minute", name=f"{shown} (%)") for shown in NAMES.values() if shown in found]
