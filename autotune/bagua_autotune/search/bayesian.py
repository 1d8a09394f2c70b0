"""Bayesian optimisation: a Gaussian process over log2(size) and the categorical knobs.

scikit-optimize fits the model and computes the expected improvement; it is evaluated on
every candidate, against the lowest posterior mean instead of the luckiest measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

from bagua_autotune.model.knobs import Categorical, Configuration, Domain, LogInteger, Space
from bagua_autotune.search.searcher import register

SPREAD_TRIALS = 4
# Bounds of the fit, where inputs span 0..1 and costs are scaled to variance 1: narrower
# peaks than a tenth of the range, or less noise than 1 %, cannot be told from few trials.
LENGTH_SCALES = (0.1, 10.0)
NOISE_VARIANCES = (1e-4, 1.0)


@register("bayesian")
class BayesianSearcher:
    """See Searcher."""

    def __init__(self, space: Space, candidates: Sequence[Configuration], seed: int) -> None:
        self._candidates = list(candidates)
        self._seed = seed
        self._knobs = {
            knob: domain
            for knob, domain in space.items()
            if len({candidate[knob] for candidate in candidates}) > 1
        }
        self._design = _initial_design(self._candidates, self._knobs)
        self.initial_trials = len(self._design)
        self._told: list[tuple[Configuration, float, float]] = []
        self._fitted: _Model | None = None

    def tell(self, configuration: Configuration, cost: float, standard_error: float) -> None:
        if not math.isfinite(cost):
            raise ValueError(f"the cost of {configuration} is not finite")
        self._told.append((configuration, cost, standard_error))
        self._fitted = None

    def ask(self) -> Configuration:
        measured = {configuration for configuration, _, _ in self._told}
        for configuration in self._design:
            if configuration not in measured:
                return configuration
        if not self._knobs:
            return self._candidates[0]
        gains = self._gains()
        return self._candidates[gains.index(max(gains))]

    def best(self) -> Configuration:
        told = {configuration for configuration, _, _ in self._told}
        measured = [candidate for candidate in self._candidates if candidate in told]
        if not measured:
            raise LookupError("no candidate was measured")
        if len(measured) == 1:
            return measured[0]
        means = self._model().means(measured)
        return measured[means.index(min(means))]

    def expected_cost(self, configuration: Configuration) -> float:
        if len(self._told) == 1 or not self._knobs:
            return fmean(cost for told, cost, _ in self._told if told == configuration)
        return self._model().means([configuration])[0]

    def expected_gain(self) -> float:
        if len(self._told) < max(2, self.initial_trials):
            return math.inf
        return max(self._gains()) if self._knobs else 0.0

    def _gains(self) -> list[float]:
        model = self._model()
        lowest = min(model.means([configuration for configuration, _, _ in self._told]))
        return model.expected_improvements(self._candidates, lowest)

    def _model(self) -> _Model:
        if self._fitted is None:
            self._fitted = _Model(self._knobs, self._candidates, self._told, self._seed)
        return self._fitted


class _Model:
    """A Gaussian process fitted to what was told."""

    def __init__(
        self,
        knobs: Space,
        candidates: Sequence[Configuration],
        told: Sequence[tuple[Configuration, float, float]],
        seed: int,
    ) -> None:
        import skopt  # here: takes seconds to import
        from skopt.utils import normalize_dimensions

        self._knobs = knobs
        everything = [*candidates, *(configuration for configuration, _, _ in told)]
        dimensions = [_dimension(knob, domain, everything) for knob, domain in knobs.items()]
        costs = [cost for _, cost, _ in told]
        # A categorical knob of more than two values is as many inputs.
        inputs = normalize_dimensions(dimensions).transformed_n_dims
        optimizer = skopt.Optimizer(
            dimensions,
            base_estimator=_process(inputs, costs, [error for _, _, error in told], seed),
            n_initial_points=1,
            acq_func="EI",
            # Its own proposal, from random points, is not used: ours are the candidates.
            acq_optimizer="sampling",
            acq_optimizer_kwargs={"n_points": 1},
            avoid_duplicates=False,
            random_state=seed,
        )
        optimizer.tell([self._point(configuration) for configuration, _, _ in told], costs)
        self._space = optimizer.space
        self._process = optimizer.models[-1]

    def means(self, configurations: Sequence[Configuration]) -> list[float]:
        """Posterior means of the cost."""
        return [float(mean) for mean in self._process.predict(self._inputs(configurations))]

    def expected_improvements(
        self, configurations: Sequence[Configuration], lowest: float
    ) -> list[float]:
        """How far below ``lowest`` each is expected to come (Jones et al. 1998, eq. 15)."""
        from skopt.acquisition import gaussian_ei

        inputs = self._inputs(configurations)
        return [float(gain) for gain in gaussian_ei(inputs, self._process, y_opt=lowest, xi=0.0)]

    def _inputs(self, configurations: Sequence[Configuration]) -> Any:
        return self._space.transform([self._point(c) for c in configurations])

    def _point(self, configuration: Configuration) -> list[Any]:
        return [
            math.log2(configuration.number(knob))
            if isinstance(domain, LogInteger)
            else configuration[knob]
            for knob, domain in self._knobs.items()
        ]


def _dimension(knob: str, domain: Domain, configurations: Sequence[Configuration]) -> Any:
    from skopt.space import Categorical as Choice
    from skopt.space import Real

    if isinstance(domain, Categorical):
        return Choice(list(domain.values))
    exponents = [math.log2(configuration.number(knob)) for configuration in configurations]
    return Real(min(exponents), max(exponents))


def _process(dimensions: int, costs: Sequence[float], errors: Sequence[float], seed: int) -> Any:
    """A process whose noise is each measurement's own error plus one common unknown."""
    import numpy as np
    from skopt.learning import GaussianProcessRegressor
    from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    known = [error for error in errors if math.isfinite(error)]
    typical = max(known, default=0.0)
    scale = float(np.std(costs)) or 1.0
    own = [(error if math.isfinite(error) else typical) / scale for error in errors]
    kernel = ConstantKernel(1.0, (0.1, 100.0)) * Matern(
        length_scale=np.full(dimensions, 0.5),
        length_scale_bounds=[LENGTH_SCALES] * dimensions,
        nu=2.5,
    ) + WhiteKernel(1e-2, NOISE_VARIANCES)
    return GaussianProcessRegressor(
        kernel=kernel,
        alpha=np.minimum(np.square(own), 1e6) + 1e-8,
        normalize_y=True,
        noise="gaussian",
        n_restarts_optimizer=1,
        random_state=seed,
    )


def _initial_design(candidates: Sequence[Configuration], knobs: Space) -> list[Configuration]:
    """The baseline, then candidates spread over the sizes with each categorical value in turn.

    The spread starts in the middle of its quantiles: the ends are rarely good and can be slow.
    """
    baseline = candidates[0]
    sizes = [knob for knob, domain in knobs.items() if isinstance(domain, LogInteger)]
    choices = {
        knob: domain.values for knob, domain in knobs.items() if isinstance(domain, Categorical)
    }
    levels = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    # The level of the baseline last: it has one trial already.
    levels.sort(key=lambda level: all(baseline[knob] == value for knob, value in level.items()))
    count = max(SPREAD_TRIALS, len(levels))
    design = [baseline]
    for turn in range(count):
        level = levels[turn % len(levels)]
        members = [
            c
            for c in candidates
            if c not in design and all(c[knob] == value for knob, value in level.items())
        ]
        if members:
            members.sort(key=lambda c: [c.number(knob) for knob in sizes])
            design.append(members[int((turn + 0.5) / count * len(members))])
    return design
