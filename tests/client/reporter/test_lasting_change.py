"""When step times count as changed: simulated ones, with 5 % noise and stragglers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.reporter.lasting_change import Drift, DriftWatch

LEARNED = 64


def _noisy(generator: random.Random, seconds: float, noise: float = 0.05) -> float:
    straggles = 1.0 + 2.0 * (generator.random() < 0.03)
    return seconds * straggles * generator.lognormvariate(0.0, noise)


def _drifts(watch: DriftWatch, times: list[float], first_step: int = 0) -> list[tuple[int, Drift]]:
    found = []
    for step, seconds in enumerate(times, first_step):
        drift = watch.add(step, seconds)
        if drift is not None:
            found.append((step, drift))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_quiet_steps_are_no_change(seed: int) -> None:
    generator = random.Random(seed)
    assert _drifts(DriftWatch(), [_noisy(generator, 0.1) for _ in range(10_000)]) == []


@given(
    seed=st.integers(0, 10**6),
    begins=st.integers(LEARNED + 32, 500),
    factor=st.sampled_from([0.2, 0.7, 1.5, 4.0]),
)
def test_a_lasting_change_is_told_once_within_100_steps(
    seed: int, begins: int, factor: float
) -> None:
    generator = random.Random(seed)
    times = [_noisy(generator, 0.1 * (factor if at >= begins else 1)) for at in range(begins + 300)]
    ((step, drift),) = _drifts(DriftWatch(), times)
    assert begins < step < begins + 100
    assert drift.before_seconds == pytest.approx(0.1, rel=0.1)
    assert drift.now_seconds == pytest.approx(0.1 * factor, rel=0.1)


@given(seed=st.integers(0, 10**6), begins=st.integers(LEARNED, 400), factor=st.floats(0.01, 100.0))
def test_a_disturbance_of_20_steps_is_none(seed: int, begins: int, factor: float) -> None:
    generator = random.Random(seed)
    # With more noise one in 600 is taken for a change, together with two unusual blocks after it.
    times = [_noisy(generator, 0.1, noise=0.02) for _ in range(600)]
    times[begins : begins + 20] = [seconds * factor for seconds in times[begins : begins + 20]]
    assert _drifts(DriftWatch(), times) == []


def test_a_small_change_counts_where_there_is_no_noise_and_a_smaller_one_does_not() -> None:
    for factor, changes in ((1.04, 0), (1.06, 1), (0.94, 1)):
        times = [0.1] * 200 + [0.1 * factor] * 200
        assert len(_drifts(DriftWatch(), times)) == changes


def test_noise_that_is_large_hides_a_change_that_is_not() -> None:
    generator = random.Random(3)
    times = [_noisy(generator, 0.1 if at < 2000 else 0.106, noise=0.3) for at in range(4000)]
    assert _drifts(DriftWatch(), times) == []


@pytest.mark.parametrize(("begins", "factor"), [(20, 0.5), (32, 1.3), (50, 3.0), (63, 0.5)])
def test_a_change_while_it_learns_is_told_and_does_not_blind_it(begins: int, factor: float) -> None:
    times = [0.1] * begins + [0.1 * factor] * 200 + [0.1] * 200
    (learning, first), (later, second) = _drifts(DriftWatch(), times)
    assert begins < learning < begins + 100
    assert first == Drift(pytest.approx(0.1), pytest.approx(0.1 * factor))
    assert begins + 200 < later < begins + 300
    assert second == Drift(pytest.approx(0.1 * factor), pytest.approx(0.1))


@pytest.mark.parametrize("factor", [0.02, 0.6, 2.0, 50.0])
def test_a_disturbance_while_it_learns_is_none(factor: float) -> None:
    for begins in range(16, 65, 6):
        generator = random.Random(begins)
        times = [_noisy(generator, 0.1) for _ in range(300)]
        times[begins : begins + 20] = [each * factor for each in times[begins : begins + 20]]
        assert _drifts(DriftWatch(), times) == [], begins


def test_after_missing_steps_what_is_normal_is_learnt_anew() -> None:
    watch = DriftWatch()
    assert _drifts(watch, [0.1] * 200) == []
    assert _drifts(watch, [0.2] * 200, first_step=300) == []
    assert len(_drifts(watch, [0.1] * 200, first_step=500)) == 1


def test_it_is_suspicious_from_the_first_changed_block_until_it_learns() -> None:
    watch = DriftWatch()
    _drifts(watch, [0.1] * 160)
    assert not watch.suspects
    _drifts(watch, [0.2] * 16, first_step=160)
    assert watch.suspects
    _drifts(watch, [0.1] * 16, first_step=176)
    assert not watch.suspects
    assert len(_drifts(watch, [0.2] * 48, first_step=192)) == 1
    assert watch.suspects
    _drifts(watch, [0.2] * 16, first_step=240)
    assert not watch.suspects


def test_after_missing_steps_it_is_suspicious_no_longer() -> None:
    watch = DriftWatch()
    _drifts(watch, [0.1] * 80 + [0.2] * 16)
    assert watch.suspects
    watch.add(200, 0.2)
    assert not watch.suspects
