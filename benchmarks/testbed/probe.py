"""Measures the link between two hosts; both run this file, with one of these words.

answer ADDRESS      says a line when it listens, echoes the pings and takes the stream
ask ADDRESS SECONDS prints the median round trip in seconds; the other side prints the rate, in
                    bits per second of TCP

Whoever hears nothing from the other for a while ends, with a sentence on stderr.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time

PORT = 5001
PINGS = 200
PING = b"?" * 16
CHUNK_BYTES = 1 << 16
# Not measured: TCP finds the rate, and the link's queue fills.
SETTLE_SHARE = 0.2
SILENCE_SECONDS = 30.0


def receive(connection: socket.socket, count_bytes: int) -> bytes:
    """So many bytes.

    Raises:
        ConnectionError: the other side hung up before.
    """
    received = b""
    while len(received) < count_bytes:
        chunk = connection.recv(count_bytes - len(received))
        if not chunk:
            raise ConnectionError("the other side hung up")
        received += chunk
    return received


def answer(address: str) -> None:
    """Echo pings; then count what is streamed, and tell how much came how fast."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(SILENCE_SECONDS)
        print("ready", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            connection.sendall(receive(connection, len(PING)))
        seconds = float(receive(connection, 16))
        _stream(connection, seconds * SETTLE_SHARE)
        print(_stream(connection, seconds), flush=True)


def _stream(connection: socket.socket, seconds: float) -> float:
    """Take what comes for so long; bits per second."""
    chunk = bytearray(CHUNK_BYTES)
    began, received_bytes = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        count = connection.recv_into(chunk)
        if not count:
            raise ConnectionError("the other side hung up")
        received_bytes += count
    return received_bytes * 8 / elapsed


def ask(address: str, seconds: float) -> None:
    """Ping, then stream until the other side has seen enough and hangs up."""
    with socket.create_connection((address, PORT), SILENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(PINGS):
            began = time.perf_counter()
            connection.sendall(PING)
            receive(connection, len(PING))
            round_trips.append(time.perf_counter() - began)
        print(statistics.median(round_trips), flush=True)
        connection.sendall(f"{seconds:<16g}".encode())
        chunk = bytes(CHUNK_BYTES)
        try:
            while True:
                connection.sendall(chunk)
        except (ConnectionResetError, BrokenPipeError):
            return


if __name__ == "__main__":
    try:
        if sys.argv[1] == "answer":
            answer(sys.argv[2])
        else:
            ask(sys.argv[2], float(sys.argv[3]))
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
