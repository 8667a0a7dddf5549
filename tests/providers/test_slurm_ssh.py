"""Provider ``slurm`` over a real OpenSSH: a private sshd on loopback, and the user's own ssh configuration."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_shells import check_shell
from slurmcluster import SlurmPlatform, running

from cloudtrain.errors import AuthError, LostContactError
from cloudtrain.providers.slurm import Provider
from cloudtrain.testing.platform import numbered

pytestmark = pytest.mark.slow

SSHD = """Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/sshd.pid
PasswordAuthentication no
StrictModes no
UsePAM no
SetEnv SLURM_CONF={conf}
"""
USER = """Host login
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/user
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
Host stranger
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/other
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
"""


class Login:
    """A login node whose sshd can be stopped and started again."""

    def __init__(self, folder: Path, conf: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for name in ("host", "user", "other"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "sshd_config").write_text(SSHD.format(port=port, folder=folder, conf=conf))
        (folder / "config").write_text(USER.format(port=port, folder=folder))
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"  # ssh reads the configuration in the account's home, not in $HOME
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)

    def start(self) -> None:
        os.makedirs("/run/sshd", exist_ok=True)
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        subprocess.run([str(sshd), "-f", str(self.folder / "sshd_config")], check=True)
        deadline = time.monotonic() + 10
        while not (self.folder / "sshd.pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / "sshd.pid").read_text()), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (self.folder / "sshd.pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    if os.getuid() != 0:
        pytest.skip("a private sshd needs root to separate its privileges")
    with running(tmp_path_factory.mktemp("slurm")) as cluster, pytest.MonkeyPatch.context() as patch:
        login = Login(tmp_path_factory.mktemp("login"), cluster.conf)
        patch.delenv("SLURM_CONF")
        patch.setenv("PATH", f"{login.folder / 'bin'}:{os.environ['PATH']}")
        login.world = SlurmPlatform(tmp_path_factory.mktemp("world"), cluster, host="login")  # type: ignore[attr-defined]
        login.start()
        yield login
        login.stop()


def test_a_run_over_ssh_is_like_one_on_the_login_node(login: Login) -> None:
    world: SlurmPlatform = login.world  # type: ignore[attr-defined]
    run = world.send(world.plan({"launcher": "python", "env": {"PROBE": ""}}, run_id="by-ssh"))
    result = run.wait(timeout=120, poll=1)
    assert (result["state"], [row["number"] for row in result["attempts"]]) == ("succeeded", ["0.0"]), result
    lines = numbered(world.provider, str(result["native_id"]))
    assert len(lines) == len(set(lines)) == run.store.exits("by-ssh")[0]["lines"]
    request = run.store.attempt_request("by-ssh", 0)
    assert request is not None
    assert world.provider.submit(request) == world.provider.find(request) == result["native_id"]


def test_a_shell_enters_a_node_by_ssh(login: Login) -> None:
    check_shell(login.world)  # type: ignore[attr-defined]


def test_a_lost_login_node_is_lost_contact_and_no_second_job(login: Login) -> None:
    """Check with the run's own files in the store. Without them the job fails before a slow client cancels it."""
    world: SlurmPlatform = login.world  # type: ignore[attr-defined]
    plan = world.plan({"launcher": "python", "env": {"PROBE": "hold"}}, run_id="gone")
    run, request = world.send(plan), plan.request
    native = world.provider.find(request)
    assert native is not None
    login.stop()
    with pytest.raises(LostContactError, match="ssh login"):
        world.provider.submit(request)
    login.start()
    assert world.provider.submit(request) == native
    run.cancel()
    assert run.wait(timeout=60, poll=1)["state"] == "cancelled"
    assert world.provider.status(native).state == "cancelled"


def test_a_key_that_is_refused_is_a_lack_of_credentials(login: Login) -> None:
    world: SlurmPlatform = login.world  # type: ignore[attr-defined]
    request = world.plan(run_id="refused").request
    with pytest.raises(AuthError, match="ssh stranger"):
        Provider(partition="low", host="stranger").submit(request)
