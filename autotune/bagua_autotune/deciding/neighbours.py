"""The winner's neighbours before the search ends: one number of channels more, and one less.

How many connections a link takes is seen by trying them: four may be slower than two, and eight
faster than both. So a winner has not been found while the next number on either side, with the same
way to reduce, was never tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bagua_autotune.model.knobs import CHANNELS_KNOB, WAYS_KNOB, Configuration
from bagua_autotune.search import Problem, Searcher

# What is expected to be slower than the winner by more is not worth a trial.
NEAR = 0.25


def untried_neighbour(
    winner: Configuration,
    tried: Collection[Configuration],
    problem: Problem,
    searcher: Searcher,
) -> Configuration | None:
    """The more promising one of what is to be tried beside the winner; None if it has been.

    Args:
        winner: of the search so far.
        tried: all that was measured.
        problem: what may be tried.
        searcher: told of the trials; its costs are in parts of the default's.
    """
    highest = searcher.expected_cost(winner) + NEAR
    allowed = set(problem.candidates)
    known = {_place(configuration) for configuration in tried}
    found = [
        (searcher.expected_cost(neighbour), neighbour)
        for neighbour in _neighbours(winner, problem)
        if neighbour in allowed and _place(neighbour) not in known
    ]
    cost, neighbour = min(found, key=lambda pair: pair[0], default=(highest, None))
    return neighbour if cost < highest else None


def _neighbours(winner: Configuration, problem: Problem) -> Iterator[Configuration]:
    """The winner with the next lower and the next higher number of channels."""
    own = winner.get(CHANNELS_KNOB)
    offered = sorted({c.number(CHANNELS_KNOB) for c in problem.candidates if CHANNELS_KNOB in c})
    if own not in offered:
        return
    place = offered.index(winner.number(CHANNELS_KNOB))
    for number in offered[max(place - 1, 0) : place] + offered[place + 1 : place + 2]:
        yield Configuration({**winner, CHANNELS_KNOB: number})


def _place(configuration: Configuration) -> tuple[object, object]:
    """What neighbours differ in, and what they share."""
    return configuration.get(WAYS_KNOB), configuration.get(CHANNELS_KNOB)
