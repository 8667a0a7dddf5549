"""Block the network for the Python of a test: an attempt to leave this machine fails the test, in one line."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Guard"]


class Guard:
    """Guard that lets sockets of Python reach loopback alone.

    It does not see libraries with their own sockets (gRPC's, obstore's) and other processes. It is a plugin of pytest:
    if the code under test swallows the error, the test still fails.
    """

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self.reached: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check each name that is looked up, and each address that is connected or sent to."""

        def before(call: Callable[..., Any], at: int) -> Callable[..., Any]:
            def guarded(sock: socket.socket, *args: Any) -> Any:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and len(args) > at:
                    self._check(*args[at if at == 0 else -1][:2])
                return call(sock, *args)

            return guarded

        for name, at in (("connect", 0), ("connect_ex", 0), ("sendto", 1)):
            monkeypatch.setattr(socket.socket, name, before(getattr(socket.socket, name), at))
        look_up = socket.getaddrinfo

        def guarded_look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host:
                self._check(host, port)
            return look_up(host, port, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)

    def _check(self, host: Any, port: Any = None) -> None:
        name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
        if not _is_here(name):
            place = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
            self.reached.append(place if port is not None else name)
            # No Exception: code that retries on exceptions must not retry on this.
            pytest.fail(_message(self.reached), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a test that passed but reached for the network."""
        report = yield
        if item is self.item and report.when == "call" and report.passed and self.reached:
            report.outcome, report.longrepr = "failed", _message(self.reached)
        return report


def _message(reached: list[str]) -> str:
    return f"cloudtrain: the test reached for the network, which it may not: {', '.join(dict.fromkeys(reached))}"


def _is_here(name: str) -> bool:
    if name.lower() in ("localhost", "", socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or address.is_unspecified
