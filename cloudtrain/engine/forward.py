"""Forward some TCP ports of a container to another one, as a Kubernetes Service does for a pod.

A container runs the text of this one file by ``python -c``, so it imports the standard library alone. Its arguments:
the seconds to wait for a target that starts a moment later, the target's name, and the ports. A connection that the
target does not take is reset.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

CHUNK = 1 << 16


async def _dial(target: str, port: int, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the target, retrying for ``seconds``. Raises `OSError`."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await asyncio.open_connection(target, port)
        except OSError:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.1)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of ``reader`` and pass it on: the other side may still answer. A reset is passed on."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


async def _serve(seconds: float, target: str, ports: list[int]) -> None:
    async def connected(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await _dial(target, port, seconds)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        for end in (back, writer):
            end.close()

    servers = [await asyncio.start_server(partial(connected, port), "0.0.0.0", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main(argv: list[str]) -> None:
    """Run the forwarder. ``argv``: the seconds to wait for the target, the target's name and the ports."""
    seconds, target, *ports = argv
    asyncio.run(_serve(float(seconds), target, [int(port) for port in ports]))


if __name__ == "__main__":
    main(sys.argv[1:])
