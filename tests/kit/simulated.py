"""Simulated machines: clocks, threads, queues and sockets for real code, one thread at a time.

`World.inhabit` replaces ``time``, ``threading``, ``queue`` and ``socket`` of a module. A thread runs until it waits.
The clock then jumps to the next event, so a simulated hour costs only its work. The same seed gives the same run. The
threads are real, and so are the code's own locks and the processor time (`World.cpu`).
"""

from __future__ import annotations

import collections
import heapq
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LATENCY = 0.0005
"""Seconds from one machine to another."""


class Gone(BaseException):
    """Raised in a thread of a dead machine when the world ends: its actions have no more effect."""


class Task:
    """One thread; ``node`` is its machine, or None for the test itself."""

    def __init__(self, node: int | None, name: str) -> None:
        self.node, self.name = node, name
        self.turn = threading.Semaphore(0)
        self.token = 0
        self.waiting = self.woken = self.gone = self.over = False
        self.cpu_ns = self.since_ns = 0
        self.joiners: list[Task] = []


class World:
    """All simulated machines. ``skew`` gives the seconds that each machine's clock is ahead of the true time."""

    def __init__(self, *, skew: Callable[[int], float] = lambda node: 0.0) -> None:
        self.now, self.began = 1000.0, time.time()
        self.skew = skew
        self.current = Task(None, "test")
        self.tasks: list[Task] = []
        self.dead: set[int] = set()
        self.listeners: dict[int, Listener] = {}
        self.ends: list[End] = []
        self.sent: collections.Counter[int | None] = collections.Counter()
        self.bytes: collections.Counter[int | None] = collections.Counter()
        self._test = self.current
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ready: collections.deque[Task] = collections.deque()
        self._numbers = itertools.count()
        self.time = SimpleNamespace(
            monotonic=lambda: self.now,
            time=self.clock,
            time_ns=lambda: int(self.clock() * 1e9),
            sleep=self.sleep,
            gmtime=time.gmtime,
            strftime=time.strftime,
        )
        self.threading = SimpleNamespace(
            Thread=lambda **given: Thread(self, **given),
            Event=lambda: Event(self),
            Lock=threading.Lock,
            get_native_id=threading.get_native_id,
        )
        self.queue = SimpleNamespace(SimpleQueue=lambda: Queue(self), Empty=queue.Empty)
        names = ("AF_INET", "AF_INET6", "SOCK_STREAM", "SOL_SOCKET", "SO_REUSEADDR", "SHUT_RDWR")
        self.socket = SimpleNamespace(
            **{name: getattr(socket, name) for name in names},
            socket=lambda family, kind: Listener(self),
            create_connection=lambda address, timeout: connect(self, address[1], timeout),
        )

    def inhabit(self, patch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> None:
        """Make these modules use the simulated time, threads and sockets."""
        for module in modules:
            for name in ("time", "threading", "queue", "socket"):
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(self, name))
            if hasattr(module, "ThreadPoolExecutor"):
                patch.setattr(module, "ThreadPoolExecutor", lambda *_, **__: Pool(self))
            if getattr(module, "wait", None) is futures.wait:
                patch.setattr(module, "wait", wait)

    # ------------------------------------------------------------------------------------------------------ scheduling

    def clock(self) -> float:
        """Return Unix seconds by the clock of the calling machine."""
        node = self.current.node
        return self.began + self.now - 1000.0 + (0.0 if node is None else self.skew(node))

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def sleep(self, seconds: float) -> None:
        self.block(seconds)

    def block(self, timeout: float | None) -> bool:
        """Wait to be woken. Return False if ``timeout`` seconds pass first."""
        task = self.current
        if task.gone:
            raise Gone
        task.token += 1
        token, task.waiting = task.token, True
        if timeout is not None:
            self.at(self.now + max(timeout, 0.0), lambda: self._wake(task, token, woken=False))
        task.cpu_ns += time.thread_time_ns() - task.since_ns
        self._pass_on(task)
        task.since_ns = time.thread_time_ns()
        if task.gone:
            raise Gone
        return task.woken

    def wake(self, task: Task) -> None:
        self._wake(task, task.token, woken=True)

    def _wake(self, task: Task, token: int, *, woken: bool) -> None:
        if task.waiting and task.token == token and task.node not in self.dead:
            task.waiting, task.woken = False, woken
            self._ready.append(task)

    def _pass_on(self, task: Task | None) -> None:
        """Run the next task. ``task`` waits for its next turn; None if it has ended."""
        following = self._next()
        if following is not task:
            self.current = following
            following.turn.release()
            if task is not None:
                task.turn.acquire()
        self.current = task if task is not None else self.current

    def _next(self) -> Task:
        while not self._ready:
            if not self._due:
                raise AssertionError("all wait, and for nothing")
            self.now, _, call = heapq.heappop(self._due)
            call()
        return self._ready.popleft()

    def spawn(self, node: int | None, call: Callable[[], object], name: str) -> Task:
        task = Task(node, name)
        self.tasks.append(task)

        def whole() -> None:
            task.turn.acquire()
            task.since_ns = time.thread_time_ns()
            try:
                if not task.gone:
                    call()
            except Gone:
                pass
            finally:
                task.over = True
                task.cpu_ns += time.thread_time_ns() - task.since_ns
                for joiner in task.joiners:
                    self.wake(joiner)
                if task.gone:
                    self._test.turn.release()  # `close` ends one thread after the other
                else:
                    self._pass_on(None)

        threading.Thread(target=whole, name=name, daemon=True).start()
        self._ready.append(task)
        return task

    # -------------------------------------------------------------------------------------------------------- machines

    def end(self, node: int, *, silent: bool = False) -> None:
        """End the machine's processes, as ``os._exit`` does. With ``silent`` the machine dies too, and its peers get no
        notice."""
        self.dead.add(node)
        for end in self.ends:
            if end.node == node:
                end.mute = silent
                end.close()

    def cpu(self, node: int) -> float:
        """Return the processor seconds of the machine's threads."""
        return sum(task.cpu_ns for task in self.tasks if task.node == node) / 1e9

    def close(self) -> None:
        """End every thread."""
        for task in self.tasks:
            if not task.over:
                task.gone = True
                self.current = task
                task.turn.release()
                self._test.turn.acquire()
        self.current = self._test


class Queue:
    """`queue.SimpleQueue`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: collections.deque[Any] = collections.deque()
        self._waiting: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._world.wake(self._waiting.pop(0))

    def get(self, timeout: float | None = None) -> Any:
        if not self._items:
            task = self._world.current
            self._waiting.append(task)
            self._world.block(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world, self._set = world, False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            task = self._world.current
            self._waiting.append(task)
            self._world.block(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._set


class Thread:
    """`threading.Thread`, on the machine of the thread that makes it."""

    def __init__(
        self, world: World, *, target: Callable[..., object], args: tuple[Any, ...] = (), name: str, daemon: bool
    ) -> None:
        self._world, self._call, self._name = world, lambda: target(*args), name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._world.spawn(self._world.current.node, self._call, self._name)

    @property
    def over(self) -> bool:
        return self._task is None or self._task.over

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.over:
            self._task.joiners.append(self._world.current)
            self._world.block(timeout)


class Pool:
    """`ThreadPoolExecutor` with a thread for each task."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        return Future(self._world, lambda: call(*args))

    def shutdown(self, **_: Any) -> None:
        pass


class Future:
    """The result of `Pool.submit`."""

    def __init__(self, world: World, call: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: Exception | None = None

        def work() -> None:
            try:
                self._value = call()
            except Exception as exc:  # noqa: BLE001 - raised in result()
                self._error = exc

        self._thread = Thread(world, target=work, name="pool", daemon=True)
        self._thread.start()

    def done(self, timeout: float | None = 0.0) -> bool:
        """Return whether it has ended. Wait for that at most ``timeout`` seconds."""
        if not self._thread.over and timeout != 0.0:
            self._thread.join(timeout)
        return self._thread.over

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def wait(calls: Sequence[Future], timeout: float | None = None) -> tuple[set[Future], set[Future]]:
    """`concurrent.futures.wait`, for one call."""
    (call,) = calls
    return ({call}, set()) if call.done(timeout) else (set(), {call})


# ------------------------------------------------------------------------------------------------------------- sockets


class End:
    """One end of a connection. Data arrives `LATENCY` later, in order. Both counters are those of the sending
    machine."""

    def __init__(self, world: World, node: int | None) -> None:
        self.node, self.mute, self.closed = node, False, False
        self.other: End
        self._world = world
        self._data, self._over = bytearray(), False
        self._timeout: float | None = None
        self._waiting: list[Task] = []
        world.ends.append(self)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        if self.closed or (self.other.closed and not self.other.mute):
            raise BrokenPipeError("broken pipe")
        self._world.sent[self.node] += data.count(b"\n")
        self._world.bytes[self.node] += len(data)
        self._world.at(self._world.now + LATENCY, lambda: self.other._arrives(data))

    def _arrives(self, data: bytes | None) -> None:
        if self.mute:
            return
        if data is None:
            self._over = True
        else:
            self._data += data
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)

    def _wait(self) -> None:
        task = self._world.current
        self._waiting.append(task)
        if not self._world.block(self._timeout):
            self._waiting.remove(task)
            raise TimeoutError("timed out")

    def recv(self, count: int) -> bytes:
        while not self._data and not self._over:
            self._wait()
        data = bytes(self._data[:count])
        del self._data[:count]
        return data

    def readline(self, limit: int) -> bytes:
        while (end := self._data.find(b"\n")) < 0 and not self._over:
            self._wait()
        return self.recv(end + 1 if end >= 0 else len(self._data)) if self._data else b""

    def makefile(self, mode: str) -> End:
        return self

    def shutdown(self, how: int) -> None:
        if not self.closed:
            self._arrives(None)
            if not self.mute:
                self._world.at(self._world.now + LATENCY, lambda: self.other._arrives(None))

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)
        self.closed = True


class Listener:
    """A listening socket. All machines share the ports, as only one machine listens."""

    def __init__(self, world: World) -> None:
        self._world, self._port = world, 0
        self.node = world.current.node
        self._come: Queue = Queue(world)

    def setsockopt(self, *_: int) -> None:
        pass

    def bind(self, address: tuple[str, int]) -> None:
        self._port = address[1]

    def listen(self, backlog: int) -> None:
        self._world.listeners[self._port] = self

    def accept(self) -> tuple[End, None]:
        end = self._come.get()
        if end is None:
            raise OSError("closed")
        return end, None

    def comes(self, end: End) -> None:
        self._come.put(end)

    def shutdown(self, how: int) -> None:
        self._world.listeners.pop(self._port, None)
        self._come.put(None)

    def close(self) -> None:
        self._world.listeners.pop(self._port, None)


def connect(world: World, port: int, timeout: float) -> End:
    """`socket.create_connection`."""
    world.sleep(LATENCY)
    listener = world.listeners.get(port)
    if listener is None or listener.node in world.dead:
        raise ConnectionRefusedError("connection refused")
    ours, theirs = End(world, world.current.node), End(world, listener.node)
    ours.other, theirs.other = theirs, ours
    ours.settimeout(timeout)
    listener.comes(theirs)
    return ours
