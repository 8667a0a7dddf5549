"""Choose AWS's own PyTorch images by version and region (``images.json``), and check other images' registries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from ...errors import SpecError, UnsupportedError
from ...validate import did_you_mean
from .._cloud import table_in
from .s3 import DNS

ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)/(?P<repository>[^:@]+)(?P<tag>.*)"
)
_PUBLIC_ECR = "public.ecr.aws/"
_ARM, _X86 = re.compile(r"\b(arm64|aarch64|graviton)\b"), re.compile(r"\b(amd64|x86[_-]64)\b")
images = partial(table_in, __file__, "images.json")
"""Return the table (``tools/sagemaker_tables.py``)."""


def default_image(region: str, *, gpus: Sequence[str], accelerated: bool, version: str = "") -> str:
    """Return AWS's newest PyTorch image in ``region`` that serves every GPU in ``gpus``.

    ``gpus`` are names of the catalogue; others than those of the table restrict nothing. ``accelerated`` asks for an
    image with CUDA. ``version`` restricts the choice (``2.13``). Raises `SpecError` if no image is left.
    """
    table = images()
    judged = {*gpus} & {*table["gpus"]}
    there = {number: facts for number, facts in table["versions"].items() if region in facts["regions"]}
    if not there:
        why = f"cloudtrain knows no PyTorch image of AWS in {region}"
        raise SpecError(why, field="image", hint="name an image of your own with --image")
    found = {n: facts for n, facts in there.items() if not version or n == version or n.startswith(f"{version}.")}
    if not found:
        known = ", ".join(there)
        raise SpecError(
            f"no PyTorch {version} image in {region}; there are {known}",
            field="sagemaker.framework_version",
            hint=did_you_mean(version, there) or f"set framework_version = {next(reversed(there))!r}, or name an image",
        )
    serving = [n for n, facts in found.items() if not accelerated or judged <= {*facts["serves"]}]
    if serving:
        return f"{table['registries'][region]}/{found[serving[-1]]['gpu' if accelerated else 'cpu']}"
    names = " and ".join(dict.fromkeys(gpus))
    if version and (others := [n for n, facts in there.items() if judged <= {*facts["serves"]}]):
        cuda = next(reversed(found.values()))["cuda"]
        why = f"the PyTorch {version} image has CUDA {cuda}, which does not serve {names}"
        raise SpecError(why, field="sagemaker.framework_version", hint=f"set framework_version = {others[-1]!r}")
    why = f"none of AWS's PyTorch images in {region} serves {names}"
    raise SpecError(why, field="image", hint="choose another GPU, or name an image of your own with --image")


def check_image(image: str, *, region: str, arch: str, in_vpc: bool, provider: str) -> bool:
    """Return True if ``image`` is in ECR. Raises `UnsupportedError` if the platform could not pull or start it."""
    words = image.rpartition("/")[2].lower()
    if (arch == "arm64" and _X86.search(words)) or (arch == "x86_64" and _ARM.search(words)):
        other = "linux/arm64" if arch == "arm64" else "linux/amd64"
        why, hint = f"{image} is for another architecture than the machines", f"docker build --platform {other} …"
        raise UnsupportedError(provider, "image", why, hint=f"to build it for them, run: {hint}")
    match, why, path = ECR.fullmatch(image), "", image
    if match is None and not in_vpc:
        why = "it pulls from Amazon ECR only, or in a VPC (subnets) from a registry that is reached there"
    elif match is not None and match["region"] != region:
        why = f"{image} is in {match['region']}, and jobs in {region} pull only from {region}"
        path = match["repository"] + match["tag"]
    if why:
        raise UnsupportedError(provider, "image", why, hint=f"to copy it, run: {_copy(path, region, source=image)}")
    return match is not None


def _copy(name: str, region: str, *, source: str) -> str:
    """Return the commands that copy an image into the account's ECR."""
    path = name.removeprefix(_PUBLIC_ECR)
    first, _, rest = path.partition("/")
    path = rest if rest and ("." in first or ":" in first) else path
    suffix = images()["registries"].get(region, "").partition(f".{region}.")[2] or DNS["aws"]
    registry = f"$ACCOUNT.dkr.ecr.{region}.{suffix}"
    repository = re.split("[:@]", path)[0]
    target = f"{registry}/{path.partition('@')[0]}"
    login = f"aws ecr get-login-password --region {region} | docker login -u AWS --password-stdin {registry}"
    create = f"aws ecr create-repository --region {region} --repository-name {repository}"
    return f"{create} && {login} && docker tag {source} {target} && docker push {target}"
