"""``python tools/instances.py GPUS.csv > cloudtrain/data/instances.csv``: the machines of the platforms.

GPUS.csv is gathered by hand, each row with its sources. SageMaker's rows get their disks and architecture, and its
machines without a GPU follow. Their sources are the installed boto3 (the types) and moto (EC2's own description of
each). Azure ML's rows come from Azure's pages on sizes, for series that its clusters support.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import botocore.session
import moto

COLUMNS = (
    "provider", "instance_type", "accelerator_type", "gpu", "gpu_count", "gpu_memory_gib", "vcpus", "memory_gib",
    "disk_gb", "arch", "network", "offer", "source",
)  # fmt: skip
SOURCE = f"boto3 {version('boto3')} sagemaker TrainingInstanceType + moto {version('moto')} ec2 instance_types.json.gz"

AZURE = "MicrosoftDocs azure-compute-docs sizes"
AZURE_SIZES: dict[str, list[tuple[str, int, float]]] = {
    "general-purpose/dsv2-series.md": [
        (f"Standard_DS{n}_v2", cores, memory)
        for n, cores, memory in ((1, 1, 3.5), (2, 2, 7), (3, 4, 14), (4, 8, 28), (5, 16, 56))
    ],
    "general-purpose/ddsv4-series.md": [(f"Standard_D{n}ds_v4", n, n * 4) for n in (2, 4, 8, 16, 32, 48, 64)],
    "memory-optimized/edsv4-series.md": [
        *((f"Standard_E{n}ds_v4", n, n * 8) for n in (2, 4, 8, 16, 20, 32, 48)),
        ("Standard_E64ds_v4", 64, 504),
    ],
    "compute-optimized/fsv2-series.md": [(f"Standard_F{n}s_v2", n, n * 2) for n in (2, 4, 8, 16, 32, 48, 64, 72)],
}
"""Sizes without a GPU, vCPUs and GiB, by page. Azure ML's ``vmSizes`` decides if a region has them."""

RETIRED = {
    **dict.fromkeys(
        ("Standard_NC6s_v3", "Standard_NC12s_v3", "Standard_NC24s_v3", "Standard_NC24rs_v3"),
        ("2025-09-30", f" + {AZURE}/retirement/ncv3-nc6s-nc12s-nc24s-retirement.md"),
    ),
    "Standard_ND40rs_v2": ("2025-09-30", " (its retirement: likely, by the same date)"),
}
"""Machines that their platform no longer offers: the date and its source."""


def instance_types() -> list[str]:
    """Return every instance type of a training job."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    return list(model.shape_for("TrainingInstanceType").enum)


def instance_descriptions() -> dict[str, Any]:
    """Return EC2's DescribeInstanceTypes, by type."""
    with gzip.open(Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz") as stream:
        return dict(json.load(stream))


def rows(gathered: Path) -> Iterator[dict[str, Any]]:
    """Yield all rows of the table."""
    ec2 = instance_descriptions()
    with gathered.open(newline="", encoding="utf-8") as stream:
        known = list(csv.DictReader(stream))
    for row in known:
        grace = row["gpu"].startswith("GB")  # a GPU on one board with an Arm processor
        date, source = RETIRED.get(row["instance_type"], ("", ""))
        yield {
            **row,
            **({"offer": f"retired {date}", "source": row["source"] + source} if date else {}),
            "arch": "arm64" if grace else "x86_64",
            **(_disk(ec2.get(row["instance_type"].removeprefix("ml."))) if _ours(row) else {}),
        }
    with_gpu = {row["instance_type"] for row in known}
    for name in instance_types():
        description = ec2.get(name.removeprefix("ml."))
        if name in with_gpu or description is None or "NeuronInfo" in description or "GpuInfo" in description:
            continue
        yield {
            "provider": "sagemaker",
            "instance_type": name,
            "gpu_count": 0,
            "vcpus": description["VCpuInfo"]["DefaultVCpus"],
            "memory_gib": f"{description['MemoryInfo']['SizeInMiB'] / 1024:g}",
            "network": description["NetworkInfo"]["NetworkPerformance"],
            "source": SOURCE,
            **_disk(description),
        }
    for page, sizes in AZURE_SIZES.items():
        for name, cores, memory in sizes:
            yield {
                "provider": "azureml",
                "instance_type": name,
                "gpu_count": 0,
                "vcpus": cores,
                "memory_gib": f"{memory:g}",
                "arch": "x86_64",
                "source": f"{AZURE}/{page}",
            }


def _ours(row: dict[str, str]) -> bool:
    return row["provider"] == "sagemaker"


def _disk(description: Any) -> dict[str, Any]:
    if description is None:
        return {}
    (arch,) = {"x86_64", "arm64"} & set(description["ProcessorInfo"]["SupportedArchitectures"])
    return {"disk_gb": description.get("InstanceStorageInfo", {}).get("TotalSizeInGB", ""), "arch": arch}


if __name__ == "__main__":
    writer = csv.DictWriter(sys.stdout, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(Path(sys.argv[1])))
