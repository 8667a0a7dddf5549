"""Check this machine for ``doctor``, where it starts the nodes itself: Python, ports, disk, engine, GPUs."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CapacityError, CloudtrainError, SpecError, StorageError
from ..provider_api.checks import Check, failed, failure, ok, skipped, tried, unknown
from ..provider_api.protocol import Request
from ..storage.timings import CLIENT_TIMINGS

GIB = 1 << 30
LEAST_GIB = 1  # free disk below which logs and a checkpoint do not fit
TORCH = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def of_processes(
    python: str, request: Request | None, check: Callable[[Request], None], *, fix: str
) -> Iterator[Check]:
    """Check torch, ports, shared memory, disk and GPUs. ``check`` is the provider's own; ``fix`` installs torch."""
    yield _torch(python, fix)
    yield from tried("ports", _ports)
    if Path("/dev/shm").exists():
        yield _disk("/dev/shm", "shm", SpecError.exit_code, least=0)
    else:
        yield skipped("shm", "this system has no /dev/shm")
    yield _disk(tempfile.gettempdir(), "disk", StorageError.exit_code)
    yield from _request(request, check, "gpus")


def of_containers(request: Request | None, check: Callable[[Request], None]) -> Iterator[Check]:
    """Check the container engine, GPU runtime, image, disk and request."""
    from .docker_api import check_image, connect, why

    try:
        api = connect()
    except CloudtrainError as exc:
        name = "sdk" if "not installed" in str(exc) else "engine"
        yield failure(name, exc)
        yield skipped("image", "no engine to ask")
        return
    try:
        found, about = api.version(), api.info()
        yield ok("engine", f"version {found['Version']}, API {found['ApiVersion']}, {found['Os']}/{found['Arch']}")
        wanted = sum(int(node["gpus"]) for node in request.body["nodes"]) if request is not None else 0
        yield _runtime(", ".join(sorted(about.get("Runtimes") or {})), wanted)
        if request is None:
            yield skipped("image", "no image is named (--image)")
        else:
            node = request.body["nodes"][0]
            yield ok("shm", f"{node['shm'] / GIB:g} GiB in each container")
            yield from tried("image", lambda: _image(check_image(api, node["image"], node["platform"]), node["image"]))
        root = next((str(about[name]) for name in about if name.endswith("RootDir")), "/")  # the folder of the images
        yield _disk(root, "disk", StorageError.exit_code)
    except Exception as exc:  # noqa: BLE001 - the client raises its own kinds, requests' and the system's
        fix = "see that the engine is well (its own info and logs), and start it again"
        yield failed("engine", f"it answers, and then fails: {why(exc)}", fix=fix, code=SpecError.exit_code)
    finally:
        api.close()
    yield from _request(request, check, "start")


def _torch(python: str, install: str) -> Check:
    try:
        done = subprocess.run(
            [python, "-c", TORCH], capture_output=True, text=True, errors="replace", timeout=CLIENT_TIMINGS.torch_check
        )
    except OSError as exc:
        problem = f"{python} does not start: {exc.strerror}"
    except subprocess.TimeoutExpired:
        problem = f"{python} imports torch for over {CLIENT_TIMINGS.torch_check:.0f} s"
    else:
        version, gpus = [*done.stdout.split()[-2:], "", ""][:2]
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            problem = f"{python} cannot import torch: {last}"
        elif not gpus.isdigit():
            problem = f"{python} is no Python: it did not print what it was asked"
        else:
            return ok("torch", f"{version} in {python}, {gpus} GPUs")
    fix = f"{install}; or set python to a Python that has it"
    return failed("torch", problem, fix=fix, code=SpecError.exit_code)


def _ports() -> Check:
    from .processes import free_port_pair

    try:
        port = free_port_pair()
    except OSError as exc:
        fix = "let this user listen on 127.0.0.1"
        return failed("ports", f"no free ports on loopback: {exc.strerror}", fix=fix, code=CapacityError.exit_code)
    return ok("ports", f"free on loopback, such as {port} and {port + 1}")


def _disk(folder: str, name: str, code: int, *, least: float = LEAST_GIB) -> Check:
    try:
        free = shutil.disk_usage(folder).free / GIB
    except OSError as exc:  # the folder of an engine in a virtual machine is not on this machine
        return unknown(name, f"{folder}: {exc.strerror}")
    if free < least:
        fix = f"free some of it; a run needs {LEAST_GIB} GiB at the very least"
        return failed(name, f"{free:.1f} GiB free in {folder}", fix=fix, code=code)
    return ok(name, f"{free:.1f} GiB free in {folder}")


def _runtime(names: str, wanted: int) -> Check:
    if "nvidia" in names:
        return ok("gpu runtime", f"nvidia, among {names}")
    if not wanted:
        return ok("gpu runtime", "none for NVIDIA GPUs; none are asked for")
    fix = "install the NVIDIA Container Toolkit and start the engine again (nvidia-ctk runtime configure)"
    return failed("gpu runtime", f"none for NVIDIA GPUs among {names}", fix=fix, code=CapacityError.exit_code)


def _image(here: bool, image: str) -> Check:
    if here:
        return ok("image", f"{image} is on this machine")
    return unknown("image", f"{image} is not on this machine; a submit pulls it")


def _request(request: Request | None, check: Callable[[Request], None], name: str) -> Iterator[Check]:
    if request is None:
        yield skipped(name, "there is no plan")
        return
    try:
        check(request)
    except CloudtrainError as exc:
        yield failure(name, exc)
    else:
        yield ok(name, "this machine has what the job asks for")
