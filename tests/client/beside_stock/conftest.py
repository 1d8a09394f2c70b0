"""The ways in which ours is treated beside torch's wrapper, and pools that give up soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from bagua_client import Configuration
from tests.client.beside_stock.side_by_side import BY_NODE, FLAT
from tests.ranks import RankPool

COLLECTIVE_SECONDS = 15.0
RUN_SECONDS = 45.0


def _pool(*ranks_per_node: int, seconds: float = COLLECTIVE_SECONDS) -> Iterator[RankPool]:
    pool = RankPool(ranks_per_node, collective_timeout_seconds=seconds)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pair_of_ranks() -> Iterator[RankPool]:
    """Two ranks on one node; a collective that some of them never enter fails soon."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def two_by_two_ranks() -> Iterator[RankPool]:
    """Two ranks on each of two nodes, as impatient."""
    yield from _pool(2, 2)


@dataclass(frozen=True)
class Beside:
    """A pool, and what ours is re-cut to on it, in turn."""

    pool: RankPool
    recuts: tuple[Configuration, ...]

    def check(self, function: Callable[..., str | None], *args: Any) -> None:
        """``function(recuts, *args)`` finds no difference on any rank, and comes to an end."""
        found: Sequence[str | None] = self.pool.run(
            function, self.recuts, *args, timeout_seconds=RUN_SECONDS
        )
        assert found == [None] * self.pool.world_size


# Ours when tuning is off is compared by torch's own tests (make upstream-ddp).
WAYS = {"flat": ("pair_of_ranks", FLAT), "by-node": ("two_by_two_ranks", BY_NODE)}


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Beside:
    """In one of the ways."""
    pool, recuts = WAYS[getattr(request, "param", "flat")]
    return Beside(request.getfixturevalue(pool), recuts)


def table(*rows: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Of a way, a function that compares, and its arguments: values and ways in pairs, so that a
    fault of one is seen in some row, and not in all that have it."""
    named = [
        pytest.param(way, function, arguments, id="-".join([way, function.__name__, str(at)]))
        for at, (way, function, *arguments) in enumerate(rows)
    ]
    return pytest.mark.parametrize(("beside", "compare", "arguments"), named, indirect=["beside"])
