"""Bayesian optimisation: a Gaussian process that starts from the cost model's predictions.

The improvement is computed for every candidate, relative to the lowest posterior mean instead of
the luckiest measurement, and weighed against the cost of trying the candidate. What of it is
scikit-optimize's, and what is not, says ``process.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Categorical, LogInteger, Space, is_ordered
from bagua_autotune.model.statistics import Interval
from bagua_autotune.search.process import Posterior, Told, best_posterior, first_best, offered
from bagua_autotune.search.searcher import Problem
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import BUCKET_KNOB, CHANNELS_KNOB, RECOMPUTED_KNOB, WAYS_KNOB

# A size is tried only up to four times a measured one: then a wrong cost model costs a few per
# cent of a trial, not several times its length.
LARGEST_JUMP = math.log2(4)
OTHER_SIZE = math.log2(3)
# Another size is worth a trial of its own if it is expected to be slower by less, and recomputing
# as little as can be, with all else as it is by default, before anything else.
NEAR = 0.03
# So many standard deviations on both sides hold 95 % of a normal distribution.
NORMAL_QUANTILE = 1.96
# More are claimed of a gain: the best is chosen for being low, and is looked at until it is clear.
CLAIMED_DEVIATIONS = 2.9


class BayesianSearcher:
    """See Searcher and Judges. Without a cost model it begins with spread trials and a flat prior
    mean."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._candidates = problem.candidates
        self._offer = offered(problem.space, problem.candidates)
        self._knobs = {knob: problem.space[knob] for knob in self._offer}
        self._is_guided = problem.predictor is not None
        self._told: list[Told] = []
        self._fitted: Posterior | None = None
        self._asked: Configuration | None = None

    @cached_property
    def _design(self) -> list[Configuration]:
        return spread(self._candidates, self._knobs, self._offer)

    @cached_property
    def _shared_links(self) -> set[Configuration]:
        return shared_links(self._candidates, self._knobs)

    @property
    def _unknown(self) -> Space:
        """The knobs of which the cost model does not know beforehand which value is the fastest:
        the fewer blocks are recomputed, the faster."""
        return {knob: found for knob, found in self._knobs.items() if knob != RECOMPUTED_KNOB}

    @cached_property
    def _least_recomputed(self) -> Configuration:
        """The default with as few blocks recomputed as can be. Where that alone may be nearly the
        best, it is tried first: it takes the least memory, and shows what is left to be gained."""
        default = self._candidates[0]
        others = [knob for knob in default if knob != RECOMPUTED_KNOB]
        line = [c for c in self._candidates if all(c[k] == default[k] for k in others)]
        return min(line, key=lambda c: c.get(RECOMPUTED_KNOB, 0))

    @property
    def initial_trials(self) -> int:
        """See Searcher."""
        if not self._is_guided:
            return len(self._design)
        levels = missing_levels(self._offer, self._unknown, self._candidates[:1])
        others = [BUCKET_KNOB in self._offer, bool(self._shared_links)]
        return 1 + most_levels(levels, self._knobs) + sum(others)

    def tell(self, configuration: Configuration, cost: float, standard_error: float) -> None:
        if not math.isfinite(cost):
            raise ValueError(f"the cost of {configuration} is not finite")
        self._told.append(Told(configuration, cost, standard_error))
        self._fitted = self._asked = None

    def ask(self) -> Configuration:
        if self._asked is None:
            self._asked = self._ask()
        return self._asked

    def _ask(self) -> Configuration:
        measured = {told.configuration for told in self._told}
        if not self._knobs or not any(each in measured for each in self._candidates):
            return self._candidates[0]
        if self._is_guided:
            return self._ask_guided()
        for configuration in self._design:
            if configuration not in measured:
                return configuration
        worth = self._worth()
        return self._candidates[first_best(worth)]

    def best(self) -> Configuration:
        told = {told.configuration for told in self._told}
        measured = [candidate for candidate in self._candidates if candidate in told]
        if not measured:
            raise LookupError("no candidate was measured")
        if len(measured) == 1:
            return measured[0]
        posterior = self._posterior()
        believed = [c for c in measured if c not in posterior.doubted] or measured
        return believed[first_best(-posterior.means_of(believed))]

    def expected_cost(self, configuration: Configuration) -> float:
        is_flat = len(self._told) == 1 and not self._is_guided
        if is_flat or not self._knobs:
            own = [t.cost for t in self._told if t.configuration == configuration]
            return fmean(own or [t.cost for t in self._told])
        return float(self._posterior().means_of([configuration])[0])

    def expected_gain(self) -> float:
        if len(self._told) < max(2, self.initial_trials):
            return math.inf
        if not self._knobs:
            return 0.0
        if self._is_guided and self._to_be_covered() is not None:
            return math.inf
        return float(self._posterior().improvements[self._candidates.index(self.ask())])

    def predict(self, configurations: Sequence[Configuration]) -> list[Interval]:
        """See Predicts."""
        if len(self._told) < 2 or not self._knobs:
            return []
        posterior = self._posterior()
        means = posterior.means_of(configurations)
        widths = NORMAL_QUANTILE * posterior.errors_of(configurations)
        return [
            Interval(mean, mean - width, mean + width)
            for mean, width in zip(means.tolist(), widths.tolist(), strict=True)
        ]

    def gain(self, configuration: Configuration, default: Configuration) -> Interval:
        """See Judges."""
        told = {told.configuration for told in self._told}
        if configuration == default or not {configuration, default} <= told:
            return Interval(0.0, -math.inf, math.inf)
        posterior = self._posterior()
        one, other = posterior.points.rows([default, configuration])
        mean, deviation = posterior.difference(one, other)
        reach = CLAIMED_DEVIATIONS * deviation
        return Interval(mean, mean - reach, mean + reach)

    def _ask_guided(self) -> Configuration:
        covered = self._to_be_covered()
        if covered is not None:
            scores = np.where(covered, -self._means, -np.inf)
        else:
            scores = np.where(self._within_reach(), self._worth(), -np.inf)
        return self._candidates[first_best(scores)]

    def _to_be_covered(self) -> NDArray[np.bool_] | None:
        """Candidates of which one must be tried before the measurements suffice."""
        allowed = self._within_reach()
        told = [t.configuration for t in self._told]
        is_line = np.array([each == self._least_recomputed for each in self._candidates])
        is_near = self._means[is_line] < self._means[allowed].min() + NEAR
        if self._least_recomputed not in told and is_near:
            return is_line
        missing = missing_levels(self._offer, self._unknown, told)
        if missing:
            knobs = {knob for knob, _ in missing}
            new = np.array(
                [sum((knob, c[knob]) in missing for knob in knobs) for c in self._candidates]
            )
            found: NDArray[np.bool_] = allowed & (new == new[allowed].max())
            return found
        if self._shared_links.isdisjoint(told):
            is_one = [c in self._shared_links for c in self._candidates]
            shared: NDArray[np.bool_] = allowed & np.array(is_one)
            if shared.any():
                return shared
        own, known = self._exponents()
        finer: NDArray[np.bool_] = allowed & (own <= known.min() - OTHER_SIZE)
        if np.ptp(known) < OTHER_SIZE and finer.any():
            # From buckets of one size alone, latency and bandwidth cannot be told apart.
            return finer
        # Later what was measured itself says whether another size is worth a trial.
        is_early = len(self._told) <= self.initial_trials + 1
        return self._other_sizes(allowed, own, known) if is_early else None

    def _other_sizes(
        self, allowed: NDArray[np.bool_], own: NDArray[np.float64], known: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Candidates like the best so far but for their size, if no other size was tried with as
        many channels: what the size costs was then seen only where less travels at once."""
        channels = self.best().get(CHANNELS_KNOB)
        alike = [told.configuration.get(CHANNELS_KNOB) == channels for told in self._told]
        if np.ptp(known[alike]) >= OTHER_SIZE:
            return None
        is_like = np.array([c.get(CHANNELS_KNOB) == channels for c in self._candidates])
        is_other = np.abs(own[:, None] - known[alike]).min(axis=1) >= OTHER_SIZE
        is_near = self._means < self._posterior().lowest + NEAR
        found: NDArray[np.bool_] = allowed & is_like & is_other & is_near
        return found if found.any() else None

    @property
    def _means(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._posterior().means[: len(self._candidates)]
        return found

    def _exponents(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log2 of the average bucket size, of the candidates and of the measured configurations."""
        points = self._posterior().points
        known = points.exponents[points.rows([t.configuration for t in self._told])]
        return points.exponents[: len(self._candidates)], known

    def _within_reach(self) -> NDArray[np.bool_]:
        own, known = self._exponents()
        apart = np.abs(own[:, None] - known[None, :]).min(axis=1)
        found: NDArray[np.bool_] = apart <= LARGEST_JUMP + 1e-9
        return found

    def _worth(self) -> NDArray[np.float64]:
        """The gain expected from trying each candidate over the horizon, less its cost."""
        posterior = self._posterior()
        extra = np.maximum(posterior.means - posterior.lowest, 0.0)
        worth = posterior.improvements * self._problem.horizon_trials - extra
        found: NDArray[np.float64] = worth[: len(self._candidates)]
        return found

    def _posterior(self) -> Posterior:
        if self._fitted is None:
            self._fitted = best_posterior(self._problem, self._knobs, self._told)
        return self._fitted


# The first trials of a search, before it has learned anything.
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
