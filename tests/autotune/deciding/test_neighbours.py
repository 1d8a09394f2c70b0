"""Before a winner is confirmed, the next numbers of channels are tried with it."""

from __future__ import annotations

from bagua_autotune.deciding.neighbours import untried_neighbour
from bagua_autotune.model.knobs import Categorical, Configuration
from bagua_autotune.search import Problem, make_searcher

SPACE = {
    "hierarchical": Categorical(values=("off", "shards")),
    "channels": Categorical(values=(1, 2, 4, 8)),
}
CANDIDATES = tuple(
    Configuration(hierarchical=way, channels=number)
    for way in ("off", "shards")
    for number in (1, 2, 4, 8)
)
PROBLEM = Problem(SPACE, CANDIDATES)


def having(way: str, number: int) -> Configuration:
    return Configuration(hierarchical=way, channels=number)


def asked(
    winner: Configuration, costs: dict[Configuration, float], problem: Problem = PROBLEM
) -> Configuration | None:
    searcher = make_searcher("bayesian", problem)
    for configuration, cost in costs.items():
        searcher.tell(configuration, cost, 0.01)
    return untried_neighbour(winner, costs.keys(), problem, searcher)


def test_the_number_between_two_that_were_tried_is_tried() -> None:
    """Of four and sixteen channels four was faster; eight were fastest, and nobody had looked."""
    costs = {having("off", 1): 0.0, having("off", 2): -0.3, having("off", 8): -0.35}
    assert asked(having("off", 8), costs) == having("off", 4)


def test_another_way_to_reduce_says_nothing_of_it() -> None:
    costs = {
        having("off", 1): 0.0,
        having("off", 4): -0.3,
        having("shards", 2): -0.4,
        having("shards", 1): -0.35,
    }
    assert asked(having("shards", 2), costs) == having("shards", 4)


def test_a_winner_between_two_that_were_tried_is_one() -> None:
    costs = {having("off", 1): 0.0, having("off", 2): -0.3, having("off", 4): -0.2}
    assert asked(having("off", 2), costs) is None


def test_what_failed_is_no_neighbour() -> None:
    costs = {having("off", 1): 0.0, having("off", 2): -0.3}
    without = Problem(SPACE, [c for c in CANDIDATES if c != having("off", 4)])
    assert asked(having("off", 2), costs, without) != having("off", 4)


def test_a_job_without_channels_has_no_neighbours() -> None:
    sizes = [Configuration(bucket_bytes=size) for size in (1, 2)]
    problem = Problem({}, sizes)
    assert asked(sizes[1], {sizes[0]: 0.0, sizes[1]: -0.1}, problem) is None
