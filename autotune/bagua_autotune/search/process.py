"""The posterior of the candidates' costs: a Gaussian process with the better of two prior means,
and with its settings chosen from a grid. Configurations are points of a unit cube: log2 of sizes,
and one input per categorical value.

What scikit-optimize has is used where it serves: the kernel and the expected improvement. Three
things are ours. Its ``Optimizer`` and ``Space`` draw points from a box of independent dimensions,
while only a finite list of candidates may be tried here; they compare with the lowest cost told,
and know no error of each cost, no prior mean and no cost of a trial; and an optimizer lives for a
whole search, a searcher for one decision. Its regressor works out the kernel of all points again
for every setting and every question, and checks and copies what it is given, which took several
times as long as the mathematics. And whole runs of a command are too few for a kernel in which all
settings act together: theirs is a sum of kernels (``bagua_runs.additive``).

Costs are logarithms of times (or parts of the default), so the size of amplitudes and noise is
roughly known. A coarse grid finds settings as good as those of a gradient ascent on the likelihood,
in a tenth of the time and without its extremes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs import Layouts
from bagua_autotune.costs.layouts import Floats
from bagua_autotune.model.knobs import Domain, LogInteger, Partition, Space, is_ordered
from bagua_autotune.model.statistics import SIGMA_PER_MEDIAN_DEVIATION
from bagua_autotune.search.searcher import Problem
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import BUCKET_KNOB, COUNT_KNOBS

Rows = NDArray[np.int64]
TIE = 1e-7
"""Logarithms of times, and of likelihoods, that differ by less are equal but for the rounding,
which differs from one processor to another."""


class Prior(NamedTuple):
    """The cost model's predictions for the points: means and their errors; see Predictor."""

    means: Floats
    deviations: Floats
    misfit: float


def first_best(scores: Floats) -> int:
    """The place of the highest score; of equal ones the first, on every processor."""
    return int(np.argmax(scores >= scores.max() - TIE))


def offered(space: Space, configurations: Sequence[Configuration]) -> dict[str, set[Value]]:
    """The values of each knob in which the configurations differ."""
    found = {knob: {configuration[knob] for configuration in configurations} for knob in space}
    return {knob: values for knob, values in found.items() if len(values) > 1}


class Points:
    """The points of some configurations.

    Attributes:
        inputs: of the process, shape (configurations, inputs), within 0..1.
        exponents: log2 of the average bucket's size, shape (configurations,).
        is_size: whether each input is a size; the others are 0 or 1.

    Args:
        knobs: in which the configurations differ.
        configurations: all that will be asked for; the range of sizes is theirs.
        layouts: see Problem.
    """

    def __init__(
        self, knobs: Space, configurations: Sequence[Configuration], layouts: Layouts | None = None
    ) -> None:
        self._row_of = {configuration: row for row, configuration in enumerate(configurations)}
        self.exponents: Floats = np.zeros(len(configurations))
        if layouts is not None:
            self.exponents = np.log2(layouts.average_bytes(configurations))
        elif BUCKET_KNOB in knobs:
            self.exponents = np.log2([c.number(BUCKET_KNOB) for c in configurations])
        blocks = [
            _scaled(self.exponents) if knob == BUCKET_KNOB else _block(domain, knob, configurations)
            for knob, domain in knobs.items()
        ]
        self.inputs: Floats = np.hstack(blocks)
        widths = [block.shape[1] for block in blocks]
        self.is_size = np.repeat([isinstance(d, LogInteger) for d in knobs.values()], widths)

    def rows(self, configurations: Sequence[Configuration]) -> list[int]:
        """The configurations' rows in ``inputs``. Raises KeyError for an unknown configuration."""
        return [self._row_of[configuration] for configuration in configurations]


def _scaled(exponents: Floats) -> Floats:
    scaled: Floats = (exponents - exponents.min()) / (float(np.ptp(exponents)) or 1.0)
    return scaled[:, None]


def _block(domain: Domain, knob: str, configurations: Sequence[Configuration]) -> Floats:
    """Return one knob's inputs: one for two values or ordered ones, else one for each value."""
    values = [configuration[knob] for configuration in configurations]
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    found = _scale(domain, knob, list(codes))[[codes[value] for value in values]]
    if isinstance(domain, LogInteger) or is_ordered(knob, domain):
        return _scaled(found)
    return found


def _scale(domain: Domain, knob: str, values: Sequence[Value]) -> Floats:
    """The inputs of each of some values, before they are scaled."""
    if isinstance(domain, Partition):
        return np.array([[float(bool(value))] for value in values])
    if isinstance(domain, LogInteger) or is_ordered(knob, domain):
        numbers = np.array(values, float)
        return numbers if knob in COUNT_KNOBS else np.log2(numbers)
    places = [list(map(str, domain.values)).index(str(value)) for value in values]
    count = len(domain.values)
    table = np.array([[0.0], [1.0]]) if count == 2 else np.eye(count)
    found: Floats = table[places]
    return found


# The level is not known beforehand: 1 is a factor of e.
LEVEL_VARIANCE = 1.0
# How far two values of a categorical knob are apart, in length scales.
CATEGORICAL_LENGTH_SCALE = 0.5
AMPLITUDES = (0.04, 0.1, 0.3)
# The expected amplitude is the usual one, or so many times the cost model's misfit, where that is
# more. A model that misses the profiles of a busy GPU may be right about its steps, so measured
# costs may say that the amplitude is smaller. But a few costs agree with it by chance, so less than
# expected asks for more evidence than more.
USUAL_AMPLITUDE, MISFIT_SHARE = 0.05, 1.2
# Standard deviations of its logarithm, above what is expected and below.
LARGER_SPREAD, SMALLER_SPREAD = 1.4, 0.7
SIZE_LENGTH_SCALES = (0.07, 0.2, 0.5)
# How much visits to one configuration differ beyond their own errors: on some machines by 10 %. A
# factor of e more or less than usual costs an eighth of a unit of log likelihood.
REPEAT_ERRORS, USUAL_REPEAT_ERROR = (0.003, 0.015, 0.04, 0.1), 0.015
# By how much one moment is slower than another, and how many trials a moment lasts: what else runs
# on a machine comes and goes, or it becomes hot. Most machines are steady; that is worth so much of
# log likelihood.
MOMENTS, MOMENT_TRIALS, STEADINESS = (0.0, 0.05), 8.0, 0.5
# A setting that is less likely, beside all others, changes nothing.
LEAST_WEIGHT = 0.02


class KernelSettings(NamedTuple):
    """A point of the grid: an amplitude, the sizes' length scale, by how much visits and by how
    much moments differ."""

    amplitude: float
    size_scale: float
    repeat_error: float
    moment: float


class Process(ABC):
    """A process of the difference between the candidates' costs and a prior mean (Rasmussen and
    Williams, "Gaussian Processes for Machine Learning", chapters 2 and 5).

    Candidates are given by their rows, so the prior mean may be any function.

    Args:
        rows: of those whose costs were measured, once for each cost.
        residuals: of these costs, from the prior mean and the level.
        covariance: of these costs, with their errors.
        level: of all costs over the prior mean.
        prior_means: of the candidates.
    """

    def __init__(
        self,
        rows: Rows,
        residuals: Floats,
        covariance: Floats,
        level: float,
        prior_means: Floats | float = 0.0,
    ) -> None:
        self._rows = rows
        self.level = level
        self._prior_means = prior_means
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ residuals

    @cached_property
    def means(self) -> Floats:
        """Posterior means of the costs, shape (candidates,)."""
        found: Floats = self._seen @ self._weights + self._prior_means + self.level
        return found

    @cached_property
    def variances(self) -> Floats:
        """Posterior variances of the costs, without the error of another measurement: shape
        (candidates,)."""
        learned = np.einsum("ij,ij->i", self._seen @ self._inverse, self._seen)
        found: Floats = np.maximum(self._prior_variances() - learned, 0.0)
        return found

    def covariances(self, row: int) -> Floats:
        """Posterior covariances of the costs of all candidates with that of one (eq. 2.24)."""
        prior = self._prior(np.array([row]))[:, 0]
        found: Floats = prior - self._seen @ (self._inverse @ self._seen[row])
        return found

    @cached_property
    def _seen(self) -> Floats:
        """Prior covariances of the costs of all candidates with those that were measured."""
        return self._prior(self._rows)

    @abstractmethod
    def _prior(self, rows: Rows) -> Floats:
        """Prior covariances of the costs of all candidates with some of them."""

    @abstractmethod
    def _prior_variances(self) -> Floats:
        """Those of all candidates with themselves."""


class _Correlations:
    """Of some points, or of all points with them; each is worked out once."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._known: dict[tuple[bytes, float, bool], Floats] = {}

    def of(self, rows: Rows, size_scale: float, with_all: bool = False) -> Floats:
        """Shape (rows, rows), or (points, rows)."""
        from skopt.learning.gaussian_process.kernels import Matern  # here: takes long to import

        key = rows.tobytes(), size_scale, with_all
        if key not in self._known:
            scales = np.where(self._points.is_size, size_scale, CATEGORICAL_LENGTH_SCALE)
            kernel, inputs = Matern(scales, nu=2.5), self._points.inputs
            own = inputs[rows]
            self._known[key] = kernel(inputs, own) if with_all else kernel(own)
        return self._known[key]


class CandidateProcess(Process):
    """A process of the points' costs over what the cost model says of them.

    Args:
        points: of the candidates.
        rows: of those whose costs were measured, once for each cost, in their order.
        costs: measured.
        errors: the standard error of each.
        prior: what the cost model says of the points; None: nothing is known.
        settings: of the kernel.
        correlations: of other processes of the same points.

    Attributes:
        loo_residuals, loo_variances: of each cost from what all others predict for it (eqs. 5.10
            to 5.12).
    """

    def __init__(
        self,
        points: Points,
        rows: Rows,
        costs: Floats,
        errors: Floats,
        prior: Prior | None,
        settings: KernelSettings,
        correlations: _Correlations | None = None,
    ) -> None:
        self.settings = settings
        self._correlations = correlations or _Correlations(points)
        count = len(points.inputs)
        prior_means = np.zeros(count) if prior is None else prior.means
        self._deviations = np.zeros((0, count)) if prior is None else prior.deviations
        residuals = costs - prior_means[rows]
        level = float(np.median(residuals))
        residuals -= level
        self._known = LEVEL_VARIANCE + self._deviations[:, rows].T @ self._deviations[:, rows]
        self._errors = np.square(errors) + 1e-10
        self._costs = rows, residuals, prior.misfit if prior else 0.0
        places = np.arange(len(rows))
        self._moments = np.exp(-np.abs(places[:, None] - places) / MOMENT_TRIALS)
        shapes = self._correlations.of(rows, settings.size_scale)
        covariance = self._covariance(shapes, settings)
        super().__init__(rows, residuals, covariance, level, prior_means)
        diagonal = np.diag(self._inverse)
        self.loo_residuals = self._weights / diagonal
        self.loo_variances = 1.0 / diagonal

    @property
    def likelihood(self) -> float:
        """Leave-one-out log predictive density of the costs, but for a constant."""
        residuals, variances = self.loo_residuals, self.loo_variances
        return float(-0.5 * np.sum(residuals**2 / variances + np.log(variances)))

    def improvements(self, best: int) -> Floats:
        """By how much a visit to each candidate is expected to lower the best cost that is known
        (the knowledge gradient: Frazier, Powell and Dayanik, "The knowledge-gradient policy for
        correlated normal beliefs", 2009; here each candidate is compared with the best alone).

        A visit does not tell a cost, but moves what is believed of it: little where visits differ
        much, or where much is known. To visit the best improves something if another measured
        candidate may be better.
        """
        error = self.settings.repeat_error**2 + float(np.median(self._errors))
        shared = self.covariances(best)
        above = self.means - float(self.means[best])
        moved = np.abs(self.variances - shared) / np.sqrt(self.variances + error)
        found = expected_improvements(above, moved)
        moved_by_best = np.abs(self.variances[best] - shared) / math.sqrt(
            self.variances[best] + error
        )
        others = np.unique(self._rows[self._rows != best])
        beside = expected_improvements(above[others], moved_by_best[others])
        found[best] = beside.max(initial=0.0)
        return found

    def _prior(self, rows: Rows) -> Floats:
        known = LEVEL_VARIANCE + self._deviations.T @ self._deviations[:, rows]
        shapes = self._correlations.of(rows, self.settings.size_scale, with_all=True)
        found: Floats = known + self.settings.amplitude**2 * shapes
        return found

    def _prior_variances(self) -> Floats:
        alone = LEVEL_VARIANCE + np.square(self._deviations).sum(axis=0)
        found: Floats = alone + self.settings.amplitude**2
        return found

    def _covariance(self, shapes: Floats, settings: KernelSettings) -> Floats:
        """That of the measured costs."""
        found: Floats = self._known + settings.amplitude**2 * shapes
        found[np.diag_indices_from(found)] += self._errors + settings.repeat_error**2
        return found + settings.moment**2 * self._moments if settings.moment else found

    def unlikelihoods(self) -> list[tuple[float, KernelSettings]]:
        """How unlikely each setting of the grid is, as a negative logarithm; but for a constant."""
        rows, residuals, misfit = self._costs
        expected = min(max(USUAL_AMPLITUDE, MISFIT_SHARE * misfit), AMPLITUDES[-1])
        # The error of a wrong model changes fast with the size.
        is_wrong = MISFIT_SHARE * misfit > AMPLITUDES[1]
        scales = SIZE_LENGTH_SCALES[: 1 if is_wrong else None]
        shapes = {scale: self._correlations.of(rows, scale) for scale in scales}
        found = []
        for amplitude, scale, error, moment in product(AMPLITUDES, scales, REPEAT_ERRORS, MOMENTS):
            settings = KernelSettings(amplitude, scale, error, moment)
            value = unlikelihood(self._covariance(shapes[scale], settings), residuals)
            spread = LARGER_SPREAD if amplitude > expected else SMALLER_SPREAD
            value += (math.log(amplitude / expected) / spread) ** 2 / 2
            value += math.log(error / USUAL_REPEAT_ERROR) ** 2 / 8
            found.append((value + STEADINESS * (moment > 0), settings))
        return found


class Told(NamedTuple):
    """A measured cost."""

    configuration: Configuration
    cost: float
    standard_error: float


class Posterior:
    """The processes of all likely settings, each weighed by how likely it is: of few costs nobody
    can tell whether visits differ or configurations do.

    Args:
        told: the measured costs.
        errors, prior: see CandidateProcess.

    Attributes:
        doubted: points that must be measured again before they can be the best.
        parts: the weight, of 1 in all, and the process of each setting.
    """

    def __init__(
        self,
        points: Points,
        told: Sequence[Told],
        errors: Floats,
        prior: Prior | None,
        doubted: Collection[Configuration] = (),
    ) -> None:
        self.points, self.doubted = points, doubted
        self._told = [t.configuration for t in told]
        rows, costs = np.array(points.rows(self._told)), np.array([t.cost for t in told])
        correlations = _Correlations(points)
        measured = (points, rows, costs, errors, prior)
        usual = KernelSettings(AMPLITUDES[0], SIZE_LENGTH_SCALES[0], USUAL_REPEAT_ERROR, 0.0)
        found = CandidateProcess(*measured, usual, correlations).unlikelihoods()
        lowest = min(value for value, _ in found)
        likely = [(math.exp(lowest - value), each) for value, each in found]
        likely = [(weight, each) for weight, each in likely if weight > LEAST_WEIGHT]
        total = sum(weight for weight, _ in likely)
        self.parts = [
            (weight / total, CandidateProcess(*measured, each, correlations))
            for weight, each in likely
        ]

    @property
    def likelihood(self) -> float:
        """Leave-one-out log predictive density of the costs (Rasmussen and Williams, eqs. 5.10 to
        5.12), but for a constant; the mean."""
        return sum(weight * process.likelihood for weight, process in self.parts)

    @cached_property
    def means(self) -> Floats:
        """See Process."""
        return self._mean([process.means for _, process in self.parts])

    @cached_property
    def variances(self) -> Floats:
        """See Process: by how much each process is unsure, and by how much they differ."""
        apart = [np.square(process.means - self.means) for _, process in self.parts]
        each = [process.variances for _, process in self.parts]
        return self._mean([own + other for own, other in zip(each, apart, strict=True)])

    def means_of(self, configurations: Sequence[Configuration]) -> Floats:
        found: Floats = self.means[self.points.rows(configurations)]
        return found

    def errors_of(self, configurations: Sequence[Configuration]) -> Floats:
        """Standard deviations of their costs."""
        found: Floats = np.sqrt(self.variances[self.points.rows(configurations)])
        return found

    @cached_property
    def incumbent(self) -> int:
        """The measured point of the lowest mean, except doubted ones."""
        believed = [each for each in self._told if each not in self.doubted]
        rows = self.points.rows(believed)
        return rows[first_best(-self.means[rows])]

    @property
    def lowest(self) -> float:
        """The best's mean."""
        return float(self.means[self.incumbent])

    @cached_property
    def improvements(self) -> Floats:
        """By how much a visit to each point is expected to lower the best cost that is known."""
        return self._mean([process.improvements(self.incumbent) for _, process in self.parts])

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """The expected cost of one candidate less that of another, and its standard deviation."""
        mean, square = float(self.means[one] - self.means[other]), 0.0
        for weight, each in self.parts:
            own = each.variances[one] + each.variances[other] - 2 * each.covariances(one)[other]
            apart = float(each.means[one] - each.means[other]) - mean
            square += weight * (max(float(own), 0.0) + apart**2)
        return mean, math.sqrt(square)

    def _mean(self, found: Sequence[Floats]) -> Floats:
        total: Floats = np.average(found, axis=0, weights=[weight for weight, _ in self.parts])
        return total


class _Normal(NamedTuple):
    """Costs in the form that skopt expects of a process."""

    means: Floats
    deviations: Floats

    def predict(self, _points: Floats, return_std: bool = True) -> tuple[Floats, Floats]:
        return self.means, self.deviations


def expected_improvements(means: Floats, deviations: Floats) -> Floats:
    """How far below zero normally distributed costs are expected to be, if at all (Jones, Schonlau
    and Welch, "Efficient global optimization", 1998, eq. 15)."""
    from skopt.acquisition import gaussian_ei  # here: takes long to import

    found: Floats = gaussian_ei(means, _Normal(means, deviations), y_opt=0.0, xi=0.0)
    return found


def unlikelihood(covariance: Floats, residuals: Floats) -> float:
    """The negative logarithm of the likelihood, but for a constant (eq. 5.8)."""
    root = np.linalg.cholesky(covariance)
    whitened = np.linalg.solve(root, residuals)
    return float(whitened @ whitened / 2 + np.log(np.diag(root)).sum())


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
