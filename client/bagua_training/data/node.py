"""What one rank of each node makes for all of them, and how much memory the node has for it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from bagua_client.communication.topology import Place, place_of, topology_of
from bagua_client.torch_private import groups

logger = logging.getLogger(__name__)

WAIT = timedelta(minutes=5)
POLL_SECONDS = 0.01
LOOPBACK = "127.0.0.1"


class Made(NamedTuple):
    """What the first rank of each node made, and which of them is this rank's node."""

    of_nodes: tuple[str, ...]
    number: int

    @property
    def own(self) -> str:
        return self.of_nodes[self.number]


_made: dict[str, Made] = {}
"""What was made, once in the life of a process, however many process groups it sees."""
_places: list[Place] = []
"""The places of all ranks; empty where this process is on its own."""
_lives: list[str] = []
"""The name of this life of the job's processes, if they have met."""


def share_on_node(name: str, make: Callable[[], str]) -> Made:
    """The first rank of each node makes it, and the others are told; all ranks must call it.

    They meet over the store that the process group was made with, so no collective is entered.

    Raises:
        RuntimeError: it could not be made on some node, or some rank did not call this; on all of
            the ranks that did.
    """
    if name not in _made:
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            logger.warning(
                "cache: made before init_process_group, so each rank has one of its own; make it "
                "afterwards"
            )
        _made[name] = _share(name, make) if _ranks() > 1 else Made((make(),), 0)
    return _made[name]


def node_address() -> str:
    """Return the address of this node for the other ranks; a local one where all ranks are on it.

    For what :func:`share_on_node` is told to make: the ranks know by then where all of them are.
    """
    if len({place.host for place in _places}) <= 1:
        return LOOPBACK
    # Nothing is sent: the kernel only says which of its addresses it would send from. The second
    # is an address that no host has, for a master whose own name means the loopback device to it.
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            found = str(probe.getsockname()[0])
        if not found.startswith("127."):
            return found
    return socket.gethostbyname(socket.gethostname())


def available_memory_bytes() -> int:
    """The free memory of this machine, or of this process's container if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and used and limit[0].isdecimal():
        found.append(max(int(limit[0]) - int(used[0]), 0))
    return min(found)


def _ranks() -> int:
    """The number of the job's ranks; 1 where there is nothing to meet the others over."""
    return dist.get_world_size() if dist.is_initialized() and groups.store() is not None else 1


def _share(name: str, make: Callable[[], str]) -> Made:
    rank = dist.get_rank()
    if not _places:
        _tell(f"place/{rank}", list(place_of(rank)))
        _places.extend(Place(*_told(f"place/{other}", other)) for other in range(_ranks()))
    nodes = topology_of(_places).nodes
    (number,) = (number for number, node in enumerate(nodes) if rank in node)
    failure: Exception | None = None
    if rank == nodes[number][0]:
        try:
            told = {"made": make()}
        except Exception as error:
            failure, told = error, {"failed": f"rank {rank}: {error}"}
        _tell(f"{name}/made/{number}", told)
    of_nodes = [_told(f"{name}/made/{number}", node[0]) for number, node in enumerate(nodes)]
    if failed := [each["failed"] for each in of_nodes if "failed" in each]:
        raise RuntimeError(f"the cache cannot be made on {failed[0]}") from failure
    return Made(tuple(each["made"] for each in of_nodes), number)


def _tell(key: str, value: object) -> None:
    _store().set(f"{_this_life()}/{key}", json.dumps(value))


def _told(key: str, rank: int) -> Any:
    return json.loads(_read(f"{_this_life()}/{key}", rank))


def _this_life() -> str:
    """The prefix of these processes' keys.

    Torchrun may give ranks that it starts anew the store that those before them wrote to. It counts
    the restarts of each node by itself, so its count does not tell the lives apart.
    """
    if not _lives:
        _lives.append(_answered() if dist.get_rank() else _answering())
    return _lives[0]


def _answered() -> str:
    """The life's name, from rank 0. The call is random, so an answer to it is of this life."""
    store, rank, call = _store(), dist.get_rank(), secrets.token_hex(8)
    store.set(f"bagua_cache/call/{rank}", call)
    life = _read(f"bagua_cache/answer/{call}", 0).decode()
    store.set(f"{life}/heard/{rank}", "")
    return life


def _answering() -> str:
    """Name the life, and tell all other ranks.

    A call that is found may be of an earlier life, so calls are answered until all have heard.
    """
    store, life = _store(), f"bagua_cache/{secrets.token_hex(8)}"
    deadline = time.monotonic() + WAIT.total_seconds()
    missing = set(range(1, _ranks()))
    while missing:
        for rank in missing:
            if store.check([f"bagua_cache/call/{rank}"]):
                call = store.get(f"bagua_cache/call/{rank}").decode()
                store.set(f"bagua_cache/answer/{call}", life)
        missing = {rank for rank in missing if not store.check([f"{life}/heard/{rank}"])}
        if missing and time.monotonic() > deadline:
            raise RuntimeError(_absence(min(missing)))
        time.sleep(POLL_SECONDS)
    return life


def _read(key: str, rank: int) -> bytes:
    """Return what that rank writes, once it has."""
    try:
        _store().wait([key], WAIT)
    except RuntimeError as error:
        raise RuntimeError(_absence(rank)) from error
    return _store().get(key)


def _absence(rank: int) -> str:
    return (
        f"rank {rank} has not made its CachedDataset within {WAIT.seconds} s of rank "
        f"{dist.get_rank()}; all ranks must make it"
    )


def _store() -> groups.Store:
    found = groups.store()
    assert found is not None
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
