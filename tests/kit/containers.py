"""The container engine of the tests, and the images that they run. A pytest plugin, like `servers`."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs

from cloudtrain.engine.docker_api import connect
from cloudtrain.errors import SpecError

BUILD = Path(__file__).parents[1] / "images" / "build.sh"
IMAGE = "cloudtrain-test"


@pytest.fixture(scope="session")
def engine() -> Any:
    """Return a client of the engine; skip the test if no engine answers."""
    pytest.importorskip("docker")
    try:
        return connect()
    except SpecError as exc:
        pytest.skip(f"no docker engine: {exc}")


@pytest.fixture(scope="session")
def images(engine: Any) -> Callable[[str], str]:
    """Return a function that gives the name of an image of tests/images. It builds a missing or outdated image."""
    built: dict[str, str] = {}

    def image(tag: str) -> str:
        if tag not in built:
            done = subprocess.run([str(BUILD), tag], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{IMAGE}:{tag} cannot be built: {done.stderr.strip()}")
            built[tag] = f"{IMAGE}:{tag}"
        return built[tag]

    return image


def left(engine: Any, folder: Path) -> list[str]:
    """Return the ids of the containers and networks of runs below ``folder``, and of all anonymous volumes."""
    chosen = {"label": "cloudtrain.id"}
    items = engine.containers(all=True, filters=chosen) + engine.networks(filters=chosen)

    def is_ours(labels: dict[str, str]) -> bool:
        """Check for the run's own folder or, with a remote store, for its supervisor's (``host:folder``)."""
        supervisor = labels["cloudtrain.supervisor"].partition(":")[2]
        return f"{labels['cloudtrain.run']}/".startswith(f"{folder.as_uri()}/") or f"{supervisor}/".startswith(
            f"{folder}/"
        )

    ours = [item["Id"] for item in items if is_ours(item["Labels"])]
    return ours + [item["Name"] for item in engine.volumes(filters={"dangling": True})["Volumes"] or ()]


@pytest.fixture
def nothing_left(engine: Any, tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves a container, a network or a volume."""
    volumes = left(engine, tmp_path)
    yield
    assert left(engine, tmp_path) == volumes


# ------------------------------------------------------------------------------------------------------------- registry


@functools.cache
def _parts(image: str) -> tuple[bytes, list[bytes]]:
    """Return the configuration of an image and its compressed layers."""
    whole = subprocess.run(["docker", "save", image], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:

        def member(name: str) -> bytes:
            found = tar.extractfile(name)
            assert found is not None
            return found.read()

        (listed,) = json.loads(member("manifest.json"))
        return member(listed["Config"]), [gzip.compress(member(name), 1) for name in listed["Layers"]]


@contextmanager
def registry(image: str, *, user: str, password: str, stalls: bool = False) -> Iterator[str]:
    """Yield the address of a loopback registry that gives ``image``, under any name and tag, to that user alone.
    Without ``user``, it serves anonymous clients. One that ``stalls`` never finishes its manifest.

    Each manifest is unique, as an engine does not ask again for one that it still has.
    """
    config, layers = _parts(image)
    blobs = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in (config, *layers)}

    def entry(kind: str, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        return {"mediaType": f"application/vnd.docker.{kind}", "size": len(data), "digest": digest}

    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": entry("container.image.v1+json", config),
            "layers": [entry("image.rootfs.diff.tar.gzip", data) for data in layers],
            "annotations": {"unique": uuid.uuid4().hex},
        }
    ).encode()
    token = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if user and self.headers.get("Authorization") != token:
                self._answer(401, b"{}", "application/json", ("WWW-Authenticate", 'Basic realm="test"'))
            elif "/manifests/" in self.path:
                digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
                self._answer(200, manifest, kind, ("Docker-Content-Digest", digest))
            elif "/blobs/" in self.path and (data := blobs.get(self.path.rpartition("/")[2])):
                self._answer(200, data, "application/octet-stream")
            else:
                self._answer(200 if self.path == "/v2/" else 404, b"{}", "application/json")

        do_HEAD = do_GET

        def _answer(self, status: int, data: bytes, kind: str, *more: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(data))), *more):
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                slow = stalls and "/manifests/" in self.path
                self.wfile.write(data[: len(data) // 2] if slow else data)
                if slow:
                    self.wfile.flush()
                    over.wait()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


# ------------------------------------------------------------------------------------------------- an engine of its own


class Daemon:
    """An engine that a test may stop and start. It has its own network, so that it leaves another engine's bridge
    alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        folder = self.folder
        (folder / "pid").unlink(missing_ok=True)
        command = ["unshare", "--net", "dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        command += ["--pidfile", f"{folder}/pid", "-H", self.host]
        command += ["--bridge", "none", "--default-address-pool", "base=10.231.0.0/16,size=24"]
        with open(folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        Jobs.wait_for(
            lambda: subprocess.run(["docker", "-H", self.host, "version"], capture_output=True).returncode == 0
        )

    def stop(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    def api(self) -> Any:
        import docker

        return docker.DockerClient(base_url=self.host).api

    def remove(self) -> None:
        """Remove the folder and unmount everything in it. The engine mounts at least its data root, on itself."""
        if self._process is not None:
            self.stop(signal.SIGTERM)
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for path in sorted((path for path in mounted if path.startswith(f"{self.folder}/")), reverse=True):
            if subprocess.run(["umount", path], capture_output=True).returncode:
                subprocess.run(["umount", "--lazy", path], check=True)
        shutil.rmtree(self.folder)


@pytest.fixture
def daemon(images: Callable[[str], str]) -> Iterator[Daemon]:
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("needs dockerd, and root, to run an engine of its own")
    made = Daemon(Path(tempfile.mkdtemp(prefix="ct-dockerd-")))  # short: the path of a socket is limited
    try:
        made.start()
        with subprocess.Popen(["docker", "save", images("py313")], stdout=subprocess.PIPE) as saved:
            load = ["docker", "-H", made.host, "load", "--quiet"]
            subprocess.run(load, stdin=saved.stdout, check=True, capture_output=True)
        yield made
    finally:
        made.remove()
