"""Measures the link between two hosts; both run this file, with one of these words.

answer ADDRESS      says a line when it listens, echoes the pings and takes the stream
ask ADDRESS SECONDS prints the median round trip in seconds; the other side prints the rate, in
                    bits per second of TCP
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


def answer(address: str) -> None:
    """Echo pings; then count what is streamed, and tell how much came how fast."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            connection.sendall(connection.recv(len(PING), socket.MSG_WAITALL))
        seconds = float(connection.recv(16, socket.MSG_WAITALL))
        chunk = bytearray(CHUNK_BYTES)
        settled = time.perf_counter() + seconds * SETTLE_SHARE
        while time.perf_counter() < settled:
            connection.recv_into(chunk)
        began, received = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            received += connection.recv_into(chunk)
        print(received * 8 / elapsed, flush=True)


def ask(address: str, seconds: float) -> None:
    """Ping, then stream until the other side has seen enough and hangs up."""
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(PINGS):
            began = time.perf_counter()
            connection.sendall(PING)
            connection.recv(len(PING), socket.MSG_WAITALL)
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
    if sys.argv[1] == "answer":
        answer(sys.argv[2])
    else:
        ask(sys.argv[2], float(sys.argv[3]))
