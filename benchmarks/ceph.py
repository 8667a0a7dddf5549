"""Ceph's radosgw on loopback with objects in memory: an S3 that checks signatures, fast enough to measure clients.

The packages are Debian's, unpacked into the benchmarks' cache folder once. Nothing is installed, and it needs no root.
Its start takes a quarter of a minute. ``tcp_nodelay=1``: without it small downloads wait for delayed acknowledgements.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import cache

__all__ = ["KEY", "SECRET", "radosgw"]

KEY, SECRET = "benchmark", "benchmarksecret"
PACKAGES = ["radosgw", "ceph-mon", "ceph-osd"]
SECONDS = 180
LIBRARIES = "usr/lib/x86_64-linux-gnu"
CONF = """[global]
fsid = {fsid}
mon initial members = a
mon host = [v1:127.0.0.1:{mon}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
osd crush update on start = false
osd class update on start = false
mon allow pool size one = true
osd objectstore = memstore
memstore device bytes = {bytes}
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
run dir = {folder}
crash dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
pid file =
plugin dir = {root}/{libraries}/ceph
erasure code dir = {root}/{libraries}/ceph/erasure-code
osd class dir = {root}/{libraries}/rados-classes
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw gc obj min wait = 1
"""


def unpacked() -> Path:
    """Return the folder with Debian's packages, and fetch them if missing. Raises `SystemExit` if it cannot."""
    root = cache() / "ceph"
    if (root / "whole").exists():
        return root
    if shutil.which("apt-get") is None:
        raise SystemExit("radosgw comes from Debian's packages, and this machine has no apt-get")
    print(f"unpacking {', '.join(PACKAGES)} into {root}", file=sys.stderr)
    shutil.rmtree(root, ignore_errors=True)
    (root / "debs").mkdir(parents=True)
    plan = _output_of(["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES])
    names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    _output_of(["apt-get", "download", *names], cwd=root / "debs")
    for package in sorted((root / "debs").glob("*.deb")):
        _output_of(["dpkg", "-x", str(package), str(root)])
    shutil.rmtree(root / "debs")
    (root / "whole").touch()
    return root


@contextlib.contextmanager
def radosgw(folder: Path, *, memory: int = 8 << 30) -> Iterator[str]:
    """Yield the endpoint for `KEY` and `SECRET`. ``memory`` bytes hold the objects; other files are in ``folder``."""
    root, port, mon = unpacked(), _free_port(), _free_port()
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    words = {"fsid": fsid, "mon": mon, "port": port, "bytes": memory, "folder": folder, "root": root}
    (folder / "ceph.conf").write_text(CONF.format(libraries=LIBRARIES, **words))
    tool = _Tool(root, folder)
    with contextlib.ExitStack() as stack:
        # Use the first protocol: with the second one the gateway alone demands keys.
        place = ("--addv", "a", f"[v1:127.0.0.1:{mon}]")
        tool.run("monmaptool", "--create", *place, "--fsid", fsid, str(folder / "monmap"))
        tool.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        stack.enter_context(tool.daemon("ceph-mon", "-f", "-i", "a"))
        tool.run("ceph", "osd", "new", osd)
        tool.run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        tool.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        stack.enter_context(tool.daemon("ceph-osd", "-f", "-i", "0"))
        keyring = str(folder / "rgw" / "keyring")  # no daemon checks it, but the gateway needs it to start
        tool.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "client.rgw")
        gateway = stack.enter_context(tool.daemon("radosgw", "-n", "client.rgw", "-f"))
        _wait(port, gateway)
        user = ["--uid", "benchmark", "--display-name", "benchmark", "--access-key", KEY, "--secret-key", SECRET]
        tool.run("radosgw-admin", "user", "create", *user)
        yield f"http://127.0.0.1:{port}"


class _Tool:
    """Ceph's programs below ``root``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        libraries = (f"lib/{LIBRARIES.rpartition('/')[2]}", LIBRARIES, f"{LIBRARIES}/ceph", "usr/lib")
        found = {"LD_LIBRARY_PATH": ":".join(str(root / part) for part in libraries)}
        found["PYTHONPATH"] = str(root / "usr/lib/python3/dist-packages")
        self._environ = {**os.environ, **found}

    def _words(self, name: str, *words: str) -> list[str]:
        python = ["/usr/bin/python3"] if name == "ceph" else []
        conf = [] if name == "monmaptool" else ["-c", str(self._folder / "ceph.conf")]
        return [*python, str(self._root / "usr/bin" / name), *conf, *words]

    def run(self, name: str, *words: str) -> None:
        _output_of(self._words(name, *words), env=self._environ)

    @contextlib.contextmanager
    def daemon(self, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        with open(self._folder / f"{name}.out", "wb") as out:
            process = subprocess.Popen(self._words(name, *words), env=self._environ, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _output_of(command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise SystemExit(f"radosgw does not answer: {process.args}")
