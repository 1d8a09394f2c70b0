"""When the search ends by itself; and what one visit denies is visited again, if the model promised
it without that visit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, variance

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.deciding.ending import denied_once, least_shown, why_search_ends
from bagua_autotune.measuring.rounds import TRIAL_STEPS
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Limits, Trial
from bagua_autotune.model.knobs import Categorical
from bagua_autotune.model.reasons import NOT_SHOWN
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.search import Problem, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.search.searcher import RandomSearcher
from bagua_wire.configuration import Configuration
from tests.autotune.support import known_visits, make_spec, peaked

SPEC = make_spec()
BASELINE = Configuration(SPEC.default_configuration)
CANDIDATES = enumerate_candidates(SPEC.knobs, BASELINE, SPEC.tensors)
# Nothing differs: a confirmation shows whatever matters.
QUIET = known_visits(0.0, 0.0)


def search(
    seed: int, drift: float = 0.0, remaining_steps: int = 10_000, error: float = 0.008
) -> list[Trial]:
    """The trials of a search on a machine that gets slower by ``drift`` with each."""
    rng = random.Random(seed)
    trials: list[Trial] = []
    problem = Problem(SPEC.knobs, CANDIDATES, seed)
    limits = Limits(remaining_steps=remaining_steps)
    while True:
        searcher = make_searcher("bayesian", problem)
        for trial in trials:
            assert trial.estimate is not None
            searcher.tell(trial.configuration, trial.estimate.center, trial.estimate.standard_error)
        if trials and why_search_ends(trials, problem, searcher, limits, QUIET):
            return trials
        asked = searcher.ask()
        cost = math.log(peaked(asked)) + drift * len(trials) + rng.gauss(0, error)
        trials.append(Trial(len(trials), "search", asked, "measured", Estimate(cost, error, 8)))


def test_a_search_on_a_steady_machine_is_short() -> None:
    for seed in range(3):
        assert len(search(seed)) <= 20


def test_a_machine_that_gets_slower_does_not_keep_the_search_going() -> None:
    for seed in range(3):
        assert len(search(seed, drift=0.02)) <= 25


def test_the_fewer_steps_remain_the_sooner_a_search_ends() -> None:
    lengths = [
        sum(len(search(seed, remaining_steps=steps, error=0.02)) for seed in range(5))
        for steps in (50, 10_000)
    ]
    assert lengths[0] < lengths[1]


def ends(
    expected_gain: float,
    slower: float,
    remaining_steps: int,
    tried: int = 5,
    trial_steps: float = TRIAL_STEPS,
    most_gain: float = math.inf,
    lowest: float = 0.0,
    visits: Visits = QUIET,
) -> str | None:
    """Why a search ends whose next trial is expected to gain so much and to be so slow, after
    so many that were as fast as the first, but for the last one."""

    class Expects(RandomSearcher):
        def expected_gain(self) -> float:
            return expected_gain

        def expected_cost(self, configuration: Configuration) -> float:
            return slower if configuration == self.ask() else 0.0

    searcher = Expects(Problem(SPEC.knobs, CANDIDATES))
    trials = []
    for index, candidate in enumerate(CANDIDATES[:tried]):
        searcher.tell(candidate, 0.0, 0.01)
        cost = lowest if index == tried - 1 else 0.0
        trials.append(Trial(index, "search", candidate, "measured", Estimate(cost, 0.01, 8)))
    problem = Problem(SPEC.knobs, CANDIDATES)
    limits = Limits(remaining_steps=remaining_steps)
    return why_search_ends(trials, problem, searcher, limits, visits, trial_steps, most_gain)


def test_a_search_goes_on_while_the_gain_outweighs_what_finding_it_costs() -> None:
    # Half as slow again over the steps of a trial, and the switch: about ten steps.
    slower = math.log(1.5)
    assert not ends(0.02, slower, remaining_steps=1000)
    assert ends(0.02, slower, remaining_steps=300)
    assert not ends(0.02, 0.0, remaining_steps=300)
    assert ends(0.009, 0.0, remaining_steps=10**9), "a live job does not show so little"
    assert not ends(0.011, 0.0, remaining_steps=10**9)
    assert ends(0.02, 1e9, remaining_steps=10**6), "an endless step"


def test_trials_that_find_nothing_end_a_search_and_long_ones_sooner() -> None:
    # The first three of a random search are not counted.
    assert not ends(0.1, 0.0, 10_000, tried=11, trial_steps=5)
    assert ends(0.1, 0.0, 10_000, tried=12, trial_steps=5)
    assert not ends(0.1, 0.0, 10_000, tried=8, trial_steps=10)
    assert ends(0.1, 0.0, 10_000, tried=8, trial_steps=30)
    assert not ends(0.1, 0.0, 10_000, tried=5, trial_steps=1000), "some must be tried"
    assert ends(0.1, 0.0, 10_000, tried=6, trial_steps=1000)


def test_where_computing_hides_all_communication_the_first_trials_end_the_search() -> None:
    def ends_after(tried: int, most_gain: float, lowest: float = 0.0) -> str | None:
        return ends(0.1, 0.0, 10_000, tried, most_gain=most_gain, lowest=lowest)

    first = RandomSearcher(Problem(SPEC.knobs, CANDIDATES)).initial_trials
    assert ends_after(first, 0.009) == NOT_SHOWN
    assert not ends_after(first, 0.066), "so much is worth a search"
    assert not ends_after(first - 1, 0.009), "other messages may leave computing more time"
    assert ends_after(first, 0.009, lowest=-0.03), "that is noise"
    assert not ends_after(first, 0.009, lowest=-0.2), "they do"


def test_a_gain_that_the_job_s_noise_hides_ends_the_search_too() -> None:
    first = RandomSearcher(Problem(SPEC.knobs, CANDIDATES)).initial_trials
    noisy, quiet = known_visits(0.01, 0.15), known_visits(0.01, 0.02)

    def why(tried: int, visits: Visits, most_gain: float, lowest: float = 0.0) -> str | None:
        return ends(0.1, 0.0, 10_000, tried, most_gain=most_gain, lowest=lowest, visits=visits)

    assert why(first, noisy, math.log(1.07)) == NOT_SHOWN
    assert why(first - 1, noisy, math.log(1.07)) is None, "it may be that computing gets faster"
    assert why(first, noisy, math.log(1.07), lowest=-0.2) is None, "it does"
    assert why(first, noisy, math.log(1.5)) is None, "so much is shown"
    assert why(first, quiet, math.log(1.07)) is None, "steps vary less"


def test_what_is_said_to_be_shown_is_shown_by_a_confirmation() -> None:
    """A gain of that size excludes zero in most confirmations of full length, half of it in few."""
    visits = known_visits(0.02, 0.1)
    least = least_shown(visits)
    rng = random.Random(0)

    def shown(gain: float) -> float:
        """The share of 300 confirmations of six pairs of visits of ten steps."""
        count = 0
        for _ in range(300):
            sides = [_visits(rng, visits, center) for center in (0.0, -gain)]
            error = math.sqrt(sum(variance(side) / len(side) for side in sides))
            count += fmean(sides[0]) - fmean(sides[1]) > 1.96 * error
        return count / 300

    assert shown(least) > 0.7
    assert shown(least / 2) < 0.5


def _visits(rng: random.Random, visits: Visits, center: float) -> list[float]:
    means = (center + rng.gauss(0, visits.visit_error) for _ in range(6))
    return [fmean(mean + rng.gauss(0, visits.step_spread) for _ in range(10)) for mean in means]


CHANNELS = (1, 2, 4, 8)
BY_CHANNELS = [Configuration(channels=channels) for channels in CHANNELS]
CHANNEL_SPACE = {"channels": Categorical(values=CHANNELS)}


class Model:
    """Promises a gain by each doubling of the channels."""

    misfit = 0.02

    def __init__(self, gain: float) -> None:
        self._gain = gain

    def predict(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        doublings = [math.log2(c.number("channels")) for c in configurations]
        return -self._gain * np.array(doublings)

    def deviations(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        return np.zeros((0, len(configurations)))


def asked(gain: float, *costs: tuple[int, float]) -> Configuration | None:
    """What is visited again after these visits, of channels and cost."""
    trials = [
        Trial(
            index, "search", Configuration(channels=channels), "measured", Estimate(cost, 0.01, 6)
        )
        for index, (channels, cost) in enumerate(costs)
    ]
    problem = Problem(CHANNEL_SPACE, BY_CHANNELS, without=lambda _index: Model(gain))
    return denied_once(Visits(trials), problem, min(cost for _, cost in costs))


def test_a_level_that_is_promised_and_denied_once_is_visited_again() -> None:
    assert asked(0.2, (1, 0.0), (2, -0.2), (8, 0.1)) == Configuration(channels=8)


def test_a_level_that_is_denied_twice_is_given_up() -> None:
    assert asked(0.2, (1, 0.0), (2, -0.2), (8, 0.1), (8, 0.1)) is None


def test_a_level_that_nothing_promises_is_given_up() -> None:
    assert asked(-0.2, (1, 0.0), (2, 0.2), (8, 0.6)) is None


def test_a_level_that_is_a_little_slower_than_promised_is_believed() -> None:
    assert asked(0.2, (1, 0.0), (2, -0.2), (8, -0.5)) is None


def test_without_a_model_nothing_is_visited_again() -> None:
    trial = Trial(0, "search", BY_CHANNELS[3], "measured", Estimate(1.0, 0.01, 6))
    assert denied_once(Visits([trial]), Problem(CHANNEL_SPACE, BY_CHANNELS), 0.0) is None
