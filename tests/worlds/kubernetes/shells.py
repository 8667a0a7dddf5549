"""The exec endpoint of the fake cluster: a websocket (v5.channel.k8s.io) in front of the container engine's exec."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler
from typing import Any

from docker.utils.socket import frames_iter
from websocket._abnf import ABNF, frame_buffer

from cloudtrain.engine.docker_api import make_client

__all__ = ["serve"]

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PROTOCOL = "v5.channel.k8s.io"
ERROR, RESIZE, CLOSE = 3, 4, 255


def serve(handler: BaseHTTPRequestHandler, container: str, query: str) -> None:
    """Run the command of ``query`` in a container, and copy its streams until it ends."""
    query_values = urllib.parse.parse_qs(query, keep_blank_values=True)
    tty = query_values["tty"] == ["true"]
    assert PROTOCOL in handler.headers["Sec-WebSocket-Protocol"].split(",")
    key = base64.b64encode(hashlib.sha1(handler.headers["Sec-WebSocket-Key"].encode() + MAGIC).digest()).decode()
    handler.send_response(101)
    for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", key)):
        handler.send_header(name, value)
    handler.send_header("Sec-WebSocket-Protocol", PROTOCOL)
    handler.end_headers()
    handler.close_connection = True
    with make_client("auto") as api:
        made = api.exec_create(container, query_values["command"], stdin=True, tty=tty)["Id"]
        engine = api.exec_start(made, socket=True, tty=tty)
        threading.Thread(target=_take, args=(handler, api, made, engine._sock), daemon=True).start()
        for stream, data in frames_iter(engine, tty):
            _send(handler, bytes([1 if tty else stream]) + data)
        code = api.exec_inspect(made)["ExitCode"]
        engine._response.close()
    result: dict[str, Any] = {"status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        result = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
    _send(handler, bytes([ERROR]) + json.dumps(result).encode())
    _send(handler, (1000).to_bytes(2, "big"), ABNF.OPCODE_CLOSE)


def _send(handler: BaseHTTPRequestHandler, data: bytes, opcode: int = ABNF.OPCODE_BINARY) -> None:
    frame = ABNF(1, 0, 0, 0, opcode, 0, data)  # a server masks no frames
    with contextlib.suppress(OSError):
        handler.wfile.write(frame.format())


def _take(handler: BaseHTTPRequestHandler, api: Any, made: str, engine: socket.socket) -> None:
    """Pass the client's frames on to the command."""
    frames = frame_buffer(handler.rfile.read, skip_utf8_validation=True)
    with contextlib.suppress(Exception):  # the connection ends
        while (frame := frames.recv_frame()).opcode != ABNF.OPCODE_CLOSE:
            data = frame.data if isinstance(frame.data, bytes) else frame.data.encode()
            channel, rest = data[0], data[1:]
            if channel == RESIZE:
                size = json.loads(rest)
                api.exec_resize(made, height=size["Height"], width=size["Width"])
            elif channel == CLOSE:
                engine.shutdown(socket.SHUT_WR)
            elif rest:
                engine.sendall(rest)
