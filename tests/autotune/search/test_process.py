"""The Gaussian process with a prior mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_autotune.model.knobs import Categorical, LogInteger
from bagua_autotune.search.process import (
    CandidateProcess,
    Floats,
    KernelSettings,
    Points,
    Posterior,
    Prior,
    Told,
)
from bagua_wire.configuration import Configuration

SPACE = {
    "bucket_bytes": LogInteger(low=2**16, high=2**30),
    "hierarchical": Categorical(values=("off", "leaders", "shards")),
}
CONFIGURATIONS = [
    Configuration(bucket_bytes=2**power, hierarchical=way)
    for power in range(16, 31)
    for way in ("off", "leaders", "shards")
]
POINTS = Points(SPACE, CONFIGURATIONS)
ALL = np.arange(len(CONFIGURATIONS))
ROWS = st.lists(st.integers(0, len(ALL) - 1), min_size=3, max_size=12, unique=True)


def fitted(
    rows: list[int],
    costs: Floats,
    prior: Prior | Floats | None = None,
    errors: float | Floats = 0.01,
    moment: float = 0.0,
) -> CandidateProcess:
    """With the likeliest settings, but for the moments."""
    if isinstance(prior, np.ndarray):
        prior = Prior(prior, np.zeros((0, len(prior))), 0.0)
    errors = np.broadcast_to(errors, len(rows))
    told = POINTS, np.array(rows), costs, errors, prior
    found = CandidateProcess(*told, KernelSettings(0.1, 0.2, 0.015, 0.0)).unlikelihoods()
    _, likeliest = min(each for each in found if each[1].moment == moment)
    return CandidateProcess(*told, likeliest)


def averaged(rows: list[int], costs: Floats, error: float) -> Posterior:
    told = [Told(CONFIGURATIONS[row], cost, error) for row, cost in zip(rows, costs, strict=True)]
    return Posterior(POINTS, told, np.full(len(rows), error), None)


def errors_of(process: CandidateProcess) -> Floats:
    return np.sqrt(process.variances)


def test_predictions_are_the_prior_mean_s_far_from_data_up_to_a_common_level() -> None:
    prior = np.linspace(-1, 1, len(ALL))
    # Measured at small sizes, flat: on the whole 3 above the prior, with a wave.
    rows = list(range(0, 24, 3))
    costs = prior[rows] + 3 + 0.1 * np.sin(np.arange(8))
    process = fitted(rows, costs, prior)
    means, errors = process.means, errors_of(process)
    assert means[rows] == pytest.approx(costs, abs=0.05)
    assert means[-1] == pytest.approx(prior[-1] + 3, abs=0.1)
    assert errors[-1] > 2 * errors[rows].max()


@settings(max_examples=20)
@given(ROWS, st.floats(-5, 5), st.integers(0, 2**32))
def test_a_level_common_to_all_costs_changes_nothing_else(
    rows: list[int], level: float, seed: int
) -> None:
    costs = np.random.default_rng(seed).normal(0, 0.1, len(rows))
    at_zero = fitted(rows, costs).means
    shifted = fitted(rows, costs + level).means
    assert shifted - level == pytest.approx(at_zero, abs=1e-4)


@settings(max_examples=20)
@given(ROWS, st.integers(0, 2**32), st.booleans())
def test_what_is_left_out_is_predicted_as_if_it_had_never_been_told(
    rows: list[int], seed: int, has_prior: bool
) -> None:
    rng = np.random.default_rng(seed)
    prior = rng.normal(0, 0.3, len(ALL)) if has_prior else np.zeros(len(ALL))
    costs = prior[rows] + rng.normal(0, 0.1, len(rows))
    process = fitted(rows, costs, prior)
    # With the settings and the level that all of them gave.
    covariance = covariances(process, rows) + np.eye(len(rows)) * (0.01**2 + 1e-10)
    covariance += np.eye(len(rows)) * process.settings.repeat_error**2
    targets = costs - prior[rows] - process.level
    for out in range(len(rows)):
        others = [place for place in range(len(rows)) if place != out]
        weights = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, out])
        mean = weights @ targets[others]
        variance = covariance[out, out] - weights @ covariance[others, out]
        assert process.loo_residuals[out] == pytest.approx(targets[out] - mean, rel=1e-4, abs=1e-7)
        assert process.loo_variances[out] == pytest.approx(variance, rel=1e-4)


def covariances(process: CandidateProcess, rows: list[int]) -> Floats:
    """Of the costs of some points before any was measured, written down once more."""
    scales = np.where(POINTS.is_size, process.settings.size_scale, 0.5)
    inputs = POINTS.inputs[rows] / scales
    apart = np.sqrt(5) * np.linalg.norm(inputs[:, None] - inputs[None, :], axis=2)
    matern = (1 + apart + apart**2 / 3) * np.exp(-apart)
    found: Floats = 1.0 + process.settings.amplitude**2 * matern
    return found


@settings(max_examples=20)
@given(ROWS, st.integers(0, len(ALL) - 1), st.integers(0, 2**32))
def test_what_is_learned_of_one_candidate_is_that_of_a_process_of_all(
    rows: list[int], one: int, seed: int
) -> None:
    costs = np.random.default_rng(seed).normal(0, 0.1, len(rows))
    process = fitted(rows, costs)
    whole = covariances(process, ALL.tolist())
    noise = 0.01**2 + 1e-10 + process.settings.repeat_error**2
    gains = np.linalg.solve(whole[np.ix_(rows, rows)] + noise * np.eye(len(rows)), whole[rows]).T
    means = process.level + gains @ (costs - process.level)
    posterior = whole - gains @ whole[rows]
    assert process.means == pytest.approx(means, abs=1e-6)
    assert process.variances == pytest.approx(np.diag(posterior), abs=1e-6)
    assert process.covariances(one) == pytest.approx(posterior[:, one], abs=1e-6)


def test_what_is_wrong_together_is_learned_together() -> None:
    """The cost model does not know how fast a way to reduce is: one of its sizes tells all."""
    ways = np.array([c["hierarchical"] == "leaders" for c in CONFIGURATIONS])
    believed = Prior(np.zeros(len(ALL)), 0.4 * ways[None, :], 0.0)
    flat, leaders = np.flatnonzero(~ways), np.flatnonzero(ways)
    rows, costs = [0, 6, 12, 18, 24], np.zeros(5)
    before = fitted(rows, costs, believed)
    assert errors_of(before)[leaders].min() > 0.3 > errors_of(before)[rows].max()
    assert abs(before.means[leaders]).max() < 0.05
    after = fitted([*rows, int(leaders[2])], np.append(costs, -0.5), believed)
    means, errors = after.means, errors_of(after)
    assert means[leaders].max() < -0.3
    assert errors[leaders].max() < 0.2
    assert abs(means[flat][:10]).max() < 0.15


def test_a_model_that_fits_badly_is_doubted_until_costs_bear_it_out() -> None:
    def error(misfit: float, count: int) -> float:
        """Of what was not measured, after so many costs as the model expects them."""
        prior = Prior(np.zeros(len(ALL)), np.zeros((0, len(ALL))), misfit)
        found = errors_of(fitted([0, 6, 12, 18, 24, 3, 9, 15][:count], np.zeros(count), prior))
        return float(found[30])

    assert error(0.0, 3) < 0.09 < 0.11 < error(0.2, 3)
    assert error(0.0, 8) < error(0.2, 8) < 0.8 * error(0.2, 3)


def test_a_cost_with_a_large_error_moves_the_predictions_little() -> None:
    rows = list(range(0, len(ALL), 3))
    costs = np.zeros(len(rows))
    costs[7] = 1.0
    errors = np.full(len(rows), 0.01)
    sure = fitted(rows, costs, errors=errors).means
    errors[7] = 1.0
    doubted = fitted(rows, costs, errors=errors).means
    assert sure[rows[7]] > 0.5
    assert abs(doubted[rows[7]]) < 0.05


def test_sizes_are_points_on_a_line_and_names_are_equally_far_apart() -> None:
    sizes = POINTS.inputs[:, POINTS.is_size][::3, 0]
    assert np.diff(sizes) == pytest.approx(np.full(14, 1 / 14))
    names = POINTS.inputs[:3, ~POINTS.is_size]
    distances = [np.linalg.norm(names[i] - names[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert distances == pytest.approx([distances[0]] * 3)


@settings(max_examples=20)
@given(ROWS, st.integers(0, 2**32), st.floats(0.001, 0.2))
def test_an_average_is_that_of_its_likely_processes_and_as_unsure_as_they_differ(
    rows: list[int], seed: int, noise: float
) -> None:
    posterior = averaged(rows, np.random.default_rng(seed).normal(0, noise, len(rows)), 0.01)
    weights = [weight for weight, _ in posterior.parts]
    assert sum(weights) == pytest.approx(1.0)
    # Drawn: which of the processes is right, then a difference from it.
    rng, one, other = np.random.default_rng(0), rows[0], rows[-1]
    drawn: list[float] = []
    counts = rng.multinomial(4000, weights).tolist()
    for count, (_, process) in zip(counts, posterior.parts, strict=True):
        variance = process.variances[[one, other]].sum() - 2 * process.covariances(one)[other]
        mean = process.means[one] - process.means[other]
        drawn += rng.normal(mean, np.sqrt(max(variance, 0.0)), count).tolist()
    apart = np.array(drawn)
    mean, deviation = posterior.difference(one, other)
    assert mean == pytest.approx(apart.mean(), abs=5 * deviation / np.sqrt(4000))
    assert deviation == pytest.approx(apart.std(), rel=0.15)
    assert posterior.means[one] - posterior.means[other] == pytest.approx(mean)


def test_visits_that_differ_make_an_average_less_sure() -> None:
    rows = [0, 0, 0, 12, 12, 12]
    differ = averaged(rows, np.array([0.0, 0.1, 0.05, -0.2, -0.32, -0.26]), 0.005)
    alike = averaged(rows, np.repeat([0.05, -0.26], 3), 0.005)
    assert differ.difference(0, 12)[1] > 2 * alike.difference(0, 12)[1]


def test_what_lasts_over_several_trials_is_the_moment_s_and_no_configuration_s() -> None:
    """The machine became slower by 10 % between two visits to the same place."""
    rows = [0, 3, 6, 9, 0, 3, 12, 15]
    costs = np.array([0.0, -0.01, 0.01, 0.0, 0.1, 0.09, 0.11, 0.1])
    steady, moving = (fitted(rows, costs, moment=moment) for moment in (0.0, 0.05))
    at_once = steady.means[15] - steady.means[9]
    assert moving.means[15] - moving.means[9] < at_once / 2


@settings(max_examples=20)
@given(ROWS, st.integers(0, 2**32), st.floats(0.001, 0.1))
def test_what_a_visit_is_expected_to_improve_is_what_visits_improve(
    rows: list[int], seed: int, noise: float
) -> None:
    """Drawn: a cost of the next visit, and the means after it."""
    costs = np.random.default_rng(seed).normal(0, noise, len(rows))
    process = fitted(rows, costs)
    best = rows[int(np.argmin(process.means[rows]))]
    other = next(row for row in range(len(ALL)) if row not in rows)
    expected = process.improvements(best)[other]
    error = math.sqrt(process.settings.repeat_error**2 + 0.01**2 + 1e-10)
    spread = math.sqrt(process.variances[other] + error**2)
    moved = (process.variances[other] - process.covariances(best)[other]) / spread
    above = process.means[other] - process.means[best]
    drawn = np.random.default_rng(0).normal(above, abs(moved), 20_000)
    lower = np.maximum(-drawn, 0.0)
    assert expected == pytest.approx(lower.mean(), abs=5 * lower.std() / math.sqrt(20_000) + 1e-6)
    # A visit cannot improve more than knowing the cost does.
    whole = process.variances[other] + process.variances[best]
    known = math.sqrt(max(whole - 2 * process.covariances(best)[other], 0.0))
    assert abs(moved) <= known + 1e-9
