"""One rank: run the user's script as ``python script`` would, and report its start, error and end to the runtime.

A single file of the standard library, copied into scratch and started by torchrun. It is gone from `sys.modules` before
the script's first line. The script is ``__main__``, with `sys.path` and `sys.argv` as under plain torchrun. Spawned
DataLoader workers import the script, not this file. Two named pipes lead to the runtime: one takes stdout and stderr,
the other one JSON object a line (start, error, end). Its end of file is the moment of death, of any cause.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType, TracebackType
    from typing import Any, TypeVar

    T = TypeVar("T")

_STDLIB = os.path.dirname(os.__file__)
_PATH = [_STDLIB, os.path.join(_STDLIB, "lib-dynload"), *sys.path[1:]]


def _pipe(name: str) -> int | None:
    """Open the runtime's named pipe for writing; return None if there is none. Exit if the runtime does not read it."""
    try:
        fd = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        sys.exit("cloudtrain: the runtime of this node is gone")
    os.set_blocking(fd, True)
    return fd


def _report(fd: int | None, pid: int, event: dict[str, Any]) -> None:
    # A forked child that reaches this line is not the rank.
    if fd is None or os.getpid() != pid:
        return
    event["time_ns"] = time.time_ns()
    try:  # noqa: SIM105  imports only modules that Python already has
        os.write(fd, _ours(_line, event))
    except (OSError, TypeError):
        pass


def _line(event: dict[str, Any]) -> bytes:
    import json

    return (json.dumps(event) + "\n").encode()


def _ours(function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` with Python's own modules: the script may have a json or traceback of its own."""
    path, sys.path[:] = sys.path[:], _PATH
    theirs = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in sys.stdlib_module_names and not file.startswith(_STDLIB):
            theirs[name] = sys.modules.pop(name)
    try:
        return function(*args)
    finally:
        sys.path[:] = path
        sys.modules.update(theirs)


def _load(target: list[str]) -> tuple[ModuleType, CodeType]:
    """Return the script as ``__main__``: a fresh module and its code object."""
    import builtins
    import importlib.machinery
    import importlib.util
    import types

    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    if target[0] == "-m":
        name = target[1]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
        if spec is None or spec.origin is None or not hasattr(spec.loader, "get_code"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
        module.__dict__.update(__file__=spec.origin, __cached__=spec.cached)
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        sys.argv[0] = spec.origin
    else:
        path = os.path.join(os.getcwd(), target[0])  # as Python has it since 3.9: it outlives a chdir
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        module.__file__, module.__loader__ = path, loader
        with open(path, "rb") as stream:
            code = compile(stream.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    return module, code


def _where(trace: TracebackType | None) -> tuple[str | None, int | None]:
    """Return file and line of the innermost frame outside the standard library and packages, else of the innermost."""
    import sysconfig
    import traceback

    frames = traceback.extract_tb(trace)
    if not frames:
        return None, None
    foreign = tuple(p for p in {sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")} if p)
    own = [f for f in frames if not f.filename.startswith((*foreign, "<frozen"))]
    frame = (own or frames)[-1]
    return frame.filename, frame.lineno


def _trim(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` without this file's own frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == _trim.__code__.co_filename:
        trace = trace.tb_next
    return trace


def _shown(exc: BaseException, trace: TracebackType | None) -> TracebackType | None:
    exc.__traceback__ = _trim(trace)  # torch's own hook prints this one, not its argument
    return exc.__traceback__


def _named(exc: BaseException) -> str:
    """Return the exception as a traceback's last line shows it."""
    name, module = type(exc).__name__, type(exc).__module__
    if module not in ("builtins", "__main__"):
        name = f"{module}.{name}"
    try:
        message = str(exc)
    except Exception:  # noqa: BLE001  an exception without a text is reported by its name
        message = ""
    return f"{name}: {message}" if message else name


def _complaint(trace: TracebackType | None) -> str:
    """Return the message that `argparse`, or a function like its ``error`` and ``exit``, was given before it exited."""
    found = ""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name in ("error", "exit"):
            message = frame.f_locals.get("message")
            found = message.strip() if isinstance(message, str) and message.strip() else found
        trace = trace.tb_next
    return found


def _error(exc: BaseException, code: int) -> dict[str, Any]:
    import traceback

    trace = _trim(exc.__traceback__)
    file, line = _where(trace)
    if isinstance(exc, SyntaxError) and trace is None:
        file, line = exc.filename, exc.lineno
    name, said = _named(exc), ""
    if isinstance(exc, SystemExit) and isinstance(exc.code, int):
        said = _complaint(trace)
        why = said or (_named(exc.__context__) if exc.__context__ and not exc.__suppress_context__ else "")
        name = f"SystemExit: {why}" if why else name
    if said:  # the mistake is not inside argparse
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(trace)]
        own = next(number for number, place in enumerate(places, 1) if place == (file, line))
        text = "".join(traceback.format_exception(type(exc), exc, trace, limit=own, chain=False))
    else:
        text = "".join(traceback.format_exception(type(exc), exc, trace))
    return {
        "event": "error",
        "exception": name[:10000],
        "file": file,
        "line": line,
        "traceback": text[-30000:],
        "code": code,
    }


def _shield() -> None:
    """Let this rank, and the DataLoader's workers, outlive a platform's SIGTERM that reaches every process.

    The runtime has blocked the signal for this process and for torchrun. A handler that does nothing takes the place of
    the default, which would end the rank. The script's own handler replaces it, and `exec` restores the default, so a
    program that the script starts can be terminated. A forked worker of a DataLoader keeps the signal blocked: torch
    installs a handler in C there, and the rank fails if its worker ends first. Any other forked child gets the default.
    """
    import _signal  # type: ignore[import-not-found]

    def ignore(number: int, frame: Any) -> None:
        """Do nothing: the notice reaches the script by the preempt file."""

    masks = []

    def before_fork() -> None:
        """Keep a signal for the child until it has the default back."""
        masks.append(_signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGTERM]))

    def in_parent() -> None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/data/dataloader.py"):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            return
        if _signal.getsignal(_signal.SIGTERM) is ignore:
            _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, masks.pop())

    _signal.signal(_signal.SIGTERM, ignore)
    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGTERM])


def _main() -> None:
    # Before the script, import only modules that Python itself already has: a script's own `json` must win.
    import _signal
    import faulthandler

    pipes, package = os.environ.pop("CLOUDTRAIN_WORKER").split("\n", 1)
    local = os.environ.get("LOCAL_RANK", "0")
    out = _pipe(os.path.join(pipes, f"out-{local}"))
    if out is not None:
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
    fd = _pipe(os.path.join(pipes, f"events-{local}"))
    pid = os.getpid()
    shielded = _signal.SIGTERM in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])
    if shielded:
        _shield()
    faulthandler.enable()
    faulthandler.register(_signal.SIGUSR1, all_threads=True)  # else the signal would kill this process
    if fd is not None:
        # Only a direct child still has the pipe under this number.
        os.register_at_fork(after_in_child=lambda: os.close(fd) if os.getppid() == pid else None)
        rank = int(os.environ.get("RANK", "0"))
        os.write(fd, b'{"event":"start","pid":%d,"rank":%d,"time_ns":%d}\n' % (pid, rank, time.time_ns()))

    target = sys.argv[1:3] if sys.argv[1] == "-m" else sys.argv[1:2]
    sys.argv = [target[-1], *sys.argv[1 + len(target) :]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if target[0] == "-m" else os.path.dirname(os.path.abspath(target[0]))
    sys.path.append(package)

    try:
        try:
            for name in os.environ.pop("CLOUDTRAIN_BACKEND_MODULES", "").split():
                __import__(name)  # a kind of device that torch does not know by itself
            module, script = _load(target)
            exec(script, module.__dict__)
        finally:
            if shielded:  # Python's own end restores the default of a signal that has a handler
                _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        event = _ours(_error, exc, code) if code else {"event": "end"}
        _report(fd, pid, event)
        raise
    except BaseException as exc:
        if not isinstance(exc, KeyboardInterrupt):
            _report(fd, pid, _ours(_error, exc, 1))
        hook = sys.excepthook
        sys.excepthook = lambda kind, value, trace: hook(kind, value, _shown(value, trace))
        raise
    _report(fd, pid, {"event": "end"})


if __name__ == "__main__":
    _main()
