"""Ranks that are processes of this machine, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from functools import cache
from typing import Any

import torch
import torch.distributed as dist


def environments(*ranks_per_node: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank; ``2, 1``: two ranks on one node, the third on another."""
    places = [(node, at) for node, count in enumerate(ranks_per_node) for at in range(count)]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(at),
            "LOCAL_WORLD_SIZE": str(ranks_per_node[node]),
            "GROUP_RANK": str(node),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank, (node, at) in enumerate(places)
    ]


class Ranks:
    """One process for each rank, kept from one function to the next.

    Args:
        ranks_per_node: see :func:`environments`.
    """

    def __init__(self, *ranks_per_node: int) -> None:
        self._environments = environments(*ranks_per_node)
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on each rank, all of them in one group. They are of
        modules, and not of a test's, which a process may not find. Raises what it raises."""
        pool = self._pool
        if pool is None:
            spawn = multiprocessing.get_context("spawn")
            pool = self._pool = ProcessPoolExecutor(len(self._environments), spawn)
        with tempfile.TemporaryDirectory() as folder:
            given = f"{folder}/met", function, args
            running = [pool.submit(_as_rank, each, *given) for each in self._environments]
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            for error in filter(None, (each.exception() for each in done)):
                self._pool = None
                pool.shutdown(wait=False, cancel_futures=True)
                raise error
            return [each.result() for each in running]


def _as_rank(
    environment: Mapping[str, str], store: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    for name in [name for name in os.environ if name.startswith("BAGUA_")]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    try:
        dist.barrier()
        found = function(*args)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


kept_ranks = cache(Ranks)
"""The same processes for all tests; they end with this one."""
