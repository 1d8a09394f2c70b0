"""Pools of real ranks, started once for all tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


def _pool(*ranks_per_node: int, spawned: bool = False) -> Iterator[RankPool]:
    pool = RankPool(ranks_per_node, spawned=spawned)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks on one node."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks: two on the first node, one on the second.

    Spawned, so that what the ranks agree on is also tried where their hashes of strings differ.
    """
    yield from _pool(2, 1, spawned=True)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four ranks: two on each of two nodes."""
    yield from _pool(2, 2)
