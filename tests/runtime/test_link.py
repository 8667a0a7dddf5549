"""The node link over real sockets: which peers it accepts, which messages break a connection, and what all peers then
know."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloudtrain.engine.processes import free_port_pair
from cloudtrain.errors import PlatformError
from cloudtrain.runtime.link import Link, _introduce
from cloudtrain.runtime.timings import TIMINGS

KEY = b"k" * 32


class End:
    """A node's link with its inbox."""

    def __init__(self, node: int, nodes: int, port: int, key: bytes = KEY, **more: float) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.link = Link(node=node, nodes=nodes, addr="127.0.0.1", port=port, key=key, inbox=self.inbox, **more)
        self.link.open()

    def get(self, kind: str, seconds: float = 10) -> tuple[int, dict[str, Any]]:
        """Return the next message of this kind; skip others."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                node, message = self.inbox.get(timeout=left)
                if message["t"] == kind:
                    return node, message
        raise AssertionError(f"no {kind}")

    def silent(self, seconds: float = 0.5) -> bool:
        try:
            self.inbox.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def port() -> int:
    return free_port_pair()


@pytest.fixture
def raw(port: int) -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(**rest: Any) -> Raw:
        made.append(Raw(port, **rest))
        return made[-1]

    yield make
    for peer in made:
        peer.channel.close()
        peer.channel._stream.close()


@pytest.fixture
def ends(port: int) -> Iterator[Callable[..., End]]:
    made: list[End] = []

    def make(node: int, nodes: int = 2, key: bytes = KEY, **more: float) -> End:
        made.append(End(node, nodes, port, key, **more))
        return made[-1]

    yield make
    for end in made:
        end.link.close()


def dial(port: int) -> socket.socket:
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def closed(sock: socket.socket) -> bool:
    sock.settimeout(8)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


class Raw:
    """A hand-written peer: it knows the key, and a test can make it misbehave."""

    def __init__(self, port: int, node: int = 1, clock_ahead_ns: int = 0) -> None:
        self.sock = dial(port)
        self.channel = _introduce(self.sock, KEY, node)
        self.ahead = clock_ahead_ns

    def answer_pings(self) -> threading.Thread:
        def each(message: dict[str, Any]) -> None:
            if message["t"] == "ping":
                self.channel.send({"t": "pong", "sent": message["sent"], "here": time.time_ns() + self.ahead})

        thread = threading.Thread(target=self.channel.receive, args=(each,), daemon=True)
        thread.start()
        return thread

    def line(self, message: dict[str, Any]) -> bytes:
        """Return the next message's bytes without sending them."""
        wire: list[bytes] = []
        keep, self.channel._sock = self.channel._sock, _Tap(wire)  # type: ignore[assignment]
        self.channel.send(message)
        self.channel._sock = keep
        return wire[0]


class _Tap:
    def __init__(self, wire: list[bytes]) -> None:
        self.sendall = wire.append


# ------------------------------------------------------------------------------------------------------ among friends


def test_messages_go_both_ways_in_order_and_to_oneself(ends: Callable[..., End]) -> None:
    head, peer = ends(0), ends(1)
    assert head.get("hello") == (1, {"t": "hello"})
    assert peer.get("hello") == (0, {"t": "hello"})
    for i in range(200):
        peer.link.send(0, {"t": "x", "i": i, "text": "é\n\u2028" * 3})
        head.link.send_all({"t": "y", "i": i})
    assert [head.get("x")[1]["i"] for _ in range(200)] == list(range(200))
    assert [peer.get("y")[1]["i"] for _ in range(200)] == list(range(200))
    head.link.send(0, {"t": "self"})
    assert head.get("self") == (0, {"t": "self"})
    peer.link.send(1, {"t": "self"})
    assert peer.get("self") == (1, {"t": "self"})
    assert (head.link.connected(), peer.link.connected()) == ({1}, {0})


def test_a_megabyte_in_one_message(ends: Callable[..., End]) -> None:
    head, peer = ends(0), ends(1)
    head.get("hello")
    peer.get("hello")  # its own end is open only now
    peer.link.send(0, {"t": "big", "text": "x" * (1 << 20)})
    assert len(head.get("big", 30)[1]["text"]) == 1 << 20


@pytest.mark.slow
def test_a_part_of_a_checkpoint_may_have_half_a_million_files(ends: Callable[..., End]) -> None:
    """Node 0 would wait for this message until the end of the run, and the run would fail without its checkpoint."""
    head, peer = ends(0), ends(1)
    head.get("hello")
    peer.get("hello")
    files = {f"node-1/step-1/images/{number:07}.png": {"size": 1000, "sha256": "0" * 64} for number in range(500_000)}
    peer.link.send(0, {"t": "copied", "files": files})
    assert head.get("copied", 60)[1]["files"] == files
    assert (head.link.connected(), peer.link.connected()) == ({1}, {0})


def test_senders_in_many_threads_do_not_mix(ends: Callable[..., End]) -> None:
    head, peer = ends(0), ends(1)
    head.get("hello")
    peer.get("hello")

    def work(i: int) -> None:
        for j in range(100):
            peer.link.send(0, {"t": "m", "i": i, "j": j, "pad": "p" * 500})

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    got = [head.get("m")[1] for _ in range(600)]
    for i in range(6):
        assert [m["j"] for m in got if m["i"] == i] == list(range(100))
    for thread in threads:
        thread.join()


def test_peers_may_come_long_before_node_0(ends: Callable[..., End]) -> None:
    peer = ends(1)
    time.sleep(0.6)
    head = ends(0)
    assert head.get("hello")[0] == 1
    assert peer.get("hello")[0] == 0


def test_eight_nodes(ends: Callable[..., End]) -> None:
    peers = [ends(n, 8) for n in range(1, 8)]
    head = ends(0, 8)
    assert {head.get("hello")[0] for _ in range(7)} == set(range(1, 8))
    head.link.send_all({"t": "go"})
    for peer in peers:
        assert peer.get("go") == (0, {"t": "go"})
        peer.link.send(0, {"t": "done", "me": peer.link.node})
    for _ in range(7):
        node, message = head.get("done")
        assert node == message["me"]
    peers[3].link.close()
    assert head.get("lost")[0] == 4
    head.link.send_all({"t": "still"})
    for peer in peers[:3] + peers[4:]:
        peer.get("still")
    assert head.link.connected() == {1, 2, 3, 5, 6, 7}


def test_one_node_needs_no_socket(ends: Callable[..., End], port: int) -> None:
    end = ends(0, 1)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    end.link.send_all({"t": "x"})
    end.link.send(0, {"t": "own"})
    assert end.get("own") == (0, {"t": "own"})


def test_a_lost_connection_is_told_on_both_sides(ends: Callable[..., End]) -> None:
    head, peer = ends(0), ends(1)
    head.get("hello")
    peer.get("hello")
    head.link.close()
    assert peer.get("lost")[0] == 0
    assert peer.link.connected() == set()
    assert head.silent()  # the side that closed gets no message


def test_a_taken_port_is_said_so(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(PlatformError, match=f"cannot listen on port {port}"):
            Link(node=0, nodes=2, addr="127.0.0.1", port=port, key=KEY, inbox=queue.SimpleQueue()).open()


def test_it_listens_on_loopback_alone_when_that_is_the_address(ends: Callable[..., End], port: int) -> None:
    ends(0)
    with open("/proc/net/tcp") as stream:
        listening = {row.split()[1] for row in stream if row.split()[3] == "0A"}
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


# -------------------------------------------------------------------------------------------------------------- clocks


def test_stamps_of_a_peer_are_brought_to_node_0s_clock(ends: Callable[..., End], raw: Callable[..., Raw]) -> None:
    head = ends(0)
    ahead = 5_000_000_000
    peer = raw(clock_ahead_ns=ahead)
    peer.answer_pings()
    deadline = time.monotonic() + 10
    while abs(head.link.here(1, ahead)) > 1_000_000_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    now = time.time_ns()
    assert abs(head.link.here(1, now + ahead) - now) < 100_000_000
    assert head.link.here(0, now) == now


def test_equal_clocks_are_left_alone(ends: Callable[..., End]) -> None:
    head, _ = ends(0), ends(1)
    head.get("hello")
    deadline = time.monotonic() + 10
    while not head.link._offsets and time.monotonic() < deadline:
        time.sleep(0.05)
    assert abs(head.link.here(1, 10**18) - 10**18) < 50_000_000


# ------------------------------------------------------------------------------------------------------ among strangers


def test_a_wrong_key_gets_nowhere(ends: Callable[..., End]) -> None:
    head, stranger = ends(0), ends(1, key=b"x" * 32)
    assert head.silent(1.0)
    assert stranger.silent(0.1)
    assert head.link.connected() == set()
    right = ends(1)
    assert head.get("hello") == (1, {"t": "hello"})
    assert right.get("hello") == (0, {"t": "hello"})


def test_a_false_node_0_gets_nothing(ends: Callable[..., End], port: int) -> None:
    """A false node 0 can greet but not prove the key: the peer hangs up and looks again."""
    greeted = []
    with socket.socket() as false:
        false.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        false.bind(("127.0.0.1", port))
        false.listen()
        peer = ends(1)
        for reply in (b"0" * 64 + b"\n", "é".encode() * 64 + b"\n", b"\xff\n", b""):
            sock, _ = false.accept()
            sock.sendall(b"cloudtrain " + b"0" * 32 + b"\n")
            greeted.append(json.loads(sock.recv(4096)))
            with contextlib.suppress(OSError):
                sock.sendall(reply)
            sock.close()
        for word in (b"\xff\xfe\x00\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"x" * 5000):
            sock, _ = false.accept()
            with contextlib.suppress(OSError):
                sock.sendall(word)
            sock.close()
    assert len({hello["mac"] for hello in greeted}) == 4  # new each time, against replay
    assert peer.silent(0.1)
    head = ends(0)
    assert head.get("hello")[0] == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, b"\n", b"{}\n",
        b"[]\n", b"null\n", b"\xff\xff\n", b'{"node": 1}\n', b'{"node": "x", "nonce": "", "mac": ""}\n',
        b'{"node": 1, "nonce": "0", "mac": "\xc3\xa9"}\n', b'{"node": 0, "nonce": "0", "mac": "0"}\n',
        b'{"node": 99, "nonce": "0", "mac": "0"}\n', b'{"node": -1, "nonce": "0", "mac": "0"}\n', b"x" * 10_000,
        b'{"node": 1, "nonce": "\\ud800", "mac": "\\ud800"}\n', b'{"node": 1e999, "nonce": "", "mac": ""}\n',
    ],
)  # fmt: skip
def test_garbage_is_hung_up_on_and_leaves_nothing(
    ends: Callable[..., End], port: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "handshake", 1.0)
    head = ends(0)
    with dial(port) as sock:
        assert sock.recv(64).startswith(b"cloudtrain ")
        sock.sendall(data)
        assert closed(sock)
    assert head.link.connected() == set()
    peer = ends(1)
    assert head.get("hello")[0] == 1
    assert peer.get("hello")[0] == 0


def test_who_says_nothing_keeps_nobody_waiting(ends: Callable[..., End], port: int) -> None:
    head = ends(0)
    idle = [dial(port) for _ in range(20)]
    peer = ends(1)
    assert head.get("hello", 5)[0] == 1
    assert peer.get("hello", 5)[0] == 0
    for sock in idle:
        sock.close()


def tampered(line: bytes) -> bytes:
    return line.replace(b'"failed"', b'"faileD"')


@pytest.mark.parametrize(
    "change",
    [
        tampered,
        lambda line: b"0" * 64 + line[64:],
        lambda line: line[65:],
        lambda line: "é".encode() * 32 + line[64:],
        lambda line: b"\xff" * 64 + line[64:],
        lambda line: b"\n",
        lambda line: line[:64] + b" [1]\n",
    ],
    ids=["text", "mac", "no mac", "mac beyond ascii", "mac of no text", "empty", "other"],
)
def test_a_line_that_was_tampered_with_ends_the_connection(
    ends: Callable[..., End], raw: Callable[..., Raw], change: Callable[[bytes], bytes]
) -> None:
    head = ends(0)
    peer = raw()
    head.get("hello")
    good = peer.line({"t": "fine"})
    bad = peer.line({"t": "failed"})
    after = peer.line({"t": "after"})
    peer.sock.sendall(good)
    assert head.get("fine") == (1, {"t": "fine"})
    peer.sock.sendall(change(bad) + after)
    assert head.get("lost")[0] == 1
    assert head.silent(0.2)
    assert closed(peer.sock)


def test_a_replayed_or_left_out_line_ends_the_connection(ends: Callable[..., End], raw: Callable[..., Raw]) -> None:
    head = ends(0)
    peer = raw()
    head.get("hello")
    first = peer.line({"t": "once"})
    peer.sock.sendall(first)
    head.get("once")
    peer.sock.sendall(first)
    assert head.get("lost")[0] == 1
    peer = raw()
    head.get("hello")
    peer.line({"t": "never sent"})
    peer.sock.sendall(peer.line({"t": "second"}))
    assert head.get("lost")[0] == 1


def test_a_line_of_one_connection_is_worth_nothing_in_the_next_nor_back(
    ends: Callable[..., End], raw: Callable[..., Raw]
) -> None:
    head = ends(0)
    peer = raw()
    head.get("hello")
    line = peer.line({"t": "stop"})
    peer.sock.shutdown(socket.SHUT_RDWR)
    head.get("lost")
    again = raw()
    head.get("hello")
    again.sock.sendall(line)
    assert head.get("lost")[0] == 1
    # A peer cannot replay node 0's own messages to it.
    mirror = raw()
    head.get("hello")
    head.link.send(1, {"t": "stop"})
    mirror.sock.settimeout(5)
    data = b""
    while b'"stop"' not in data:
        data += mirror.sock.recv(4096)
    mirror.sock.sendall(data)
    assert head.get("lost")[0] == 1


def test_a_node_that_comes_again_takes_its_own_place(ends: Callable[..., End], raw: Callable[..., Raw]) -> None:
    head = ends(0)
    first = raw()
    head.get("hello")
    second = raw()
    head.get("hello")
    assert closed(first.sock)
    assert head.link.connected() == {1}
    second.channel.send({"t": "here"})
    assert head.get("here") == (1, {"t": "here"})


def test_a_silent_peer_is_lost_in_time(
    ends: Callable[..., End], raw: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "silence", 1.0)
    head = ends(0)
    peer = raw()  # it sends nothing and does not hang up, like a machine without power
    head.get("hello")
    began = time.monotonic()
    assert head.get("lost", 5)[0] == 1
    assert 0.8 < time.monotonic() - began < 4
    peer.sock.close()


@pytest.mark.slow
def test_pings_keep_a_quiet_connection(ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "silence", 1.0)
    monkeypatch.setattr(TIMINGS, "ping", 0.2)
    head, peer = ends(0), ends(1)
    head.get("hello")
    peer.get("hello")
    assert head.silent(2.0)
    assert peer.silent(0.1)


def test_node_0_that_never_answers_is_lost(ends: Callable[..., End], port: int) -> None:
    peer = ends(1, join_timeout=0.6)
    node, message = peer.get("lost")
    assert (node, message["why"]) == (0, f"no answer from 127.0.0.1:{port} for 1s")


def test_the_wire_holds_no_key(ends: Callable[..., End], port: int) -> None:
    ends(0)
    with dial(port) as sock:
        greeting = sock.recv(64)
    assert KEY not in greeting
