"""The posterior of the candidates' costs: a fitted process, with the better of two prior means."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Space
from bagua_autotune.model.statistics import SIGMA_PER_MEDIAN_DEVIATION
from bagua_autotune.search.points import Floats, Points, Prior, first_best
from bagua_autotune.search.searcher import Problem
from bagua_wire.configuration import Configuration

# The cost model is used unless the plain process predicts each left-out measurement better; with
# few measurements clearly better. In units of log likelihood.
BENEFIT_OF_DOUBT = 0.5
# A cost so many standard deviations above the cost model's is an outlier; not with fewer trials,
# nor where the others may agree with the model by chance.
OUTLIER_DEVIATIONS = 6.0
SMALLEST_SPREAD = 0.03
FEWEST_FOR_OUTLIERS = 5
OUTLIER_ERROR = 1.0
# So far apart are two visits of which one was in a bad moment, at least.
CONTRADICTION = 0.3
PROMISING = 0.03


class Told(NamedTuple):
    """A measured cost."""

    configuration: Configuration
    cost: float
    standard_error: float


class Posterior:
    """A process fitted to the measured costs.

    Attributes:
        process: the fitted one.
        doubted: points that must be measured again before they can be the best.
        likelihood: leave-one-out log predictive density of the costs (Rasmussen and Williams,
            "Gaussian Processes for Machine Learning", eqs. 5.10 to 5.12).
    """

    def __init__(
        self,
        points: Points,
        told: Sequence[Told],
        errors: Floats,
        prior: Prior | None,
        doubted: Collection[Configuration] = (),
    ) -> None:
        # Here, as it takes long to import.
        from bagua_autotune.search.process import AveragedProcess

        self.points = points
        self._told = told
        self.doubted = doubted
        rows = np.array(points.rows([t.configuration for t in told]))
        costs = np.array([t.cost for t in told])
        self.process = AveragedProcess(points, rows, costs, errors, prior)
        self.likelihood = self.process.likelihood

    @property
    def means(self) -> Floats:
        """Posterior means of the cost, in the order of the points."""
        return self.process.means

    def means_of(self, configurations: Sequence[Configuration]) -> Floats:
        found: Floats = self.means[self.points.rows(configurations)]
        return found

    def errors_of(self, configurations: Sequence[Configuration]) -> Floats:
        """Posterior standard deviations of their costs."""
        found: Floats = np.sqrt(self.process.variances[self.points.rows(configurations)])
        return found

    @cached_property
    def incumbent(self) -> int:
        """The measured point of the lowest posterior mean, except doubted ones."""
        believed = [t.configuration for t in self._told if t.configuration not in self.doubted]
        rows = self.points.rows(believed)
        return rows[first_best(-self.means[rows])]

    @property
    def lowest(self) -> float:
        """The best's posterior mean."""
        return float(self.means[self.incumbent])

    @cached_property
    def improvements(self) -> Floats:
        """By how much a visit to each point is expected to lower the best cost that is known."""
        return self.process.improvements(self.incumbent)


def best_posterior(problem: Problem, knobs: Space, told: Sequence[Told]) -> Posterior:
    """The posterior from the cost model, or the plain one if that explains the costs better.

    Its points are the candidates, then other measured configurations.
    """
    known = set(problem.candidates)
    others = list(dict.fromkeys(t.configuration for t in told if t.configuration not in known))
    every = [*problem.candidates, *others] if others else problem.candidates
    points = Points(knobs, every, problem.layouts)
    errors = _errors(told)
    model = problem.predictor
    if model is None:
        return Posterior(points, told, errors, None)
    prior = Prior(model.predict(every), model.deviations(every), model.misfit)
    doubted: set[Configuration] = set()
    if len(told) >= FEWEST_FOR_OUTLIERS:
        found = _Outliers(points, told, prior)
        errors = np.where(found.doubtful | found.contradicted, OUTLIER_ERROR, errors)
        doubted = {t.configuration for t, is_ in zip(told, found.doubtful, strict=True) if is_}
    guided = Posterior(points, told, errors, prior, doubted)
    if len(told) < 2:
        return guided
    plain = Posterior(points, told, errors, None, doubted)
    benefit = BENEFIT_OF_DOUBT / (len(told) - 1)
    return guided if guided.likelihood + benefit >= plain.likelihood else plain


class _Outliers:
    """Costs that something else may have caused, such as a hanging file system; only high ones, as
    nothing makes a step faster by accident.

    Attributes:
        contradicted: far above another cost of the same configuration; but what is slow more often
            than not is slow, and what differs by less is what visits differ by.
        doubtful: measured once and far above the cost model, which is right about the others and
            expects about the best cost so far.
    """

    def __init__(self, points: Points, told: Sequence[Told], prior: Prior) -> None:
        costs = np.array([t.cost for t in told])
        expected = prior.means[points.rows([t.configuration for t in told])]
        expected += np.median(costs - expected)
        typical = float(np.median(np.abs(costs - expected)))
        limit = OUTLIER_DEVIATIONS * max(SIGMA_PER_MEDIAN_DEVIATION * typical, SMALLEST_SPREAD)
        self.contradicted = np.zeros(len(told), bool)
        is_single = np.zeros(len(told), bool)
        for configuration in {t.configuration for t in told}:
            own = np.array([t.configuration == configuration for t in told])
            is_single[own] = own.sum() == 1
            slow = own & (costs > costs[own].min() + max(limit, CONTRADICTION))
            if 2 * slow.sum() <= own.sum():
                self.contradicted |= slow
        # What is fastest is no outlier, whatever the model expects of it.
        is_slow = is_single & (costs > np.maximum(expected + limit, costs.min() + PROMISING))
        lowest = costs[~is_slow].min(initial=math.inf)
        self.doubtful: NDArray[np.bool_] = is_slow & (expected < lowest + PROMISING)


def _errors(told: Sequence[Told]) -> Floats:
    """Standard errors, with the largest known one in place of unknown ones."""
    known = [t.standard_error for t in told if math.isfinite(t.standard_error)]
    typical = max(known, default=0.0)
    return np.array(
        [t.standard_error if math.isfinite(t.standard_error) else typical for t in told]
    )
