"""The first trials of a search, before it has learned anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Categorical, LogInteger, Space, is_ordered
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import CHANNELS_KNOB, WAYS_KNOB

SPREAD_TRIALS = 4
# Of ordered values so many show the effect of the others. But of channels every other number is
# tried if there is only one way to reduce: four may be slower than two, and eight faster than both
# (seen on GPUs). With several ways to reduce, these need the trials.
ORDERED_LEVELS = 2


Offer = Mapping[str, Set[Value]]
"""The values of each knob that some candidate has."""


def spread(candidates: Sequence[Configuration], knobs: Space, offer: Offer) -> list[Configuration]:
    """The default, then candidates spread over the sizes with each categorical value in turn.

    The spread begins with the middle quantiles: the ends are rarely good and can be slow.
    """
    baseline = candidates[0]
    sizes = [knob for knob, domain in knobs.items() if isinstance(domain, LogInteger)]
    choices = {
        # The default's value last: it has a trial already.
        knob: [*(v for v in domain.values if v != baseline[knob]), baseline[knob]]
        for knob, domain in knobs.items()
        if isinstance(domain, Categorical)
    }
    named = {knob for knob in choices if not is_ordered(knob, knobs[knob])}
    count = max([SPREAD_TRIALS, *(len(choices[knob]) for knob in named)])
    codes = {item: code for code, item in enumerate((k, v) for k in choices for v in offer[k])}
    table = np.array([[codes[knob, c[knob]] for knob in choices] for c in candidates], np.int64)

    def having(levels: Set[tuple[str, Value]]) -> NDArray[np.int64]:
        """How many of some knobs' values each candidate has."""
        is_one = np.array([item in levels for item in codes], np.int64)
        found: NDArray[np.int64] = is_one[table].sum(axis=1)
        return found

    design, is_left = [baseline], np.ones(len(candidates), bool)
    is_left[0] = False
    missing = missing_levels(offer, knobs, design)
    while (len(design) <= count or missing) and len(design) < len(candidates):
        turn = len(design) - 1
        level = {(knob, values[turn % len(values)]) for knob, values in choices.items()}
        # Not every combination is a candidate, but every value occurs in one.
        fit = having(missing) * (len(choices) + 1) + having(level)
        members = np.flatnonzero(is_left & (fit == fit[is_left].max())).tolist()
        members.sort(key=lambda place: [candidates[place].number(knob) for knob in sizes])
        place = members[int((turn + 0.5) / count * len(members)) % len(members)]
        design.append(candidates[place])
        is_left[place] = False
        missing = missing_levels(offer, knobs, design)
    return design


def missing_levels(
    offer: Offer, knobs: Space, told: Sequence[Configuration]
) -> set[tuple[str, Value]]:
    """The values of categorical knobs that are not measured yet; of a knob with ordered values
    only some, see ``ORDERED_LEVELS``."""
    missing: set[tuple[str, Value]] = set()
    for knob, domain in knobs.items():
        if isinstance(domain, Categorical):
            measured = {c[knob] for c in told}
            levels = offer[knob] - measured
            if _is_tried_throughout(knob, knobs):
                levels &= set(domain.values[1::2])
            elif is_ordered(knob, domain) and len(measured) >= ORDERED_LEVELS:
                levels = set()
            missing |= {(knob, level) for level in levels}
    return missing


def shared_links(candidates: Sequence[Configuration], knobs: Space) -> set[Configuration]:
    """Candidates with other channels than the default and its way to reduce; none if that is the
    only way. How much of a link one connection leaves free depends on the way to reduce."""
    if not {CHANNELS_KNOB, WAYS_KNOB} <= knobs.keys():
        return set()
    baseline = candidates[0]
    alike = (c for c in candidates if c[WAYS_KNOB] == baseline[WAYS_KNOB])
    return {c for c in alike if c[CHANNELS_KNOB] != baseline[CHANNELS_KNOB]}


def most_levels(missing: Iterable[tuple[str, Value]], knobs: Space) -> int:
    """The number of trials that measure all missing values, each trial one of every knob."""
    count = Counter(knob for knob, _ in missing)
    for knob, levels in count.items():
        if is_ordered(knob, knobs[knob]) and not _is_tried_throughout(knob, knobs):
            count[knob] = min(levels, ORDERED_LEVELS - 1)
    return max(count.values(), default=0)


def _is_tried_throughout(knob: str, knobs: Space) -> bool:
    return knob == CHANNELS_KNOB and WAYS_KNOB not in knobs
