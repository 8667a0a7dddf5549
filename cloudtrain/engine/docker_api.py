"""Reach a container engine (Docker, or Podman's socket), classify its refusals, check images, remove containers.

Every container and network carries its run's label, so the run's URL alone finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from platform import machine
from typing import Any

from ..errors import CloudtrainError, SpecError
from ..storage.timings import CLIENT_TIMINGS

LABEL = "cloudtrain."


def run_label(run: str) -> str:
    """Return the label value of every container and network of the run with this URL."""
    return hashlib.sha256(run.encode()).hexdigest()[:16]


def running_node(run: str, node: int) -> str:
    """Return the id of the container that is a node of the run now. Raises `SpecError` if none is."""
    labels = [f"{LABEL}id={run_label(run)}", f"{LABEL}node={node}"]
    for found in connect().containers(filters={"label": labels, "status": "running"}):
        return str(found["Id"])
    raise SpecError("the node has no container now", field="node", hint="try again")


def connect() -> Any:
    """Return a client of the environment's or context's engine. Raises `SpecError` if it or the library is missing."""
    try:
        import docker
    except ModuleNotFoundError:
        from ..storage.extras import not_installed

        raise not_installed("an engine of containers", "docker", field="", named=["docker"]) from None
    where = _address()
    try:
        if _is_remote(where):
            reason = f"the containers of {where} cannot mount this machine's files; run cloudtrain on that machine"
            raise SpecError(reason)
        if where.startswith("unix://"):  # the client would leave its own socket open
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(where.removeprefix("unix://"))
        return make_client("auto")
    except PermissionError:
        why_not = f"you may not use the container engine at {where}"
        raise SpecError(why_not, hint="join the group that it belongs to") from None
    except (docker.errors.DockerException, OSError) as exc:
        raise SpecError(f"no container engine answers at {where} ({why(exc)})", hint="start it") from None


def make_client(version: str) -> Any:
    """Return a client of the engine in use; ``auto`` asks for its API version. Raises `SpecError` for a missing
    context."""
    import docker

    context = _context()
    given = docker.utils.kwargs_from_env() if context is None else {"tls": context.tls()}
    return docker.APIClient(**{"base_url": _address(), **given}, version=version, timeout=CLIENT_TIMINGS.docker_call)


def _is_remote(where: str) -> bool:
    """Return True if the address is another machine's: its containers would see that machine's files."""
    found = re.fullmatch(r"(?:(tcp|https?)://)?(\[[^]]*\]|[^:/]*)(:\d+)?(?:/.*)?", where)
    if found is None or not (found[1] or found[3]):
        return where.startswith("ssh:")
    host = found[2].strip("[]").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host not in ("", "localhost")
    return not (address.is_loopback or address.is_unspecified)


def _address() -> str:
    """Return the engine's address, resolved as docker resolves it."""
    context = _context()
    named = os.environ.get("DOCKER_HOST") if context is None else context.host
    return (named or "unix:///var/run/docker.sock").replace("http+unix://", "unix://")


@dataclass(frozen=True)
class _Context:
    """Docker context: an engine's address and the folder of its certificates."""

    host: str
    verify: bool
    certificates: Path

    def tls(self) -> Any:
        """Return the client's TLS configuration; False without certificates."""
        import docker

        paths = [self.certificates / f"{name}.pem" for name in ("ca", "cert", "key")]
        ca, cert, key = (str(path) if path.exists() else None for path in paths)
        if not (ca or cert or key):
            return False
        pair = (cert, key) if cert and key else None
        return docker.tls.TLSConfig(client_cert=pair, ca_cert=ca, verify=self.verify)


def _context() -> _Context | None:
    """Return the context that DOCKER_CONTEXT or docker's own file names; None for the default one, or with DOCKER_HOST.

    The client library's lookup is not used. Without a config.json it searches the current folder for contexts. It falls
    back to the default context if the named one is missing.
    """
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    name, by, file = os.environ.get("DOCKER_CONTEXT"), "DOCKER_CONTEXT", folder / "config.json"
    if os.environ.get("DOCKER_HOST"):
        return None
    try:
        if not name and file.exists():
            name, by = json.loads(file.read_bytes()).get("currentContext"), str(file)
        if not name or name == "default":
            return None
        key = hashlib.sha256(name.encode()).hexdigest()
        file = folder / "contexts" / "meta" / key / "meta.json"
        if not file.exists():
            raise SpecError(f"{by} names {name!r}, which is no context of this user (see docker context ls)")
        endpoint = json.loads(file.read_bytes())["Endpoints"]["docker"]
        tls = folder / "contexts" / "tls" / key / "docker"
        return _Context(str(endpoint.get("Host") or ""), not endpoint.get("SkipTLSVerify"), tls)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        wrong = f"{file} cannot be read as docker wrote it ({why(exc)})"
        raise SpecError(wrong, hint="fix it, or set DOCKER_HOST") from None


def why(exc: BaseException) -> str:
    """Return the first line of an engine's or a transport's error, without its wrapping."""
    text = str(getattr(exc, "explanation", None) or exc)
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, CloudtrainError):
            text = str(inner)
            break
        if isinstance(inner, OSError) and inner.strerror:
            text = inner.strerror
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    return " ".join(text.split())[:500]


def away(exc: Exception) -> bool:
    """Return True if the engine did not answer, as during its restart. (The client's transport raises OSErrors.)"""
    import docker

    if isinstance(exc, docker.errors.APIError):
        return bool(exc.status_code == 503)
    return isinstance(exc, OSError) or isinstance(exc.__cause__, OSError)


def check_image(api: Any, image: str, platform: str | None) -> bool:
    """Return True if the image is here. Raises `SpecError` if its architecture is not that of its containers."""
    import docker

    try:
        found = api.inspect_image(image)
    except docker.errors.ImageNotFound:
        return False
    except docker.errors.APIError as exc:
        if exc.status_code != 400:
            raise
        hint = "in a rehearsal, name another one: --local-image IMAGE"
        raise SpecError(f"{image} is not the name of an image for this engine", field="image", hint=hint) from None
    has = f"{found.get('Os', 'linux')}/{found['Architecture']}"
    ours = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine(), machine())
    if not platform and found["Architecture"] == ours:
        return True
    wants = platform or f"linux/{api.version()['Arch']}"
    variants = {found.get("Variant") or "", "/".join(wants.split("/")[2:])} - {""}
    if wants.split("/")[:2] != has.split("/") or len(variants) > 1:
        build = f"build it for that, or set platform to {has} where the engine can emulate it"
        raise SpecError(f"{image} is for {has}, this engine runs {wants}; {build}", field="image")
    return True


def clear(api: Any, label: str) -> bool:
    """Remove every container and network of a run. Return True if there were any."""
    import docker

    chosen = {"label": f"{LABEL}id={label}"}
    containers = api.containers(all=True, filters=chosen)
    for item in containers:
        remove_container(api, item["Id"])
    networks = api.networks(filters=chosen)
    for item in networks:
        with contextlib.suppress(docker.errors.NotFound):
            for other in api.inspect_network(item["Id"]).get("Containers") or {}:
                with contextlib.suppress(docker.errors.NotFound):
                    api.disconnect_container_from_network(other, item["Id"], force=True)
            api.remove_network(item["Id"])
    return bool(containers or networks)


def remove_container(api: Any, container: str) -> None:
    """Kill and remove the container and its anonymous volumes."""
    import docker

    with contextlib.suppress(docker.errors.APIError):  # it has ended, or the engine is away: the next call reports that
        api.kill(container, "SIGKILL")  # Podman's forced removal would give it its whole grace first
    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        pass
    except docker.errors.APIError as exc:
        if exc.status_code != 409:  # it is being removed already
            raise


def guard(label: str) -> None:
    """Remove the run's containers after its supervisor was killed. The guard process runs this once its stdin ends."""
    deadline, quiet = time.monotonic() + CLIENT_TIMINGS.docker_silence, 0
    while quiet < 2 and time.monotonic() < deadline:
        try:
            quiet = 0 if clear(connect(), label) else quiet + 1
        except Exception as exc:  # noqa: BLE001  no other process is left to remove them
            sys.stderr.write(f"the run's containers are not removed yet: {why(exc)}\n")
        time.sleep(1.0)
