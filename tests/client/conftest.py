"""Pools of real ranks, started once for all tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


def _pool(*ranks_per_node: int) -> Iterator[RankPool]:
    pool = RankPool(ranks_per_node)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks on one node."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks: two on the first node, one on the second."""
    yield from _pool(2, 1)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four ranks: two on each of two nodes."""
    yield from _pool(2, 2)
