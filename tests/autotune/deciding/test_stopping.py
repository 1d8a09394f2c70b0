"""When the search ends by itself."""

from __future__ import annotations

import math
import random

from bagua_autotune.deciding.stopping import search_has_ended
from bagua_autotune.measuring.rounds import TRIAL_STEPS
from bagua_autotune.model.job import Limits, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.search import Problem, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.search.random import RandomSearcher
from tests.autotune.support import make_spec, peaked

SPEC = make_spec()
BASELINE = Configuration(SPEC.default_configuration)
CANDIDATES = enumerate_candidates(SPEC.knobs, BASELINE, SPEC.tensors)


def search(
    seed: int,
    drift: float = 0.0,
    remaining_steps: int = 10_000,
    error: float = 0.008,
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
        if trials and search_has_ended(trials, problem, searcher, limits):
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
) -> bool:
    """Whether a search ends whose next trial is expected to gain so much and to be so slow, after
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
    return search_has_ended(trials, problem, searcher, limits, trial_steps, most_gain)


def test_a_search_goes_on_while_the_gain_outweighs_what_finding_it_costs() -> None:
    # Half as slow again over the steps of a trial, and the switch: about ten steps.
    slower = math.log(1.5)
    assert not ends(0.02, slower, remaining_steps=1000)
    assert ends(0.02, slower, remaining_steps=300)
    assert not ends(0.02, 0.0, remaining_steps=300)
    assert ends(0.004, 0.0, remaining_steps=10**9), "a live job does not show so little"
    assert ends(0.02, 1e9, remaining_steps=10**6), "an endless step"


def test_trials_that_take_many_steps_and_find_nothing_end_a_search_sooner() -> None:
    assert not ends(0.1, 0.0, 10_000, tried=8, trial_steps=10)
    assert ends(0.1, 0.0, 10_000, tried=8, trial_steps=30)
    assert not ends(0.1, 0.0, 10_000, tried=4, trial_steps=1000), "some must be tried"


def test_where_computing_hides_all_communication_the_first_trials_end_the_search() -> None:
    def ends_after(tried: int, most_gain: float, lowest: float = 0.0) -> bool:
        return ends(0.1, 0.0, 10_000, tried, most_gain=most_gain, lowest=lowest)

    first = RandomSearcher(Problem(SPEC.knobs, CANDIDATES)).initial_trials
    assert ends_after(first, 0.009)
    assert not ends_after(first, 0.066), "so much is worth a search"
    assert not ends_after(first - 1, 0.009), "other messages may leave computing more time"
    assert ends_after(first, 0.009, lowest=-0.03), "that is noise"
    assert not ends_after(first, 0.009, lowest=-0.2), "they do"
