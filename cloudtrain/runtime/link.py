"""The node link: messages between the nodes of one run, one JSON line each, beside torchrun.

torchrun does not make nodes agree on failure, preemption or the end of a run. So node 0's runtime listens on its link
port (`NodeEnvironment.link_port`) and every other node connects. Both sides first prove the run's key. Every message
carries a MAC over its own number. So a stranger on the network can neither join as a node nor speak as one. All events
arrive in one queue as ``(node, message)``. A lost connection is the message ``{"t": "lost"}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PlatformError
from ..provider_api.node import JOIN_TIMEOUT
from ..validate import duration
from .timings import TIMINGS

MESSAGE_BYTES = 1 << 30
"""Most bytes of a line; a message has half of it. A checkpoint's part needs about 160 bytes for each of its files."""

Message = dict[str, Any]


def _mac(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def _same(given: str, right: str) -> bool:
    # As bytes: compare_digest raises for text beyond ASCII, which a stranger may send.
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode())


class _Channel:
    """One authenticated connection: numbered, signed JSON lines in both directions."""

    def __init__(self, sock: socket.socket, session: bytes, *, sends: str, takes: str) -> None:
        self._sock, self._session, self._sends, self._takes = sock, session, sends, takes
        self._lock = threading.Lock()
        self._sent = 0
        sock.settimeout(TIMINGS.silence)
        self._stream = sock.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message, separators=(",", ":"))
        if len(text) > MESSAGE_BYTES // 2:
            raise PlatformError(f"a message of {len(text)} bytes between nodes")
        with self._lock:
            self._sent += 1
            mac = _mac(self._session, self._sends, str(self._sent), text)
            self._sock.sendall(f"{mac} {text}\n".encode())

    def receive(self, each: Callable[[Message], None]) -> str:
        """Call ``each`` with every message until the connection ends or breaks its rules. Return how it ended."""
        taken, why = 0, "the connection ended"
        try:
            while line := self._stream.readline(MESSAGE_BYTES):
                taken += 1
                mac, _, text = line.decode().rstrip("\n").partition(" ")
                if not _same(mac, _mac(self._session, self._takes, str(taken), text)):
                    break
                each(json.loads(text))
        except TimeoutError:
            why = f"it was not heard of for {TIMINGS.silence:.0f} s"
        except (OSError, ValueError) as exc:
            why = f"the connection ended ({exc})"
        with contextlib.suppress(OSError):
            self._stream.close()
        return why

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _greet(sock: socket.socket, key: bytes, nodes: int) -> tuple[int, _Channel] | None:
    """Do node 0's side of the handshake. Return the node and its channel, or None for a stranger."""
    sock.settimeout(TIMINGS.handshake)
    nonce = secrets.token_hex(16)
    sock.sendall(f"cloudtrain {nonce}\n".encode())
    hello = json.loads(_line(sock))
    node, theirs = int(hello["node"]), str(hello["nonce"])
    if not 0 < node < nodes or not _same(str(hello["mac"]), _mac(key, "peer", nonce, theirs, str(node))):
        return None
    sock.sendall((_mac(key, "head", nonce, theirs) + "\n").encode())
    session = _mac(key, "session", nonce, theirs).encode()
    return node, _Channel(sock, session, sends="head", takes="peer")


def _introduce(sock: socket.socket, key: bytes, node: int) -> _Channel:
    """Do a peer's side. Raises `ConnectionError` when the other end is not this run's node 0."""
    sock.settimeout(TIMINGS.handshake)
    word, _, nonce = _line(sock).partition(" ")
    if word != "cloudtrain":
        raise ConnectionError("not a cloudtrain node")
    ours = secrets.token_hex(16)
    hello = {"node": node, "nonce": ours, "mac": _mac(key, "peer", nonce, ours, str(node))}
    sock.sendall((json.dumps(hello) + "\n").encode())
    if not _same(_line(sock), _mac(key, "head", nonce, ours)):
        raise ConnectionError("node 0 does not know this run's key")
    return _Channel(sock, _mac(key, "session", nonce, ours).encode(), sends="peer", takes="head")


def _line(sock: socket.socket) -> str:
    """Return one short line, read byte by byte: nothing after it may be consumed."""
    data = b""
    while not data.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(data) > 4096:
            raise ConnectionError("the handshake broke off")
        data += byte
    return data.decode().rstrip("\n")


class Link:
    """This node's end. ``inbox`` gets ``(node, message)``; node 0 reaches every peer, a peer only node 0.

    ``ended`` returns why node 0 has ended, which a peer asks until it has reached node 0; empty if that is not known.
    """

    def __init__(
        self,
        *,
        node: int,
        nodes: int,
        addr: str,
        port: int,
        key: bytes,
        inbox: queue.SimpleQueue[tuple[int, Message]],
        join_timeout: float = JOIN_TIMEOUT,
        ended: Callable[[], str] = lambda: "",
    ) -> None:
        self.node, self.nodes, self._join_timeout, self._ended = node, nodes, join_timeout, ended
        self._addr, self._port, self._key, self._inbox = addr, port, key, inbox
        self._channels: dict[int, _Channel] = {}
        self._offsets: dict[int, int] = {}
        self._early: list[Message] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server: socket.socket | None = None

    def open(self) -> None:
        """Listen on node 0, else begin to connect, without waiting. Raises `PlatformError` when the port is taken."""
        if self.nodes == 1:
            return
        if self.node == 0:
            self._server = self._listen()
            target = self._accept
        else:
            target = self._connect
        threading.Thread(target=target, name="link", daemon=True).start()
        threading.Thread(target=self._ping, name="link-ping", daemon=True).start()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._addr else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Loopback stays on loopback; elsewhere the address peers know may not be one of ours (NAT, a service name).
        host = self._addr if self._addr in ("127.0.0.1", "localhost", "::1") else ""
        try:
            server.bind((host, self._port))
        except OSError as exc:
            server.close()
            raise PlatformError(f"cannot listen on port {self._port}: {exc.strerror}") from None
        server.listen(self.nodes + 8)
        return server

    def _accept(self) -> None:
        assert self._server is not None
        while not self._closed.is_set():
            try:
                sock, _ = self._server.accept()
            except OSError:
                if self._closed.wait(0.1):  # a client that went away must not keep out the next
                    return
                continue
            threading.Thread(target=self._serve, args=(sock,), name="link-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            known = _greet(sock, self._key, self.nodes)
        except Exception:  # noqa: BLE001  a stranger may say anything, and must not cost us this thread's socket
            known = None
        if known is None:
            sock.close()
        else:
            self._run(*known)

    def _connect(self) -> None:
        ask = time.monotonic()
        deadline = ask + self._join_timeout
        while not self._closed.is_set():
            sock, end = None, ""
            try:
                sock = socket.create_connection((self._addr, self._port), timeout=TIMINGS.handshake)
                channel = _introduce(sock, self._key, self.node)
            except (OSError, ValueError):  # ValueError: the other end does not even speak text
                if sock is not None:
                    sock.close()
                if (now := time.monotonic()) >= ask:
                    end, ask = self._ended(), now + 2.0  # it may read from a bucket
                if end or now > deadline:
                    why = f"no answer from {self._addr}:{self._port} for {duration(self._join_timeout)}"
                    self._inbox.put((0, {"t": "lost", "why": end or why}))
                    return
                self._closed.wait(0.2)
                continue
            self._run(0, channel)
            return

    def _run(self, node: int, channel: _Channel) -> None:
        with self._lock:
            old = self._channels.get(node)
            self._channels[node] = channel
            early, self._early = self._early, []
            with contextlib.suppress(OSError):  # before anything that is sent from now on
                for message in early:
                    channel.send(message)
        if old is not None:
            old.close()
        self._inbox.put((node, {"t": "hello"}))
        # Clocks are compared at once: a rank may fail within a second.
        self.send(node, {"t": "ping", "sent": time.time_ns()})
        why = channel.receive(lambda message: self._take(node, channel, message))
        channel.close()
        with self._lock:
            current = self._channels.get(node) is channel
            if current:
                del self._channels[node]
        if current and not self._closed.is_set():
            self._inbox.put((node, {"t": "lost", "why": why}))

    def _take(self, node: int, channel: _Channel, message: Message) -> None:
        if message["t"] == "ping":
            with contextlib.suppress(OSError):
                channel.send({"t": "pong", "sent": message["sent"], "here": time.time_ns()})
        elif message["t"] == "pong":
            middle = (int(message["sent"]) + time.time_ns()) // 2
            self._offsets[node] = int(message["here"]) - middle
        else:
            self._inbox.put((node, message))

    def _ping(self) -> None:
        while not self._closed.wait(TIMINGS.ping):
            self.send_all({"t": "ping", "sent": time.time_ns()})

    def send(self, node: int, message: Mapping[str, Any]) -> None:
        """Send to one node. Our own goes to the inbox. A broken connection is reported by its reader."""
        if node == self.node:
            self._inbox.put((node, dict(message)))
            return
        with self._lock:
            channel = self._channels.get(node)
            if channel is None and self.node != 0:
                self._early.append(dict(message))  # node 0 must get it once it is reached
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send(message)

    def send_all(self, message: Mapping[str, Any]) -> None:
        """Send to every connected other node."""
        for node in list(self._channels):
            self.send(node, message)

    def shut(self) -> None:
        """Stop listening on node 0: a node that comes later finds no server."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # else a thread in `accept` takes one more
            self._server.close()

    def connected(self) -> set[int]:
        with self._lock:
            return set(self._channels)

    def let_go(self, end: float) -> None:
        """Wait until every peer has left, at most `Timings.leave` and until ``end`` (monotonic seconds).

        If we end a connection first, our last message may be lost.
        """
        deadline = min(time.monotonic() + TIMINGS.leave, end)
        while self.connected() and time.monotonic() < deadline:
            time.sleep(0.01)

    def here(self, node: int, time_ns: int) -> int:
        """Return ``time_ns`` of ``node``'s clock on this node's."""
        return time_ns - self._offsets.get(node, 0)

    def close(self) -> None:
        self._closed.set()
        self.shut()
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
