"""What is known of the candidates' costs: a fitted process, and which prior mean it deserves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Configuration, Space
from bagua_autotune.search.points import Points
from bagua_autotune.search.problem import Problem

Floats = NDArray[np.float64]

# The cost model is believed unless the plain process says clearly better, of each measurement
# that is left out, what it was; in units of log likelihood.
BENEFIT_OF_DOUBT = 1.0
# So many standard deviations off what all others predict is an outlier; not among fewer trials.
OUTLIER_DEVIATIONS = 4.0
FEWEST_FOR_OUTLIERS = 5
OUTLIER_ERROR = 1.0


class Told(NamedTuple):
    """A measured cost."""

    configuration: Configuration
    cost: float
    standard_error: float


class Posterior:
    """A process fitted to what was told.

    Attributes:
        lowest: the lowest posterior mean of what was measured.
        likelihood: leave-one-out log predictive density of the costs (Rasmussen and Williams,
            "Gaussian Processes for Machine Learning", eqs. 5.10 to 5.12).
    """

    def __init__(
        self,
        problem: Problem,
        points: Points,
        told: Sequence[Told],
        errors: Floats,
        prior: dict[bytes, float] | None,
    ) -> None:
        import skopt  # here: takes seconds to import

        from bagua_autotune.search.process import make_process

        self._problem = problem
        self._points = points
        optimizer = skopt.Optimizer(
            points.dimensions,
            base_estimator=make_process(
                points.is_size, errors, None if prior is None else _Table(prior), problem.seed
            ),
            n_initial_points=1,
            acq_func="EI",
            # Its own proposal, from random points, is not used: ours are the candidates.
            acq_optimizer="sampling",
            acq_optimizer_kwargs={"n_points": 1},
            avoid_duplicates=False,
            random_state=problem.seed,
        )
        optimizer.tell([points.of(t.configuration) for t in told], [t.cost for t in told])
        self._process: Any = optimizer.models[-1]
        residuals, variances = self._process.loo_residuals, self._process.loo_variances
        self.deviations: Floats = residuals / np.sqrt(variances)
        self.likelihood = float(-0.5 * np.sum(self.deviations**2 + np.log(variances)))
        self.lowest = float(self.means([t.configuration for t in told]).min())

    def means(self, configurations: Sequence[Configuration]) -> Floats:
        """Posterior means of the cost."""
        found: Floats = self._process.predict(self._points.inputs(configurations))
        return found

    def improvements(self) -> Floats:
        """How far below ``lowest`` each candidate is expected to come (Jones, Schonlau and
        Welch, "Efficient global optimization", 1998, eq. 15)."""
        from skopt.acquisition import gaussian_ei

        inputs = self._points.inputs(self._problem.candidates)
        found: Floats = gaussian_ei(inputs, self._process, y_opt=self.lowest, xi=0.0)
        return found


def best_posterior(problem: Problem, knobs: Space, told: Sequence[Told]) -> Posterior:
    """The posterior from the cost model, or the plain one if that explains the costs better."""
    known = set(problem.candidates)
    others = list(dict.fromkeys(t.configuration for t in told if t.configuration not in known))
    points = Points(knobs, [*problem.candidates, *others])
    errors = _errors(told)

    def fit(prior: dict[bytes, float] | None) -> Posterior:
        found = Posterior(problem, points, told, errors, prior)
        outliers = np.abs(found.deviations) > OUTLIER_DEVIATIONS
        if len(told) < FEWEST_FOR_OUTLIERS or not outliers.any():
            return found
        return Posterior(problem, points, told, np.where(outliers, OUTLIER_ERROR, errors), prior)

    if problem.predictor is None:
        return fit(None)
    predicted = [*problem.predictor.predict(problem.candidates)]
    if others:
        predicted += [*problem.predictor.predict(others)]
    keys = _keys(points.inputs([*problem.candidates, *others]))
    guided = fit(dict(zip(keys, predicted, strict=True)))
    if len(told) < 2:
        return guided
    plain = fit(None)
    return guided if guided.likelihood + BENEFIT_OF_DOUBT >= plain.likelihood else plain


def _errors(told: Sequence[Told]) -> Floats:
    """Standard errors; the largest known one where one is not known."""
    known = [t.standard_error for t in told if math.isfinite(t.standard_error)]
    typical = max(known, default=0.0)
    return np.array(
        [t.standard_error if math.isfinite(t.standard_error) else typical for t in told]
    )


class _Table:
    """A prior mean that is known at the points of a finite list only."""

    def __init__(self, means: dict[bytes, float]) -> None:
        self._means = means

    def __call__(self, inputs: Floats) -> Floats:
        # Elsewhere (skopt looks at a random point of its own) any value does.
        return np.array([self._means.get(key, 0.0) for key in _keys(inputs)])


def _keys(inputs: Floats) -> list[bytes]:
    return [row.tobytes() for row in np.round(np.asarray(inputs, float), 9) + 0.0]
