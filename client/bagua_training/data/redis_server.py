"""Starting redis-server: one for the job that ends with it, or one that stays."""

from __future__ import annotations

import secrets
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

START_SECONDS = 20.0
TRIES = 5
POLICY = "allkeys-random"


class OwnServer:
    """A redis-server with a random password, on one address, that ends with this process.

    The kernel ends it (PR_SET_PDEATHSIG, prctl(2)) in whatever way this process ends, SIGKILL
    included. It writes nothing to disk; the password is in no command line and no file.

    Args:
        address: the only one that it listens on.
        capacity_bytes: of its memory; beyond, it drops keys at random.

    Raises:
        FileNotFoundError: redis-server, or setpriv of util-linux, is not installed.
        RuntimeError: it did not start.
    """

    def __init__(self, address: str, capacity_bytes: int) -> None:
        for command, package in (("redis-server", "redis-server"), ("setpriv", "util-linux")):
            if shutil.which(command) is None:
                raise FileNotFoundError(
                    f"{command} is not installed (Debian's package {package}). Install it, or give "
                    'the hosts of a running server, or use backend="memory"'
                )
        self._capacity_bytes = capacity_bytes
        for _ in range(TRIES):
            self.host: Mapping[str, Any] = {
                "host": address,
                "port": free_port(address),
                "password": secrets.token_urlsafe(32),
            }
            self._process: subprocess.Popen[bytes] | None = None
            started = threading.Event()
            # The kernel ends it with the thread that started it, so this one waits as long.
            threading.Thread(
                target=self._serve, args=(started,), name="redis-server", daemon=True
            ).start()
            started.wait()
            if self._answers():
                return
            self.stop()
        raise RuntimeError(f"redis-server did not start on {address} in {TRIES} tries")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _serve(self, started: threading.Event) -> None:
        settings = {
            "bind": self.host["host"],
            "port": self.host["port"],
            "requirepass": self.host["password"],
            "maxmemory": self._capacity_bytes,
            "maxmemory-policy": POLICY,
            "appendonly": "no",
            "save": '""',
        }
        try:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "redis-server", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the training, which ends it in order.
            )
            assert self._process.stdin is not None
            with self._process.stdin as configuration:
                for name, value in settings.items():
                    configuration.write(f"{name} {value}\n".encode())
        finally:
            started.set()
        self._process.wait()

    def _answers(self) -> bool:
        """Whether it does to the password, so that it is no other server on the port."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        deadline = time.monotonic() + START_SECONDS
        with redis.Redis(**self.host, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while self._process is not None and self._process.poll() is None:
                try:
                    return bool(client.ping())
                except redis.RedisError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.02)
        return False


def start_redis_server_cli(port: int, capacity: int, *args: str) -> None:
    """Start a redis-server in the background, on this machine's loopback address.

    It stays when this process ends, and has no password unless ``args`` gives one.

    Args:
        port: that it listens on.
        capacity: of its memory, in bytes; beyond, it drops keys at random.
        args: further options of redis-server, ``"--name value"``; they win.

    Raises:
        FileNotFoundError: redis-server is not installed.
        subprocess.CalledProcessError: it did not start; its output says why.
    """
    command = ["redis-server", "--daemonize", "yes", "--bind", "127.0.0.1", "--port", str(port)]
    command += ["--maxmemory", str(capacity), "--maxmemory-policy", POLICY]
    command += ["--appendonly", "no", "--save", "", *shlex.split(" ".join(args))]
    subprocess.run(command, check=True)


def free_port(address: str = "127.0.0.1") -> int:
    """A port on which nothing listens now."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
