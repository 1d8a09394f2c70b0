"""A store on Redis servers: the job's own, or some that are there."""

from __future__ import annotations

import json
import logging
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
from bagua_training.data.redis_server import OwnServer, start_redis_server_cli
from bagua_training.data.store import ClusterStore, Store

__all__ = ["RedisStore", "start_redis_server_cli"]

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
TRIES = 3
"""A server that was just started may not listen yet."""

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
