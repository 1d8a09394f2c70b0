"""What a trial is compared with on a machine that becomes slower or faster."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.measuring.comparison import Defaults
from bagua_autotune.measuring.objective import StepTime
from bagua_autotune.model.job import Trial
from bagua_autotune.model.statistics import Estimate
from tests.autotune.views.jobs import DEFAULT, FASTER, trial

STEP_TIME = StepTime()


def speedup(trials: list[Trial], index: int) -> float:
    found = Defaults(DEFAULT, trials).compare([trials[index]])
    assert found is not None
    return found.speedup(STEP_TIME).center


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.integers(1, 5))
def test_the_default_is_as_fast_as_itself_however_the_machine_changes(
    seconds: list[float], others: int
) -> None:
    trials = []
    for value in seconds:
        trials.append(trial(len(trials), DEFAULT, value))
        trials += [trial(len(trials) + n, FASTER, value) for n in range(others)]
    for each in trials:
        if each.configuration == DEFAULT:
            assert speedup(trials, each.index) == 1.0


@given(st.floats(-0.1, 0.1), st.floats(0.5, 2), st.sets(st.integers(1, 19), min_size=1))
def test_a_steady_drift_of_the_machine_cancels(
    drift: float, faster: float, others: set[int]
) -> None:
    """Each trial takes longer than the one before by the same share."""
    trials = [
        trial(index, FASTER, 0.2 / faster * math.exp(drift * index))
        if index in others
        else trial(index, DEFAULT, 0.2 * math.exp(drift * index))
        for index in range(21)
    ]
    assert all(speedup(trials, index) == pytest.approx(faster) for index in others)


def test_before_the_first_and_after_the_last_default_the_nearest_counts() -> None:
    trials = [trial(0, FASTER, 0.1), trial(1, DEFAULT, 0.2), trial(2, DEFAULT, 0.4)]
    trials.append(trial(3, FASTER, 0.1))
    assert speedup(trials, 0) == pytest.approx(2)
    assert speedup(trials, 3) == pytest.approx(4)


def test_without_a_measured_default_there_is_no_comparison() -> None:
    trials = [trial(0, DEFAULT), trial(1, FASTER, 0.1)]
    assert Defaults(DEFAULT, trials).compare(trials[1:]) is None
    assert Defaults(DEFAULT, trials).pooled is None


def test_a_default_beside_two_trials_is_one_measurement() -> None:
    trials = [trial(0, DEFAULT, 0.2), trial(1, FASTER, 0.1), trial(2, FASTER, 0.1)]
    found = Defaults(DEFAULT, trials).compare(trials[1:])
    assert found is not None
    assert found.default == trials[0].estimate


@pytest.mark.parametrize(
    ("seconds", "changed"),
    [
        ([0.205], None),
        ([0.205, 0.204, 0.207], None),
        ([0.200, 0.212], None),  # as measurements minutes apart differ
        ([0.205, 0.15, 0.141], (0, 2)),
        ([0.2, 0.3, 0.2], (0, 1)),
        ([0.3, 0.1, 0.2], (0, 1)),
    ],
)
def test_the_machine_changed_where_the_default_did_beyond_its_noise(
    seconds: list[float], changed: tuple[int, int] | None
) -> None:
    trials = [trial(index, DEFAULT, value) for index, value in enumerate(seconds)]
    found = Defaults(DEFAULT, trials).change(STEP_TIME)
    assert (found and (found.before.index, found.after.index)) == changed


def test_a_default_whose_spread_is_not_known_shows_no_change() -> None:
    single = Estimate(math.log(0.5), math.inf, 1)
    trials = [trial(0, DEFAULT, 0.2), Trial(1, "confirm", DEFAULT, "measured", single)]
    assert Defaults(DEFAULT, trials).change(STEP_TIME) is None
