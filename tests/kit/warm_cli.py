"""A ``cloudtrain`` for the shells of tests, which starts in a tenth of the time. A pytest plugin.

One process imports the command line once. It forks for each command and runs the same `main`, with the shell's
arguments, folder, variables and streams. The pages of the proof start the console script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from profiles import PROFILE

BIN = Path(sys.executable).parent
#: Streams go over the socket; Python's own site folder and the environment's packages are not needed.
CLIENT = """#!{python} -IS
import marshal, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ))))
    server.shutdown(socket.SHUT_WR)
    code = server.recv(1)
sys.exit(code[0] if code else 137)
"""
SERVER = """
import atexit, importlib, marshal, os, pkgutil, signal, socket, sys
import cloudtrain.cli, cyclopts
for folder in ("cli", "providers", "runs"):
    for module in pkgutil.iter_modules([os.path.join(cloudtrain.__path__[0], folder)], f"cloudtrain.{folder}."):
        importlib.import_module(module.name)

def run(client):
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    for stream, number in zip(streams, range(3)):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    atexit.register(lambda: client.sendall(bytes([code])))  # last of all: this process has nothing more to do
    arguments, folder, environ = marshal.loads(client.makefile("rb").read())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [os.path.join(sys.argv[2], "cloudtrain"), *arguments]
    sys.path[:1] = [sys.argv[0].rpartition("/")[0], *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    code = 1
    code = cloudtrain.cli.main()

with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen(64)
    print("warm", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server.settimeout(5)
    tests = os.getppid()
    while os.getppid() == tests:
        try:
            client, _ = server.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            break
        client.close()
    else:
        sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
run(client)
"""


@pytest.fixture(scope="session")
def shell_path() -> Iterator[str]:
    """Return the PATH of a shell that has this environment's tools, and such a ``cloudtrain``."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if PROFILE == "proof":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's address has at most 107 characters
        address, script = f"{folder}/socket", Path(folder, "bin", "cloudtrain")
        script.parent.mkdir()
        script.write_text(CLIENT.format(python=sys.executable, address=address))
        script.chmod(0o755)
        server = subprocess.Popen([sys.executable, "-c", SERVER, address, str(BIN)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "warm\n"
        yield f"{script.parent}{os.pathsep}{path}"
        server.kill()
        server.wait()
        server.stdout.close()
