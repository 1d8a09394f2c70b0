"""A store on Redis servers: the job's own, which end with it, or some that are there."""

from __future__ import annotations

import json
import logging
import secrets
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(
        "The backend redis needs redis-py: pip install 'bagua-autotune[cache]'"
    ) from error

from bagua_training.data.node import available_memory_bytes, node_address, share_on_node
from bagua_training.data.store import ClusterStore, Store

__all__ = ["RedisStore", "start_redis_server_cli"]

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
TRIES = 3
"""A server that was just started may not listen yet."""
START_SECONDS = 20.0
START_TRIES = 5
POLICY = "allkeys-random"


_own_servers: dict[str, OwnServer] = {}
"""The servers of this process; they end with it."""


class RedisStore(ClusterStore):
    """Redis servers as one store. All ranks must make it, with the same arguments.

    Args:
        hosts: of servers that are there: ``[{"host": "10.0.0.1", "port": 6379}]``, and whatever
            else ``redis.Redis`` takes: ``password``, ``username``, ``ssl``. None: the first rank of
            each node starts one, with a random password, that ends with that rank. There is one for
            each node and job, which later stores use, too.
        cluster_mode: the keys are spread over all servers; otherwise the ranks of a node use one,
            that of their own node where the job starts them.
        capacity_per_node: of a server that is started, in bytes; None: half of the memory that is
            available.

    Raises:
        ImportError: redis-py is not installed.
        RuntimeError: a server could not be started.
        ValueError: ``hosts`` is empty.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int | None = None,
    ) -> None:
        if hosts is None:
            node = share_on_node("redis", lambda: _started(capacity_per_node))
            hosts = [json.loads(text) for text in node.of_nodes]
        elif not hosts:
            raise ValueError("hosts is empty; None starts a server on each node")
        elif not cluster_mode:
            node = share_on_node("hosts", str)
        if not cluster_mode:
            hosts = [hosts[node.number % len(hosts)]]
        super().__init__([_Server(host) for host in hosts])

    def shutdown(self) -> None:
        """End the server that this process started, if any; the user's own stay."""
        for server in _own_servers.values():
            server.stop()


class _Server(Store):
    """A server."""

    def __init__(self, host: Mapping[str, Any]) -> None:
        self._host = dict(host)
        self._connect()
        for remaining in reversed(range(TRIES)):
            try:
                self._client.ping()
                break
            except redis.RedisError as error:
                if remaining:
                    time.sleep(1.0)
                else:
                    logger.warning("cache: %s does not answer: %s", self, error)

    def __str__(self) -> str:
        options = self._client.connection_pool.connection_kwargs
        place = options.get("path") or f"{options.get('host')}:{options.get('port')}"
        return f"the Redis server {place}"

    def __getstate__(self) -> dict[str, Any]:
        return self._host

    def __setstate__(self, host: dict[str, Any]) -> None:
        self._host = host
        self._connect()

    def _connect(self) -> None:
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": ANSWER_SECONDS,
            # A dropped connection is made anew once; by default redis-py tries for seconds.
            "retry": Retry(NoBackoff(), 1),
        }
        self._is_full = False
        self._client: Any = redis.Redis(**(options | self._host))

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        if not dictionary:
            return
        try:
            self._client.mset(dict(dictionary))
        except redis.exceptions.OutOfMemoryError:  # The user's own, with Redis' default noeviction.
            if not self._is_full:
                logger.warning(
                    "cache: %s is full and drops nothing (its maxmemory-policy), so what it has is "
                    "kept, and other samples are loaded each time",
                    self,
                )
            self._is_full = True

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return list(self._client.mget(list(keys))) if keys else []

    def num_keys(self) -> int:
        return int(self._client.dbsize())

    def clear(self) -> None:
        self._client.flushdb()

    def status(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def shutdown(self) -> None:
        """Do nothing: the server is the user's, or ends with the rank that started it."""


def _started(capacity_per_node: int | None) -> str:
    """The host of a server that this process starts, as JSON."""
    capacity = capacity_per_node or available_memory_bytes() // 2
    server = OwnServer(node_address(), capacity)
    _own_servers["redis"] = server
    return json.dumps(server.host)


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
        for _ in range(START_TRIES):
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
        raise RuntimeError(f"redis-server did not start on {address} in {START_TRIES} tries")

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
