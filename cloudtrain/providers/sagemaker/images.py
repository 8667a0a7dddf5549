"""Images: AWS's own PyTorch ones by version and region (``images.json``), and where any other must lie."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import SpecError, UnsupportedError
from ...values import nearest

__all__ = ["check_image", "default_image", "images"]

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)/(?P<repository>[^:@]+)(?P<tag>.*)"
)
_PUBLIC_ECR = "public.ecr.aws/"
_ARM, _X86 = re.compile(r"\b(arm64|aarch64|graviton)\b"), re.compile(r"\b(amd64|x86[_-]64)\b")


@cache
def images() -> dict[str, Any]:
    """The table (``tools/sagemaker_tables.py``)."""
    table: dict[str, Any] = json.loads((Path(__file__).parent / "images.json").read_bytes())
    return table


def default_image(region: str, *, gpu: bool, version: str = "") -> str:
    """AWS's PyTorch image of ``version`` (``2.13``; empty: the newest there) in ``region``.

    Raises `SpecError` for a region or version that the table does not have.
    """
    table = images()
    there = [number for number, told in table["versions"].items() if region in told["regions"]]
    if not there:
        raise SpecError(f"no PyTorch image of AWS's is known in {region}; give an image of your own", field="image")
    found = [n for n in there if not version or n == version or n.startswith(f"{version}.")]
    if not found:
        known = ", ".join(there)
        raise SpecError(
            f"no PyTorch {version} image in {region}{nearest(version, there)}; there are {known}; or give an image",
            field="sagemaker.framework_version",
        )
    told = table["versions"][found[-1]]
    return f"{table['registries'][region]}/{told['gpu' if gpu else 'cpu']}"


def check_image(image: str, *, region: str, arch: str, in_vpc: bool, provider: str) -> bool:
    """Whether ``image`` lies in ECR. Raises `UnsupportedError` for one that the platform could not pull or start."""
    words = image.rpartition("/")[2].lower()
    if (arch == "arm64" and _X86.search(words)) or (arch == "x86_64" and _ARM.search(words)):
        other = "linux/arm64" if arch == "arm64" else "linux/amd64"
        why = f"{image} is of another architecture than the instances; build it with docker build --platform {other}"
        raise UnsupportedError(provider, "image", why)
    match = _ECR.fullmatch(image)
    if match is None and not in_vpc:
        why = "it pulls from Amazon ECR only, or in a VPC (subnets) from a registry that is reached there"
        raise UnsupportedError(provider, "image", f"{why}; copy it: {_copy(image, region, source=image)}")
    if match is not None and match["region"] != region:
        why = f"{image} lies in {match['region']}, and jobs in {region} pull from there only"
        raise UnsupportedError(
            provider, "image", f"{why}; copy it: {_copy(match['repository'] + match['tag'], region, source=image)}"
        )
    return match is not None


def _copy(name: str, region: str, *, source: str) -> str:
    """The commands that bring an image into the account's ECR."""
    path = name.removeprefix(_PUBLIC_ECR)
    first, _, rest = path.partition("/")
    path = rest if rest and ("." in first or ":" in first) else path
    registry = f"$ACCOUNT.dkr.ecr.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")
    repository = re.split("[:@]", path)[0]
    target = f"{registry}/{path.partition('@')[0]}"
    return " && ".join(
        (
            f"aws ecr create-repository --region {region} --repository-name {repository}",
            f"aws ecr get-login-password --region {region} | docker login -u AWS --password-stdin {registry}",
            f"docker tag {source} {target}",
            f"docker push {target}",
        )
    )
