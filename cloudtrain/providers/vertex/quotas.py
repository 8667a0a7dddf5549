"""Count the quotas of Vertex AI that a job's machines use, by metric. Pure.

Names of accelerators: ``get_resource_id`` in Google's vertex-ai-samples (``common_util.py`` of Model Garden). It has no
P4 and B200: users report P4, and B200 follows the Dynamic Workload Scheduler's page. No source names GB200 and RTX PRO
6000, so they are not counted. Cores: Google's page on reserving quota says that ``custom_model_training_cpus`` is for
N1 and E2. Users report one metric for each other family.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .machines import told_as

__all__ = ["CPUS", "GPUS", "metrics"]

GPUS: Mapping[str, str] = {
    "NVIDIA_TESLA_T4": "nvidia_t4_gpus",
    "NVIDIA_TESLA_P4": "nvidia_p4_gpus",
    "NVIDIA_TESLA_P100": "nvidia_p100_gpus",
    "NVIDIA_TESLA_V100": "nvidia_v100_gpus",
    "NVIDIA_L4": "nvidia_l4_gpus",
    "NVIDIA_TESLA_A100": "nvidia_a100_gpus",
    "NVIDIA_A100_80GB": "nvidia_a100_80gb_gpus",
    "NVIDIA_H100_80GB": "nvidia_h100_gpus",
    "NVIDIA_H100_MEGA_80GB": "nvidia_h100_mega_gpus",
    "NVIDIA_H200_141GB": "nvidia_h200_gpus",
    "NVIDIA_B200": "nvidia_b200_gpus",
}
"""End of a metric's name, by accelerator."""
CPUS: Mapping[str, str] = {
    "n1": "cpus",
    "e2": "cpus",
    **{family: f"{family}_cpus" for family in ("n2", "n4", "c2", "g2", "a2", "a3", "m1")},
}
"""End of a metric's name, by family of machines. A machine with a GPU counts here too: a real 429 of an N1 machine
names both."""
RESTRICTED = "/vertex-ai-restricted/"
"""Part of an image's name whose jobs have their own quotas."""


def metrics(spec: Mapping[str, Any]) -> Counter[str]:
    """Return a job's use of each quota, by metric; empty if no source names one.

    ``spec`` is the jobSpec. SPOT and FLEX_START count against the preemptible metrics. Of those for cores only that of
    N1 and E2 is known (a recorded 429).
    """
    preemptible = (spec.get("scheduling") or {}).get("strategy") in ("SPOT", "FLEX_START")
    found = Counter[str]()
    for pool in spec["workerPoolSpecs"]:
        machine, count = pool["machineSpec"], int(pool["replicaCount"])
        image = str((pool.get("containerSpec") or {}).get("imageUri") or "")
        group = "restricted_image_training_" if RESTRICTED in image else "custom_model_training_"
        prefix = group + ("preemptible_" if preemptible else "")
        if gpu := GPUS.get(str(machine.get("acceleratorType") or "")):
            found[prefix + gpu] += int(machine.get("acceleratorCount") or 0) * count
        cpus = CPUS.get(str(machine["machineType"]).partition("-")[0])
        if cpus == "cpus" or (cpus and not preemptible):
            found[prefix + cpus] += _cores(machine) * count
    return +found


def _cores(spec: Mapping[str, Any]) -> int:
    """Return the cores of a machineSpec, from the machine's name if the table lacks it."""
    machine = told_as(spec)
    if machine is not None and machine.vcpus:
        return machine.vcpus
    size = re.search(r"-(\d+)$", str(spec["machineType"]))
    return int(size[1]) if size else 0
