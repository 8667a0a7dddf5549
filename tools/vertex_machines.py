"""``python tools/vertex_machines.py cloudtrain/data/instances.csv``: write the N1 machines of Vertex AI into the table.

A GPU goes with an N1 machine in so many combinations that Google's own rule makes them. It is on the page "Configure
compute resources for serverless training" (copy of 2026), section GPUs. A number of GPUs provides so many cores and so
much memory, and a machine may not be larger. It is stricter than Compute Engine's.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB_PER_CORE = {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}
CORES = {"standard": (4, 8, 16, 32, 64, 96), "highmem": (2, 4, 8, 16, 32, 64, 96), "highcpu": (16, 32, 64, 96)}
"""The N1 machines of the page's list."""
MOST = {("standard", 96): 360.0, ("highmem", 96): 624.0, ("highcpu", 96): 86.4}
GPUS: dict[str, tuple[str, int, dict[int, tuple[int, int]]]] = {
    "NVIDIA_TESLA_T4": ("T4", 16, {1: (24, 156), 2: (48, 312), 4: (96, 624)}),
    "NVIDIA_TESLA_P4": ("P4", 8, {1: (24, 156), 2: (48, 312), 4: (96, 624)}),
    "NVIDIA_TESLA_P100": ("P100", 16, {1: (16, 104), 2: (32, 208), 4: (64, 208)}),
    "NVIDIA_TESLA_V100": ("V100-16GB", 16, {1: (12, 78), 2: (24, 156), 4: (48, 312), 8: (96, 624)}),
}
"""By Vertex AI's name: the catalogue's name, GiB, and the most cores and GiB of a machine by its number of GPUs."""
PAGE = "Google's page configure-compute of serverless training (copy of 2026)"


def machines() -> Iterator[tuple[str, int, float]]:
    """Yield (name, cores, GiB) of every N1 machine."""
    for kind, sizes in CORES.items():
        for cores in sizes:
            yield f"n1-{kind}-{cores}", cores, MOST.get((kind, cores), cores * GIB_PER_CORE[kind])


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of all N1 machines, those with GPUs first."""
    for accelerator, (gpu, gib, limits) in GPUS.items():
        for count, (most_cores, most_gib) in limits.items():
            for name, cores, memory in machines():
                if cores <= most_cores and memory <= most_gib:
                    yield {
                        **_row(name, cores, memory, "up to 100 Gbps by GPU and vCPU count"),
                        "accelerator_type": accelerator,
                        "gpu": gpu,
                        "gpu_count": count,
                        "gpu_memory_gib": gib,
                        "source": f"{PAGE}: with {count} at most {most_cores} cores and {most_gib} GiB",
                    }
    for name, cores, memory in machines():
        yield _row(name, cores, memory, "up to 32 Gbps by vCPU count")


def _row(name: str, cores: int, memory: float, network: str) -> dict[str, Any]:
    return {
        "provider": "vertex",
        "instance_type": name,
        "gpu_count": 0,
        "vcpus": cores,
        "memory_gib": f"{memory:g}",
        "arch": "x86_64",
        "network": network,
        "source": f"{PAGE}; sizes as of Compute Engine's N1 machine types",
    }


def main(path: Path) -> None:
    """Replace the N1 rows in the table."""
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        known, columns = list(reader), list(reader.fieldnames or ())
    ours = [row["provider"] == "vertex" and row["instance_type"].startswith("n1-") for row in known]
    first = ours.index(True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row, own in zip(known[:first], ours, strict=False) if not own)
        writer.writerows(rows())
        writer.writerows(row for row, own in zip(known[first:], ours[first:], strict=True) if not own)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
