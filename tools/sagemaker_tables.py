"""``python tools/sagemaker_tables.py limits|images FOLDER``: the facts that the SageMaker provider needs without an
SDK.

- ``limits``: botocore's model of CreateTrainingJob, into FOLDER/limits.json (from the installed botocore);
- ``images``: AWS's PyTorch images by version and region, and the GPUs that each serves, into FOLDER/images.json (from
  sagemaker-core's tables, which must be on PYTHONPATH).

FOLDER is ``cloudtrain/providers/sagemaker``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import botocore.session

OPERATION = "CreateTrainingJob"
KEPT = ("min", "max", "pattern")
NO_REQUEST = frozenset({"ServerlessJobConfig", "SelectedInstanceType", "SelectedInstanceCount"})
"""Members of another kind of job, and members that only an answer has."""
OLDEST = (2, 0)
"""First version whose images have the Python that a node needs."""
CUDA = {
    "2.0.0": "11.8",
    "2.0.1": "11.8",
    "2.1.0": "12.1",
    "2.2.0": "12.1",
    "2.3.0": "12.1",
    "2.4.0": "12.4",
    "2.5.1": "12.4",
    "2.6.0": "12.6",
    "2.7.1": "12.8",
    "2.8.0": "12.9",
    "2.9.0": "13.0",
    "2.10.0": "13.0",
}
"""CUDA of images whose tag does not name it: folders ``pytorch/training/docker/VERSION/py3/cuNNN`` of
aws/deep-learning-containers."""

CAPABILITIES = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), (7, 0)),
    **dict.fromkeys(("A100-40GB", "A100-80GB"), (8, 0)),
    **dict.fromkeys(("L4", "L40S"), (8, 9)),
    **dict.fromkeys(("H100", "H200"), (9, 0)),
    **dict.fromkeys(("B200", "GB200"), (10, 0)),
    **dict.fromkeys(("RTXPRO4500", "RTXPRO6000"), (12, 0)),
    "K80": (3, 7),
    "T4": (7, 5),
    "A10G": (8, 6),
    "B300": (10, 3),
}
"""Compute capability of each GPU in the catalogue: developer.nvidia.com/cuda-gpus and cuda-legacy-gpus."""
SERVED = (((12, 7), (7, 5), 12), ((0, 0), (5, 0), 9))
"""Range of PyTorch's builds: from this CUDA version on, the lowest compute capability and the highest major one.

The source is the support matrix of pytorch/pytorch's RELEASE.md. CUDA 13 dropped Volta; builds for CUDA 12.8 and 12.9
have it in some releases only (pytorch/pytorch#157517), so they count as without it. Builds for CUDA 11.8 had Kepler,
but Kepler's last driver (470) is older than the drivers of SageMaker's machines.
"""


# -------------------------------------------------------------------------------------------------------------- limits


def limits() -> dict[str, Any]:
    """Return every shape that a request can reach: type, members, required members, minimum, maximum, pattern,
    values."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    shapes: dict[str, Any] = {}
    root = model.operation_model(OPERATION).input_shape
    _shape(root, shapes)
    return {"input": root.name, "source": f"botocore {version('botocore')}", "shapes": dict(sorted(shapes.items()))}


def _shape(shape: Any, shapes: dict[str, Any]) -> None:
    if shape.name in shapes:
        return
    row: dict[str, Any] = {"type": shape.type_name, **{k: v for k, v in shape.metadata.items() if k in KEPT}}
    shapes[shape.name] = row
    if shape.type_name == "structure":
        members = {name: member for name, member in shape.members.items() if name not in NO_REQUEST}
        row["members"] = {name: member.name for name, member in members.items()}
        row["required"] = list(shape.required_members)
        parts = list(members.values())
    elif shape.type_name == "list":
        row["member"], parts = shape.member.name, [shape.member]
    elif shape.type_name == "map":
        row["key"], row["value"], parts = shape.key.name, shape.value.name, [shape.key, shape.value]
    else:
        if shape.type_name == "string" and shape.enum:
            row["enum"] = list(shape.enum)
        parts = []
    for part in parts:
        _shape(part, shapes)


# -------------------------------------------------------------------------------------------------------------- images


def images() -> dict[str, Any]:
    """Return the images for CPU and GPU with their regions, by version; and each region's registry."""
    spec = importlib.util.find_spec("sagemaker.core")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("sagemaker-core is not on PYTHONPATH")
    folder = Path(spec.submodule_search_locations[0])
    registries: dict[str, str] = {}
    versions: dict[str, Any] = {}
    for name in ("pytorch", "pytorch-amzn2023"):
        table = json.loads((folder / "image_uri_config" / f"{name}.json").read_bytes())["training"]
        for number, release in table["versions"].items():
            if tuple(map(int, number.split(".")[:2])) < OLDEST:
                continue
            tags = _tags(number, release)
            cuda = cuda_of(number, tags["gpu"])
            versions[number] = {**tags, "cuda": cuda, "regions": sorted(release["registries"]), "serves": serves(cuda)}
            for region, account in release["registries"].items():
                registry = f"{account}.dkr.ecr.{region}.{_suffix(region)}"
                if registries.setdefault(region, registry) != registry:
                    raise SystemExit(f"two registries in {region}")
    source = (folder / "VERSION").read_text().strip() if (folder / "VERSION").exists() else _core_version(folder)
    return {
        "source": f"sagemaker-core {source}",
        "gpus": sorted(CAPABILITIES),
        "registries": dict(sorted(registries.items())),
        "versions": dict(sorted(versions.items(), key=lambda item: tuple(map(int, item[0].split("."))))),
    }


def _core_version(folder: Path) -> str:
    info = next(folder.parents[1].glob("sagemaker_core-*.dist-info"))
    return info.name.removeprefix("sagemaker_core-").removesuffix(".dist-info")


def _tags(number: str, release: Mapping[str, Any]) -> dict[str, str]:
    if "container_version" in release:
        return {
            p: f"{release['repository']}:{release['tag_prefix']}-{release['container_version'][p]}"
            for p in ("cpu", "gpu")
        }
    (python,) = release["py_versions"]
    return {p: f"{release['repository']}:{number}-{p}-{python}" for p in ("cpu", "gpu")}


def cuda_of(number: str, tag: str) -> str:
    """Return the CUDA version of a GPU image, such as ``13.3``, from its tag or from `CUDA`."""
    named = re.search(r"-cu(\d\d)(\d)\b", tag)
    return f"{named[1]}.{named[2]}" if named else CUDA[number]


def serves(cuda: str) -> list[str]:
    """Return the GPUs that an image with this CUDA serves, by PyTorch's builds."""
    number = tuple(map(int, cuda.split(".")))
    lowest, major = next((low, high) for first, low, high in SERVED if number >= first)
    # Code for 10.0 also runs on 10.3: a device runs the code of lower minor versions.
    return sorted(gpu for gpu, its in CAPABILITIES.items() if lowest <= its and its[0] <= major)


def _suffix(region: str) -> str:
    session = botocore.session.get_session()
    partition = session.get_partition_for_region(region)
    data = session.get_component("data_loader").load_data("endpoints")
    return str(next(p["dnsSuffix"] for p in data["partitions"] if p["partition"] == partition))


def write(path: Path, table: Mapping[str, Any]) -> None:
    """Write JSON with one entry of a large table a line, for readable diffs."""
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inner}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    what, place = sys.argv[1:]
    write(Path(place) / f"{what}.json", {"limits": limits, "images": images}[what]())
