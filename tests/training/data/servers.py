"""A redis-server of a test's own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def has_redis() -> bool:
    """Whether both redis-py and redis-server are there."""
    return importlib.util.find_spec("redis") is not None and bool(shutil.which("redis-server"))


class Server:
    """On a port of the loopback device, without a password; it can be stopped and started."""

    def __init__(self, capacity: int, policy: str) -> None:
        from bagua_training.data.redis_store import free_port

        self.host: dict[str, Any] = {"host": "127.0.0.1", "port": free_port()}
        self._options = f"--maxmemory {capacity} --maxmemory-policy {policy}"
        self.start()

    def start(self) -> None:
        import redis

        command = f"redis-server --bind 127.0.0.1 --port {self.host['port']} --appendonly no"
        self._process = subprocess.Popen(
            [*command.split(), *self._options.split(), "--save", ""], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                redis.Redis(**self.host).ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(capacity: int = 100_000_000, policy: str = "allkeys-random") -> Iterator[Server]:
    server = Server(capacity, policy)
    try:
        yield server
    finally:
        server.stop()
