"""What is known of the candidates' costs: a fitted process, and which prior mean it deserves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Configuration, Space
from bagua_autotune.search.points import Floats, Points
from bagua_autotune.search.prior import Prior
from bagua_autotune.search.problem import Problem

# The cost model is believed unless the plain process says better, of each measurement that is
# left out, what it was; at first clearly better. In units of log likelihood.
BENEFIT_OF_DOUBT = 0.5
# So many standard deviations above what all others predict is an outlier; not among fewer trials.
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
        predictions: of each cost from all others.
        deviations: of each cost from that, in standard deviations.
        likelihood: leave-one-out log predictive density of the costs (Rasmussen and Williams,
            "Gaussian Processes for Machine Learning", eqs. 5.10 to 5.12).
    """

    def __init__(
        self,
        points: Points,
        told: Sequence[Told],
        errors: Floats,
        prior: Prior | None,
        seed: int,
    ) -> None:
        import skopt  # here: takes seconds to import

        from bagua_autotune.search.process import make_process, scaled, top

        self.points = points
        self._told = told
        self.doubted: set[Configuration] = set()
        count = len(points.inputs)
        optimizer = skopt.Optimizer(
            [(0.0, float(top(count)))],
            base_estimator=make_process(points, errors, prior, seed),
            n_initial_points=1,
            acq_func="EI",
            # Its own proposal, from random points, is not used: ours are the candidates.
            acq_optimizer="sampling",
            acq_optimizer_kwargs={"n_points": 1},
            avoid_duplicates=False,
            random_state=seed,
        )
        rows = points.rows([t.configuration for t in told])
        optimizer.tell([[float(row)] for row in rows], [t.cost for t in told])
        self._process: Any = optimizer.models[-1]
        residuals, variances = self._process.loo_residuals, self._process.loo_variances
        self.predictions: Floats = np.array([t.cost for t in told]) - residuals
        self.deviations: Floats = residuals / np.sqrt(variances)
        self._all = scaled(count)
        self.likelihood = float(-0.5 * np.sum(self.deviations**2 + np.log(variances)))

    @cached_property
    def means(self) -> Floats:
        """Posterior means of the cost, in the order of the points."""
        found: Floats = self._process.predict(self._all)
        return found

    def means_of(self, configurations: Sequence[Configuration]) -> Floats:
        found: Floats = self.means[self.points.rows(configurations)]
        return found

    def errors_of(self, configurations: Sequence[Configuration]) -> Floats:
        """Posterior standard deviations of their costs."""
        rows = self.points.rows(configurations)
        _, deviations = self._process.predict(self._all[rows], return_std=True)
        found: Floats = deviations
        return found

    @cached_property
    def incumbent(self) -> int:
        """The measured point of the lowest posterior mean; none that is doubted."""
        believed = [t.configuration for t in self._told if t.configuration not in self.doubted]
        rows = self.points.rows(believed)
        return min(rows, key=lambda row: float(self.means[row]))

    @property
    def lowest(self) -> float:
        """The incumbent's posterior mean."""
        return float(self.means[self.incumbent])

    @cached_property
    def improvements(self) -> Floats:
        """How far below the incumbent each point is expected to be (Jones, Schonlau and Welch,
        "Efficient global optimization", 1998, eq. 15).

        It is the difference from the incumbent that is uncertain, and not each cost by itself:
        measuring the incumbent once more improves nothing.
        """
        from skopt.acquisition import gaussian_ei

        difference = _Difference(self._process, self._all, self.incumbent)
        found: Floats = gaussian_ei(self._all, difference, y_opt=0.0, xi=0.0)
        return found


class _Difference:
    """What points cost more than the incumbent; in the form in which skopt asks a process."""

    def __init__(self, process: Any, all_: Floats, incumbent: int) -> None:
        self._process = process
        self._incumbent = all_[[incumbent]]

    def predict(self, X: Floats, return_std: bool = False) -> Any:
        means, deviations = self._process.predict(X, return_std=True)
        mean, deviation = self._process.predict(self._incumbent, return_std=True)
        covariances = self._process.covariances(X, self._incumbent)
        variances = deviations**2 + deviation[0] ** 2 - 2 * covariances
        return means - mean[0], np.sqrt(np.maximum(variances, 0.0))


def best_posterior(problem: Problem, knobs: Space, told: Sequence[Told]) -> Posterior:
    """The posterior from the cost model, or the plain one if that explains the costs better.

    Its points are the candidates, then what was told besides them.
    """
    known = set(problem.candidates)
    others = list(dict.fromkeys(t.configuration for t in told if t.configuration not in known))
    points = Points(knobs, [*problem.candidates, *others], problem.layouts)
    errors = _errors(told)

    def fit(prior: Prior | None) -> Posterior:
        found = Posterior(points, told, errors, prior, problem.seed)
        doubtful = _doubtful(found, told)
        if len(told) < FEWEST_FOR_OUTLIERS or not doubtful.any():
            return found
        doubted = np.where(doubtful, OUTLIER_ERROR, errors)
        again = Posterior(points, told, doubted, prior, problem.seed)
        again.doubted = {t.configuration for t, is_ in zip(told, doubtful, strict=True) if is_}
        return again

    if problem.predictor is None:
        return fit(None)
    every = [*problem.candidates, *others]
    model = problem.predictor
    guided = fit(Prior(model.predict(every), model.deviations(every), model.misfit))
    if len(told) < 2:
        return guided
    plain = fit(None)
    benefit = BENEFIT_OF_DOUBT / (len(told) - 1)
    return guided if guided.likelihood + benefit >= plain.likelihood else plain


def _doubtful(found: Posterior, told: Sequence[Told]) -> NDArray[np.bool_]:
    """Costs that something else may have caused: far above what all others predict, which would be
    the best so far, and measured once. One that is far below is none: nothing makes a step faster.
    """
    count = Counter(t.configuration for t in told)
    is_single = np.array([count[t.configuration] == 1 for t in told])
    is_slow = found.deviations > OUTLIER_DEVIATIONS
    doubtful: NDArray[np.bool_] = is_single & is_slow & (found.predictions < found.lowest)
    return doubtful


def _errors(told: Sequence[Told]) -> Floats:
    """Standard errors; the largest known one where one is not known."""
    known = [t.standard_error for t in told if math.isfinite(t.standard_error)]
    typical = max(known, default=0.0)
    return np.array(
        [t.standard_error if math.isfinite(t.standard_error) else typical for t in told]
    )
