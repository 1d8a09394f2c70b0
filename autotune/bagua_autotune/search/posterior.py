"""The posterior of the candidates' costs: a fitted process, with the better of two prior means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bagua_autotune.model.knobs import Configuration, Space
from bagua_autotune.search.points import Floats, Points, Prior, first_best
from bagua_autotune.search.problem import Problem

# The cost model is used unless the plain process predicts each left-out measurement better; with
# few measurements clearly better. In units of log likelihood.
BENEFIT_OF_DOUBT = 0.5


class Told(NamedTuple):
    """A measured cost."""

    configuration: Configuration
    cost: float
    standard_error: float


class Posterior:
    """A process fitted to the measured costs.

    Attributes:
        likelihood: leave-one-out log predictive density of the costs (Rasmussen and Williams,
            "Gaussian Processes for Machine Learning", eqs. 5.10 to 5.12).
    """

    def __init__(
        self,
        points: Points,
        told: Sequence[Told],
        errors: Floats,
        prior: Prior | None,
    ) -> None:
        from bagua_autotune.search.process import CandidateProcess  # here: takes long to import

        self.points = points
        self._told = told
        rows = np.array(points.rows([t.configuration for t in told]))
        costs = np.array([t.cost for t in told])
        self._process = CandidateProcess(points, rows, costs, errors, prior)
        residuals, variances = self._process.loo_residuals, self._process.loo_variances
        self.likelihood = float(-0.5 * np.sum(residuals**2 / variances + np.log(variances)))

    @property
    def means(self) -> Floats:
        """Posterior means of the cost, in the order of the points."""
        return self._process.means

    def means_of(self, configurations: Sequence[Configuration]) -> Floats:
        found: Floats = self.means[self.points.rows(configurations)]
        return found

    def errors_of(self, configurations: Sequence[Configuration]) -> Floats:
        """Posterior standard deviations of their costs."""
        found: Floats = np.sqrt(self._process.variances[self.points.rows(configurations)])
        return found

    @cached_property
    def incumbent(self) -> int:
        """The measured point of the lowest posterior mean."""
        rows = self.points.rows([t.configuration for t in self._told])
        return rows[first_best(-self.means[rows])]

    @property
    def lowest(self) -> float:
        """The best's posterior mean."""
        return float(self.means[self.incumbent])

    @cached_property
    def improvements(self) -> Floats:
        """How far below the best so far each point is expected to be (Jones, Schonlau and Welch,
        "Efficient global optimization", 1998, eq. 15).

        The difference from the best so far counts, not each cost by itself: measuring that one
        once more improves nothing.
        """
        from skopt.acquisition import gaussian_ei

        process, best = self._process, self.incumbent
        variances = process.variances + process.variances[best] - 2 * process.covariances(best)
        deviations = np.sqrt(np.maximum(variances, 0.0))
        difference = _Difference(self.means - self.lowest, deviations)
        found: Floats = gaussian_ei(self.means, difference, y_opt=0.0, xi=0.0)
        return found


class _Difference(NamedTuple):
    """The points' extra cost over the best so far, in the form that skopt expects of a process."""

    means: Floats
    deviations: Floats

    def predict(self, _points: Floats, return_std: bool = True) -> tuple[Floats, Floats]:
        return self.means, self.deviations


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
    guided = Posterior(points, told, errors, prior)
    if len(told) < 2:
        return guided
    plain = Posterior(points, told, errors, None)
    benefit = BENEFIT_OF_DOUBT / (len(told) - 1)
    return guided if guided.likelihood + benefit >= plain.likelihood else plain


def _errors(told: Sequence[Told]) -> Floats:
    """Standard errors, with the largest known one in place of unknown ones."""
    known = [t.standard_error for t in told if math.isfinite(t.standard_error)]
    typical = max(known, default=0.0)
    return np.array(
        [t.standard_error if math.isfinite(t.standard_error) else typical for t in told]
    )
