"""What follows what, in jobs whose trials are written down by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean

import numpy as np
import pytest
from numpy.typing import NDArray

from bagua_autotune.deciding.decision import Keep, Propose, decide
from bagua_autotune.deciding.result import Bill, bill, make_result
from bagua_autotune.deciding.room import Room
from bagua_autotune.measuring.against_default import Speed, StepTime
from bagua_autotune.measuring.rounds import Floor, Round
from bagua_autotune.model.job import Job, Limits, Trial
from bagua_autotune.model.knobs import Categorical
from bagua_autotune.model.reasons import HARM
from bagua_autotune.model.received import Memory
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_autotune.search import Problem, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.search.searcher import RandomSearcher
from bagua_wire.configuration import Configuration
from tests.autotune.support import MIB, make_spec

SPEC = make_spec()
BASELINE = Configuration(SPEC.default_configuration)
FAST = Configuration(bucket_bytes=4 * MIB, hierarchical="leaders")
SLOW = Configuration(bucket_bytes=64 * MIB, hierarchical="off")
CANDIDATES = enumerate_candidates(SPEC.knobs, BASELINE, SPEC.tensors)


def make_job(**limits: int) -> Job:
    return Job(
        id="job", name="digits", protocol="v2", phase="tuning", world_size=4,
        ranks_per_node=(2, 2), space=SPEC.knobs, baseline=BASELINE, fingerprint="f",
        limits=Limits(**limits), software={}, created_at=100.0, last_contact_at=100.0,
    )  # fmt: skip


def history(*steps: tuple[str, Configuration, float | None], error: float = 0.002) -> list[Trial]:
    """Trials from (purpose, configuration, seconds or None for failed)."""
    return [
        Trial(index, purpose, configuration, "failed", failure="no")
        if seconds is None
        else Trial(
            index, purpose, configuration, "measured", Estimate(math.log(seconds), error, 20)
        )
        for index, (purpose, configuration, seconds) in enumerate(steps)
    ]


class InOrder:
    """All candidates once, and no word of its own on whether the best is faster."""

    def __init__(self, problem: Problem) -> None:
        own = RandomSearcher(problem)
        self.initial_trials = own.initial_trials
        self.tell, self.ask, self.best = own.tell, own.ask, own.best
        self.expected_cost, self.expected_gain = own.expected_cost, own.expected_gain


def follow(
    trials: Sequence[Trial],
    job: Job | None = None,
    candidates: Sequence[Configuration] = CANDIDATES,
) -> Propose | Keep:
    job = job or make_job()

    problem = Problem(job.space, candidates)
    return decide(Round(job, trials), lambda: problem, InOrder)


SEARCHED = (("search", BASELINE, 0.2), ("search", FAST, 0.15), ("search", SLOW, 0.3))
ONCE_EACH = [BASELINE, FAST, SLOW]


def test_the_baseline_is_trial_0() -> None:
    assert follow([]) == Propose("search", BASELINE)


def test_a_single_candidate_needs_no_other_trial() -> None:
    only = Keep(BASELINE, reason="there is nothing else to try")
    assert follow([], candidates=[BASELINE]) == only
    assert follow(history(("search", BASELINE, 0.2)), candidates=[BASELINE]) == only


def test_the_search_ends_at_max_samples_failed_ones_too() -> None:
    assert isinstance(follow(history(*SEARCHED), make_job(max_samples=4)), Propose)
    ended = follow(history(*SEARCHED), make_job(max_samples=3))
    assert ended == Propose("confirm", BASELINE)
    failed = history(("search", BASELINE, 0.2), ("search", SLOW, None), ("search", FAST, 0.15))
    assert follow(failed, make_job(max_samples=3)) == Propose("confirm", BASELINE)


def test_the_search_ends_when_all_candidates_are_measured() -> None:
    assert follow(history(*SEARCHED), candidates=ONCE_EACH) == Propose("confirm", BASELINE)


def test_what_is_far_faster_is_kept_after_a_second_visit_to_each_side() -> None:
    steps = [*SEARCHED, ("confirm", BASELINE, 0.2)]
    assert follow(history(*steps), candidates=ONCE_EACH) == Propose("confirm", FAST)
    steps.append(("confirm", FAST, 0.15))
    final = follow(history(*steps), candidates=ONCE_EACH)
    assert isinstance(final, Keep)
    assert final.configuration == FAST
    assert final.gain is not None
    assert math.exp(final.gain.center) == pytest.approx(0.2 / 0.15, abs=0.02)


def confirmed(seconds: Callable[[Configuration], float]) -> tuple[Keep, int]:
    """What is kept of the searched ones, and after how many confirming trials."""
    steps = [*SEARCHED]
    while isinstance(decision := follow(history(*steps), candidates=ONCE_EACH), Propose):
        assert decision.purpose == "confirm"
        steps.append(("confirm", decision.configuration, seconds(decision.configuration)))
    return decision, len(steps) - len(SEARCHED)


def test_a_winner_by_luck_is_not_kept() -> None:
    kept, trials = confirmed(lambda side: 0.3 if side == SLOW else 0.2)
    assert kept == Keep(BASELINE)
    assert trials <= 12
    # Nor the default that was in a bad moment.
    kept, _ = confirmed(lambda side: 0.3 if side == SLOW else 0.15)
    assert kept == Keep(BASELINE)


def test_the_best_may_change_while_it_is_confirmed() -> None:
    other = Configuration(bucket_bytes=8 * MIB, hierarchical="leaders")
    steps = [("search", BASELINE, 0.2), ("search", FAST, 0.185), ("search", other, 0.188)]
    steps += [("confirm", BASELINE, 0.2)]
    candidates = [BASELINE, FAST, other]
    assert follow(history(*steps), candidates=candidates) == Propose("confirm", FAST)
    steps += [("confirm", FAST, 0.24)]
    assert follow(history(*steps), candidates=candidates) == Propose("confirm", other)


def test_what_visits_never_settle_ends_after_twelve() -> None:
    seconds = {FAST: [0.2, 0.15] * 6, BASELINE: [0.17, 0.2] * 6, SLOW: [0.3] * 12}
    assert confirmed(lambda side: seconds[side].pop(0)) == (Keep(BASELINE), 12)


class Flat:
    """A cost model that knows of no difference, and is taken for a good one."""

    misfit = 0.02

    def predict(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        return np.zeros(len(configurations))

    def deviations(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        return np.zeros((0, len(configurations)))


@pytest.mark.parametrize(
    ("default", "winner"),
    [
        ([0.2, 0.2], [0.165, 0.2]),
        ([0.2] * 3, [0.16, 0.2, 0.2]),
        ([0.2] * 4, [0.15, 0.19, 0.2, 0.195]),
    ],
)
def test_slower_visits_to_a_winner_are_believed_as_well(
    default: list[float], winner: list[float]
) -> None:
    steps = [("search", SLOW, 0.3)]
    steps += [("confirm", BASELINE, seconds) for seconds in default]
    steps += [("confirm", FAST, seconds) for seconds in winner]
    job, problem = make_job(), Problem(make_job().space, ONCE_EACH, predictor=Flat())
    searcher_for = partial(make_searcher, "bayesian")
    found = decide(Round(job, history(*steps)), lambda: problem, searcher_for)
    assert found == Keep(BASELINE) or isinstance(found, Propose)


def test_of_a_searcher_that_has_no_word_of_its_own_the_usual_one_judges() -> None:
    trials = history(*SEARCHED, ("confirm", BASELINE, 0.2), ("confirm", FAST, 0.15))
    job, problem = make_job(), Problem(make_job().space, ONCE_EACH)
    usual = decide(Round(job, trials), lambda: problem, partial(make_searcher, "bayesian"))
    assert follow(trials, candidates=ONCE_EACH) == usual


def test_where_the_usual_search_fails_the_random_one_judges_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no kernel")

    monkeypatch.setattr("bagua_autotune.search.bayesian.best_posterior", fail)
    job, problem = make_job(), Problem(make_job().space, ONCE_EACH)
    for winner, is_kept in ((0.15, True), (0.195, False)):
        steps = [("search", BASELINE, 0.2), ("search", FAST, winner), ("search", SLOW, 0.3)]
        steps += [("confirm", BASELINE, 0.2), ("confirm", FAST, winner)]
        found = decide(
            Round(job, history(*steps)), lambda: problem, partial(make_searcher, "random")
        )
        assert (found.configuration == FAST and isinstance(found, Keep)) == is_kept


class Machine:
    """Two configurations, one of them faster by ``gain``, on a machine that is slower by ``drift``
    with each trial, and whose visits differ."""

    def __init__(self, gain: float, drift: float, visit_noise: float, seed: int) -> None:
        self._gain, self._drift, self._visit_noise = gain, drift, visit_noise
        self._random = random.Random(seed)

    def is_kept(self) -> bool:
        trials: list[Trial] = []
        while isinstance(decision := follow(trials, candidates=[BASELINE, FAST]), Propose):
            tried = decision.configuration
            center = self._drift * len(trials) + self._random.gauss(0, self._visit_noise)
            costs = [
                self._random.gauss(center - self._gain * (tried == FAST), 0.02) for _ in range(7)
            ]
            found = estimate(costs)
            trials.append(Trial(len(trials), decision.purpose, tried, "measured", found))
        return decision.configuration == FAST


def kept(gain: float, drift: float, times: int, visit_noise: float = 0.0) -> float:
    """How often the faster one is kept."""
    return fmean(Machine(gain, drift, visit_noise, seed).is_kept() for seed in range(times))


@pytest.mark.parametrize(
    "drift", [0.02, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, -0.02))]
)
def test_a_gain_is_found_under_drift_and_none_is_made_up(drift: float) -> None:
    assert kept(0.0, drift, 60) <= 0.05
    assert kept(0.1, drift, 20) >= 0.9


@pytest.mark.slow
def test_a_gain_is_found_where_visits_differ_by_half_of_it() -> None:
    assert kept(0.3, 0.0, 40, visit_noise=0.1) >= 0.7
    assert kept(0.0, 0.0, 60, visit_noise=0.1) <= 0.1


def test_a_baseline_that_wins_needs_no_confirmation() -> None:
    steps = [("search", BASELINE, 0.1), *SEARCHED[1:]]
    assert follow(history(*steps), candidates=ONCE_EACH) == Keep(BASELINE)


def test_a_failed_configuration_is_not_proposed_again() -> None:
    steps = [("search", BASELINE, 0.2), ("search", FAST, None)]
    assert follow(history(*steps), candidates=ONCE_EACH) == Propose("search", SLOW)


def test_a_value_that_fails_with_whatever_else_is_given_up() -> None:
    """Such as a way to reduce that the ranks cannot run at all."""
    leaders = [c for c in CANDIDATES if c["hierarchical"] == "leaders"]
    steps = [("search", BASELINE, 0.2), *[("search", c, None) for c in leaders[:3]]]
    while isinstance(decision := follow(history(*steps)), Propose) and len(steps) < 40:
        assert decision.configuration["hierarchical"] == "off"
        steps.append(("search", decision.configuration, 0.2))
    assert len(steps) > 4
    # One that was measured was not to blame.
    steps = [("search", BASELINE, 0.2), ("search", FAST, 0.15)]
    others = [c for c in leaders if c != FAST]
    steps += [("search", c, None) for c in others[:3]]
    following = follow(history(*steps), candidates=[BASELINE, *others])
    assert isinstance(following, Propose)
    assert following.configuration in others[3:]


def test_a_winner_that_fails_gives_way_to_the_next_best() -> None:
    steps = [("search", BASELINE, 0.2), ("search", FAST, 0.15), ("search", SLOW, 0.18)]
    steps += [("confirm", BASELINE, 0.2), ("confirm", FAST, None)]
    assert follow(history(*steps), candidates=ONCE_EACH) == Propose("confirm", SLOW)


def test_a_failed_baseline_is_tried_again_but_not_for_ever() -> None:
    fails = [("search", BASELINE, None)]
    assert follow(history(*fails * 2)) == Propose("search", BASELINE)
    final = follow(history(*fails * 3))
    assert isinstance(final, Keep)
    assert final.configuration == BASELINE


def test_the_summary_of_a_winner() -> None:
    steps = [*SEARCHED, ("confirm", BASELINE, 0.2), ("confirm", FAST, 0.15)]
    trials = history(*steps)
    final = follow(trials, candidates=ONCE_EACH)
    assert isinstance(final, Keep)
    bill = Bill(steps=140, cost_seconds=0.82, cost_steps=4.1)
    result = make_result(Round(make_job(), trials), final, bill, at=141.2)
    assert result.summary == (
        "bucket 4 MiB, hierarchical: 1.33x (1.31 to 1.35) over the 25 MiB default; "
        "5 trials, 140 steps, 41 s; cost 4.1 steps, paid back after 17"
    )
    assert (result.kept, result.trials, result.steps) == ("winner", 5, 140)
    assert (result.cost_steps, result.cost_seconds, result.payback_steps) == (4.1, 0.82, 17)
    assert 1 < result.low < result.speedup < result.high


def test_the_summary_of_a_kept_baseline() -> None:
    trials = history(*SEARCHED)
    bill = Bill(steps=60, cost_seconds=1.3, cost_steps=6.5)
    result = make_result(Round(make_job(), trials), Keep(BASELINE), bill, at=141.2)
    assert result.summary == (
        "bucket 25 MiB, flat (the default) kept: nothing was clearly faster; the best "
        "of the others, bucket 4 MiB, hierarchical, was 1.33x (1.32 to 1.34) in the search; "
        "3 trials, 60 steps, 41 s; cost 6.5 steps"
    )
    assert result.payback_steps is None
    assert (result.kept, result.speedup, result.low, result.high) == ("baseline", 1.0, 1.0, 1.0)


def test_one_trial_of_one_step_is_said_in_the_singular() -> None:
    bill = Bill(steps=1, cost_seconds=0.0, cost_steps=0.0)
    single = Round(make_job(), history(SEARCHED[0]))
    result = make_result(single, Keep(BASELINE), bill, at=1.0)
    assert "; 1 trial, 1 step, " in result.summary


def test_the_slowest_rank_decides_and_missing_ranks_do_not() -> None:
    objective = StepTime()
    assert objective.seconds(objective.cost([0.1, 0.4, None])) == pytest.approx(0.4)
    assert objective.speedup(1e9, 0.0) < math.inf


def test_speeds_may_be_negative_and_higher_is_better() -> None:
    objective = Speed()
    assert objective.cost([-3.0, -5.0, None]) == 4.0
    assert objective.cost([10.0]) < objective.cost([5.0])
    assert objective.speedup(gain=5.0, baseline_cost=-10.0) == pytest.approx(1.5)
    assert objective.speedup(gain=5.0, baseline_cost=10.0) == pytest.approx(1.5)
    assert math.isfinite(objective.cost([1.7e308, 1.7e308]) ** 2)


def test_what_the_training_suffered_from_is_not_tried_in_another_size() -> None:
    space = {**SPEC.knobs, "algorithm": Categorical(values=("gradient_allreduce", "bytegrad"))}
    baseline = Configuration({**BASELINE, "algorithm": "gradient_allreduce"})
    candidates = enumerate_candidates(space, baseline, SPEC.tensors)
    job = replace(make_job(max_samples=len(candidates)), space=space, baseline=baseline)
    harmful = next(c for c in candidates if c["algorithm"] == "bytegrad")
    trials = [
        *history(("search", baseline, 0.2)),
        Trial(1, "search", harmful, "failed", failure=f"{HARM}: the loss is not finite"),
    ]
    tried = set()
    while isinstance(found := follow(trials, job, candidates), Propose):
        if found.purpose == "confirm":
            break
        tried.add(found.configuration)
        trials += history(("search", found.configuration, 0.3))
    assert len(tried) > 5
    assert {c["algorithm"] for c in tried} == {"gradient_allreduce"}
    # One that could not be run says nothing of others with that algorithm.
    trials[1] = replace(trials[1], failure="rank 3 ran out of memory")
    after = follow(trials[:2], job, candidates)
    assert isinstance(after, Propose)


def test_ranks_that_do_not_wait_make_steps_at_their_own_speed() -> None:
    # In 6 s the fast rank makes three and the slow one one: as two ranks of 3 s would.
    assert StepTime().seconds(StepTime().cost([2.0, 6.0], apart=True)) == pytest.approx(3.0)
    assert StepTime().seconds(StepTime().cost([2.0, 6.0])) == pytest.approx(6.0)


def test_a_trial_that_runs_stays_in_the_search_though_it_may_not_be_asked_for_any_more() -> None:
    counts = tuple(range(16, -2, -2))
    blocks = {count: Configuration(recomputed_blocks=count) for count in counts}
    default, running, refused = blocks[16], blocks[2], blocks[0]

    def told(index: int, what: Configuration, gib: int, seconds: float | None) -> Trial:
        memory = Memory(
            peak_bytes=gib, limit_bytes=900, device_bytes=1000, is_predicted=seconds is None
        )
        if seconds is None:
            return Trial(index, "search", what, "infeasible", failure="no", memory=memory)
        found = Estimate(math.log(seconds), 0.002, 20)
        return Trial(index, "search", what, "measured", found, memory=memory)

    trials = [
        told(0, default, 100, 0.2),
        told(1, refused, 1000, None),
        told(2, blocks[12], 350, 0.18),
        Trial(3, "search", running),
    ]
    assert not Room(trials, default).may_fit(running)
    space = {"recomputed_blocks": Categorical(values=counts)}
    job = replace(make_job(), space=space, baseline=default)
    problem = Problem(space, [*blocks.values()])
    found = decide(Round(job, trials), lambda: problem, partial(make_searcher, "bayesian"))
    assert isinstance(found, Propose)
    assert Room(trials, default).may_fit(found.configuration)


def test_where_nothing_else_fits_that_is_why_the_default_stays() -> None:
    default, fast, slow = history(*SEARCHED)
    refused = replace(fast, state="infeasible", estimate=None, failure="rank 1 has no room")
    refused_too = replace(refused, index=2, configuration=SLOW)
    kept = follow([default, refused, refused_too], candidates=ONCE_EACH)
    assert kept == Keep(BASELINE, reason="nothing else fits in memory")
    round_ = Round(make_job(), [default, refused, refused_too])
    assert isinstance(kept, Keep)
    result = make_result(round_, kept, bill(round_, {}, {}), at=0.0)
    assert result.reason_code == "infeasible"
    assert "nothing else fits in memory (rank 1 has no room)" in result.summary
    kept = follow([default, refused, replace(slow, index=2)], candidates=ONCE_EACH)
    assert kept == Keep(BASELINE)
    # Of what the search had no time for it is not known.
    assert follow([default, refused], make_job(max_samples=1)) == Keep(BASELINE)


def test_what_recomputes_nothing_and_hides_its_communication_ends_the_search() -> None:
    sizes, counts = [1000 * 2**power for power in range(12)], (16, 8, 0)
    default = Configuration(bucket_bytes=sizes[0], recomputed_blocks=16)
    space = {
        "bucket_bytes": Categorical(values=tuple(sizes)),
        "recomputed_blocks": Categorical(values=counts),
    }
    candidates = [
        Configuration(bucket_bytes=size, recomputed_blocks=count)
        for count, size in product(counts, sizes)
    ]
    problem = Problem(space, candidates)
    job = replace(make_job(), space=space, baseline=default)
    seconds = {default: 0.2973, candidates[-3]: 0.233, candidates[-2]: 0.2329}
    trials = [
        Trial(index, "search", what, "measured", Estimate(math.log(took), 0.001, 6))
        for index, (what, took) in enumerate(seconds.items())
    ]

    def purpose(computing_seconds: float) -> str:
        floor = Floor(0, math.log(computing_seconds))
        round_ = Round(job, trials, floor=floor)
        found = decide(round_, lambda: problem, partial(make_searcher, "bayesian"))
        assert isinstance(found, Propose)
        return found.purpose

    assert purpose(0.2312) == "confirm"
    assert purpose(0.225) == "search", "a confirmation would show so much"
