"""What a trial is compared with: on a machine that becomes slower or faster, with the default, and
with the most that a job can gain."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.measuring.against_default import Defaults, StepTime
from bagua_autotune.measuring.rounds import Round, ceiling, least_cost
from bagua_autotune.measuring.standing import best
from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.model.knobs import Categorical
from bagua_autotune.model.statistics import Estimate, pooled
from bagua_wire.configuration import Configuration
from bagua_wire.knobs import ALGORITHM_KNOB, RECOMPUTED_KNOB
from tests.autotune.support import present
from tests.autotune.views.jobs import DEFAULT, FASTER, SLOWER, job, trial

STEP_TIME = StepTime()


def speedup(trials: list[Trial], index: int) -> float:
    found = present(Defaults(DEFAULT, trials).compare([trials[index]]))
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
    found = present(Defaults(DEFAULT, trials).compare(trials[1:]))
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


EXPOSED_SHARE = 57 / 921


def steps(count: int = 7, seed: int = 0, noise: float = 0.3) -> list[Observation]:
    """Of a machine on which the same step takes up to twice as long as another; its slowest rank
    waits for communication for one part in 16."""
    rng = random.Random(seed)
    found = []
    for step in range(count):
        seconds = 0.921 * rng.lognormvariate(0.0, noise)
        computing = (1 - EXPOSED_SHARE) * seconds * rng.lognormvariate(0.0, 0.005)
        found.append(Observation(step, (seconds, seconds), (0.8 * computing, computing)))
    return found


def test_a_step_can_be_shorter_by_what_computing_does_not_hide_of_it() -> None:
    found = present(ceiling(job(), steps(noise=0.0)))
    assert found.seconds == pytest.approx(0.921)
    assert found.exposed_seconds == pytest.approx(0.057, rel=0.1)
    assert found.speedup == pytest.approx(1.07, abs=0.015)


def test_it_is_an_upper_bound_that_noise_of_the_machine_does_not_widen() -> None:
    found = [ceiling(job(), steps(seed=seed)) for seed in range(200)]
    speedups = [each.speedup for each in found if each]
    truth = 1 / (1 - EXPOSED_SHARE)
    assert sum(speedup >= truth for speedup in speedups) > 0.94 * 200
    assert sorted(speedups)[-10] < truth + 0.02


def test_it_is_unknown_where_the_default_s_steps_do_not_tell_it() -> None:
    told = steps()
    silent = [replace(each, compute=(0.5, None)) for each in told]
    assert ceiling(job(), silent) is None
    assert ceiling(job(), told[:2]) is None, "of two steps nobody knows how sure they are"
    bagua: Job = replace(job(), protocol="v1")
    assert ceiling(bagua, told) is None, "speeds are no times"
    algorithms = Categorical(values=("gradient_allreduce", "async"))
    apart = replace(job(), space={ALGORITHM_KNOB: algorithms})
    assert ceiling(apart, told) is None, "ranks that do not wait are bounded by no slowest one"
    recomputed = replace(job(), space={RECOMPUTED_KNOB: Categorical(values=(12, 0))})
    assert ceiling(recomputed, told) is None, "computing itself may take less time"


def test_what_computing_costs_is_that_of_the_trial_that_computes_fastest() -> None:
    """By each trial's own steps: how long others are measured, and how slow they are, says nothing
    of it."""

    def told(cost: float, waited: float, count: int) -> tuple[float, list[Observation]]:
        seconds = math.exp(cost)
        computing = math.exp(cost - waited)
        return cost, [Observation(step, (seconds,), (computing,)) for step in range(count)]

    trials = [told(0.1, 0.1, 8), told(0.4, 0.3, 2), told(0.5, 0.4, 2), told(0.05, 0.02, 1)]
    assert least_cost(job(), trials[:3]) == pytest.approx(0.0)
    assert least_cost(job(), trials[1:2]) is None, "two steps are too few"
    assert least_cost(job(), trials[1:]) == pytest.approx(0.03)
    silent = [(cost, [replace(each, compute=None) for each in steps]) for cost, steps in trials]
    assert least_cost(job(), silent) is None
    assert least_cost(job(), [*trials[:1], silent[3]]) == pytest.approx(0.0)


TRIALS = st.lists(
    st.tuples(
        st.sampled_from([DEFAULT, FASTER, SLOWER]),
        st.one_of(st.none(), st.floats(0.1, 0.9)),  # failed, or measured
    ),
    max_size=12,
)


@given(TRIALS)
def test_the_best_is_the_fastest_on_average_of_what_did_not_fail(
    told: list[tuple[Configuration, float | None]],
) -> None:
    trials = [
        trial(index, tried, seconds)
        if seconds
        else Trial(index, "search", tried, "failed", failure="no")
        for index, (tried, seconds) in enumerate(told)
    ]
    failed = {each.configuration for each in trials if each.is_given_up} - {DEFAULT}
    costs = {
        tried: pooled([t.estimate for t in trials if t.configuration == tried and t.estimate])
        for tried in {t.configuration for t in trials if t.estimate} - failed
    }
    found = best(Round(job(), trials))
    assert (found.estimate if found else None) == min(
        costs.values(), key=lambda each: each.center, default=None
    )
