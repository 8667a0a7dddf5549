"""Program that runs a command in a pod by the exec API: ``python -m … FACTS COMMAND…``

``FACTS`` are JSON: ``settings`` of the caller, ``pod`` and ``tty``. The program passes on its standard streams, the
size of its terminal, and the command's exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any

from ...errors import CloudtrainError, LostContactError
from . import Settings
from .api import Account

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
"""Channels of the protocols v4.channel.k8s.io and v5.channel.k8s.io."""
LOOK = 0.2
"""Longest seconds until a new size of the terminal is passed on."""


def main(facts: str, *command: str) -> int:
    """Run ``command`` and return its exit code. If it cannot run, print one line and return our error's code."""
    asked = json.loads(facts)
    try:
        link = Account(Settings(**asked["settings"])).exec(asked["pod"], command, tty=asked["tty"])
        from websocket import WebSocketException

        with _raw(asked["tty"]), contextlib.suppress(WebSocketException, ConnectionError):
            _pump(link, asked["tty"])
        return _exit_code(json.loads(link.read_channel(ERROR) or "{}"))
    except CloudtrainError as exc:
        sys.stderr.write(f"error: {exc.with_hint()}\n")
        return exc.exit_code


@contextlib.contextmanager
def _raw(terminal: bool) -> Iterator[None]:
    saved = termios.tcgetattr(STDIN) if terminal else None
    try:
        if saved:
            tty.setraw(STDIN)
        yield
    finally:
        if saved:
            termios.tcsetattr(STDIN, termios.TCSADRAIN, saved)


def _pump(link: Any, terminal: bool) -> None:
    """Carry bytes both ways until the command ends. A server before 1.30 never sees the end of the input."""
    size, inputs = os.terminal_size((0, 0)), [link.sock.sock, STDIN]
    while link.is_open():
        if terminal and size != (size := os.get_terminal_size(STDIN)):
            link.write_channel(RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}))
        if STDIN in select.select(inputs, [], [], LOOK)[0]:
            if data := os.read(STDIN, 1 << 16):
                link.write_channel(STDIN, data)
            else:
                inputs.remove(STDIN)
                link.close_channel(STDIN)
        link.update(timeout=0)
        for channel, stream in ((STDOUT, sys.stdout.buffer), (STDERR, sys.stderr.buffer)):
            stream.write(link.read_channel(channel) or b"")
            stream.flush()


def _exit_code(said: Any) -> int:
    """Return the exit code of the last message. Raises `LostContactError` if it has none."""
    if said.get("status") == "Success":
        return 0
    code = ((said.get("details") or {}).get("causes") or [{}])[0].get("message", "")
    if not code.isdecimal():
        raise LostContactError(f"the shell ended: {said.get('message') or 'the connection was lost'}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
