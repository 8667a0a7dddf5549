"""Loopback servers for SFTP (paramiko) and FTP (pyftpdlib)."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import paramiko
import pytest
from fsspec.config import conf
from paramiko import SFTPAttributes, SFTPServer

USER, PASSWORD = "trainer", "w0rd-of-sftp"


class Folder(paramiko.SFTPServerInterface):
    """The operations that clients may do with the files."""

    def __init__(self, server: Any, *args: Any, root: Path, **kwargs: Any) -> None:
        super().__init__(server, *args, **kwargs)
        self.root = root

    def _at(self, path: str) -> str:
        return str(self.root) + self.canonicalize(path)

    def _do(self, work: Any) -> Any:
        try:
            return work()
        except OSError as exc:
            return SFTPServer.convert_errno(exc.errno or errno.EIO)

    def _done(self, work: Any) -> int:
        found = self._do(work)
        return found if isinstance(found, int) else paramiko.SFTP_OK

    def list_folder(self, path: str) -> Any:
        def names() -> list[SFTPAttributes]:
            with os.scandir(self._at(path)) as items:
                return [SFTPAttributes.from_stat(item.stat(follow_symlinks=False), item.name) for item in items]

        return self._do(names)

    def stat(self, path: str) -> Any:
        return self._do(lambda: SFTPAttributes.from_stat(os.stat(self._at(path))))

    def lstat(self, path: str) -> Any:
        return self._do(lambda: SFTPAttributes.from_stat(os.lstat(self._at(path))))

    def open(self, path: str, flags: int, attr: Any) -> Any:
        def opened() -> paramiko.SFTPHandle:
            mode = "rb" if not flags & (os.O_WRONLY | os.O_RDWR) else "wb" if flags & os.O_TRUNC else "rb+"
            handle = paramiko.SFTPHandle(flags)
            file = os.fdopen(os.open(self._at(path), flags, 0o666), mode)
            handle.readfile = handle.writefile = file
            handle.stat = lambda: SFTPAttributes.from_stat(os.fstat(file.fileno()))
            return handle

        return self._do(opened)

    def remove(self, path: str) -> int:
        return self._done(lambda: os.remove(self._at(path)))

    def mkdir(self, path: str, attr: Any) -> int:
        return self._done(lambda: os.mkdir(self._at(path)))

    def rmdir(self, path: str) -> int:
        return self._done(lambda: os.rmdir(self._at(path)))


class _Login(paramiko.ServerInterface):
    def check_auth_password(self, username: str, password: str) -> int:
        known = (username, password) == (USER, PASSWORD)
        return paramiko.AUTH_SUCCESSFUL if known else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


class Server:
    """An SFTP server on ``port``. `hang_up` breaks every open connection."""

    def __init__(self, root: Path, kind: type[Folder] = Folder) -> None:
        self.root, self._kind = root, kind
        self._key = paramiko.ECDSAKey.generate()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._transports: list[paramiko.Transport] = []
        self.logins = 0
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        return f"sftp://127.0.0.1:{self.port}"

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as OpenSSH does
        transport = paramiko.Transport(connection)
        self._transports.append(transport)
        transport.add_server_key(self._key)
        transport.set_subsystem_handler("sftp", SFTPServer, self._kind, root=self.root)
        with suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=_Login())
            self.logins += 1

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return sum(transport.is_active() for transport in self._transports)

    def hang_up(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports.clear()

    def close(self) -> None:
        self._listener.close()
        self.hang_up()


@contextmanager
def served_sftp(root: Path, kind: type[Folder] = Folder) -> Iterator[Server]:
    """Yield an SFTP server on the folder ``root``, with the login in the environment."""
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    with pytest.MonkeyPatch.context() as patch:
        login(patch, USER, PASSWORD)
        server = Server(root, kind)
        yield server
        server.close()


def login(patch: pytest.MonkeyPatch, user: str, password: str) -> None:
    """Set fsspec's login here and for child processes. fsspec reads its environment once, at import."""
    patch.setenv("FSSPEC_SFTP_USERNAME", user)
    patch.setenv("FSSPEC_SFTP_PASSWORD", password)
    patch.setitem(conf, "sftp", {"username": user, "password": password})


@contextmanager
def served_ftp(root: Path) -> Iterator[str]:
    """Yield the URL of an FTP server on the folder ``root``. Without a login, clients may read but not write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it stands on asyncore, which left Python with 3.12
        from pyftpdlib.authorizers import DummyAuthorizer
        from pyftpdlib.handlers import FTPHandler
        from pyftpdlib.servers import ThreadedFTPServer

    logger = logging.getLogger("pyftpdlib")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        authorizer = DummyAuthorizer()
        authorizer.add_anonymous(str(root), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    server = ThreadedFTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"timeout": 0.05, "handle_exit": False}, daemon=True)
    thread.start()
    yield f"ftp://127.0.0.1:{server.address[1]}"
    server.close_all()
    thread.join(10)
