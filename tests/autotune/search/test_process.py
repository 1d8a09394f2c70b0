"""The Gaussian process with a prior mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_autotune.model.knobs import Categorical, Configuration, LogInteger
from bagua_autotune.search.points import Floats, Points, Prior
from bagua_autotune.search.process import CandidateProcess, make_process

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


def fitted(rows: list[int], costs: Floats, prior: Floats | None = None) -> CandidateProcess:
    errors = np.full(len(rows), 0.01)
    believed = None if prior is None else Prior(prior, np.zeros((0, len(prior))), 0.0)
    return make_process(POINTS, errors, believed, seed=0).fit(ALL[rows], costs)


def test_predictions_are_the_prior_mean_s_far_from_data_up_to_a_common_level() -> None:
    prior = np.linspace(-1, 1, len(ALL))
    # Measured at small sizes, flat: on the whole 3 above the prior, with a wave.
    rows = list(range(0, 24, 3))
    costs = prior[rows] + 3 + 0.1 * np.sin(np.arange(8))
    means, errors = fitted(rows, costs, prior).predict(ALL, return_std=True)
    assert means[rows] == pytest.approx(costs, abs=0.05)
    assert means[-1] == pytest.approx(prior[-1] + 3, abs=0.1)
    assert errors[-1] > 2 * errors[rows].max()


@settings(max_examples=20)
@given(ROWS, st.floats(-5, 5), st.integers(0, 2**32))
def test_a_level_common_to_all_costs_changes_nothing_else(
    rows: list[int], level: float, seed: int
) -> None:
    costs = np.random.default_rng(seed).normal(0, 0.1, len(rows))
    at_zero = fitted(rows, costs).predict(ALL)
    shifted = fitted(rows, costs + level).predict(ALL)
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
    kernel, level = process.kernel_, process.level_
    noise = process.noise_ + 0.01**2 + 1e-10
    covariance = kernel(POINTS.inputs[rows]) + noise * np.eye(len(rows))
    targets = costs - prior[rows] - level
    for out in range(len(rows)):
        others = [place for place in range(len(rows)) if place != out]
        weights = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, out])
        mean = weights @ targets[others]
        variance = covariance[out, out] - weights @ covariance[others, out]
        assert process.loo_residuals[out] == pytest.approx(targets[out] - mean, rel=1e-4, abs=1e-7)
        assert process.loo_variances[out] == pytest.approx(variance, rel=1e-4)


@settings(max_examples=20)
@given(ROWS, st.integers(0, len(ALL) - 1), st.integers(0, 2**32))
def test_covariances_with_one_candidate_are_those_of_the_whole(
    rows: list[int], one: int, seed: int
) -> None:
    process = fitted(rows, np.random.default_rng(seed).normal(0, 0.1, len(rows)))
    _, whole = process.predict(ALL, return_cov=True)
    assert process.covariances(ALL, ALL[[one]]) == pytest.approx(whole[:, one], abs=1e-6)


def test_what_is_wrong_together_is_learned_together() -> None:
    """The cost model does not know how fast a way to reduce is: one of its sizes tells all."""
    ways = np.array([c["hierarchical"] == "leaders" for c in CONFIGURATIONS])
    believed = Prior(np.zeros(len(ALL)), 0.4 * ways[None, :], 0.0)
    flat, leaders = np.flatnonzero(~ways), np.flatnonzero(ways)
    rows, costs = [0, 6, 12, 18, 24], np.zeros(5)
    before = make_process(POINTS, np.full(5, 0.01), believed, seed=0).fit(ALL[rows], costs)
    means, errors = before.predict(ALL, return_std=True)
    assert errors[leaders].min() > 0.3 > errors[rows].max()
    assert abs(means[leaders]).max() < 0.05
    told = [*rows, int(leaders[2])]
    after = make_process(POINTS, np.full(6, 0.01), believed, seed=0)
    means, errors = after.fit(ALL[told], np.append(costs, -0.5)).predict(ALL, return_std=True)
    assert means[leaders].max() < -0.3
    assert errors[leaders].max() < 0.2
    assert abs(means[flat][:10]).max() < 0.15


def test_a_model_that_fits_badly_is_wrong_about_what_was_not_measured() -> None:
    rows = [0, 6, 12]
    sure, unsure = (
        make_process(
            POINTS,
            np.full(3, 0.01),
            Prior(np.zeros(len(ALL)), np.zeros((0, len(ALL))), misfit),
            seed=0,
        )
        .fit(ALL[rows], np.zeros(3))
        .predict(ALL, return_std=True)[1]
        for misfit in (0.0, 0.2)
    )
    assert sure[30] < 0.1 < 0.2 < unsure[30]


def test_a_cost_with_a_large_error_moves_the_predictions_little() -> None:
    rows = list(range(0, len(ALL), 3))
    costs = np.zeros(len(rows))
    costs[7] = 1.0
    errors = np.full(len(rows), 0.01)
    sure = make_process(POINTS, errors, None, seed=0).fit(ALL[rows], costs).predict(ALL)
    errors[7] = 1.0
    doubted = make_process(POINTS, errors, None, seed=0).fit(ALL[rows], costs).predict(ALL)
    assert sure[rows[7]] > 0.5
    assert abs(doubted[rows[7]]) < 0.05


def test_sizes_are_points_on_a_line_and_names_are_equally_far_apart() -> None:
    sizes = POINTS.inputs[:, POINTS.is_size][::3, 0]
    assert np.diff(sizes) == pytest.approx(np.full(14, 1 / 14))
    names = POINTS.inputs[:3, ~POINTS.is_size]
    distances = [np.linalg.norm(names[i] - names[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert distances == pytest.approx([distances[0]] * 3)
