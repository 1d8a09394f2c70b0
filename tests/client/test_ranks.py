"""The ranks that the tests train on are like those of a real job."""

from __future__ import annotations

import os

import pytest

from tests.ranks import RankFailure, RankPool

WORDS = [f"layer{index}.weight" for index in range(20)]


def _words_of_a_set() -> tuple[str, ...]:
    return tuple(set(WORDS))


def test_spawned_ranks_iterate_over_a_set_of_strings_in_different_orders(
    three_ranks: RankPool,
) -> None:
    """Or no test would notice a collective order that comes from one."""
    assert len(set(three_ranks.run(_words_of_a_set))) == 3


def test_ranks_that_cannot_make_a_group_say_why() -> None:
    pool = RankPool([2], variables={"GLOO_SOCKET_IFNAME": "nowhere"})
    with pytest.raises(RankFailure, match="nowhere"):
        pool.run(os.getpid)
