"""Forward some TCP ports of a container to another one, as a Kubernetes Service does for a pod.

A container runs this one file by ``python -c``, with the target's name and the ports as arguments; standard library
alone. A connection that the target does not take is reset, so that whoever dials sees no server there.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

__all__ = ["main"]

CHUNK = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of ``reader``, then say so to the other side, which may still answer."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _serve(target: str, ports: list[int]) -> None:
    def handler(port: int) -> object:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, back = await asyncio.open_connection(target, port)
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
            for end in (back, writer):
                end.close()

        return connected

    servers = [await asyncio.start_server(handler(port), "0.0.0.0", port) for port in ports]  # type: ignore[arg-type]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main(argv: list[str]) -> None:
    """``argv``: the target's name and the ports."""
    asyncio.run(_serve(argv[0], [int(port) for port in argv[1:]]))


if __name__ == "__main__":
    main(sys.argv[1:])
