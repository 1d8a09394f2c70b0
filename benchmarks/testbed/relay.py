"""Hands connections on to a host's address: what makes a page there reachable for a browser here.

    relay.py FILE_NUMBER HOST PORT

The number is that of a listening socket that this process was given. A socket stays in the network
in which it was made, whichever the process is in that uses it (network_namespaces(7)).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

LISTENER = "BAGUA_TESTBED_LISTENER"
CHUNK_BYTES = 1 << 16


def listener() -> socket.socket:
    """One at a free port of the network in which this program was started, also once it has started
    itself again in another (see ``rootless.enter``)."""
    number = os.environ.get(LISTENER)
    if number is not None:
        return socket.socket(fileno=int(number))
    return socket.create_server(("127.0.0.1", 0))


async def serve(listening: socket.socket, host: str, port: int) -> None:
    """Until this process is ended."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(host, port)
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        writer.close()

    async with await asyncio.start_server(connected, sock=listening) as server:
        await server.serve_forever()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until the source says no more, which the sink is told."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            sink.write(chunk)
            await sink.drain()
        sink.write_eof()


if __name__ == "__main__":
    number, host, port = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(socket.socket(fileno=int(number)), host, int(port)))
