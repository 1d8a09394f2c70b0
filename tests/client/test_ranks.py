"""The ranks that the tests train on are like those of a real job."""

from __future__ import annotations

import os

from tests.ranks import RankPool

WORDS = [f"layer{index}.weight" for index in range(20)]


def _words_of_a_set() -> tuple[str, ...]:
    return tuple(set(WORDS))


def test_spawned_ranks_iterate_over_a_set_of_strings_in_different_orders(
    three_ranks: RankPool,
) -> None:
    """Or no test would notice a collective order that comes from one."""
    assert len(set(three_ranks.run(_words_of_a_set))) == 3


def _set_variable() -> None:
    os.environ["BAGUA_AUTOTUNE_URL"] = "1"


def test_a_variable_that_a_test_sets_is_gone_for_the_next(two_ranks: RankPool) -> None:
    two_ranks.run(_set_variable)
    assert two_ranks.run(os.getenv, "BAGUA_AUTOTUNE_URL") == [None, None]
