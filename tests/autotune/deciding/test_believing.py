"""The end of a tuning whose searcher says itself whether its best is faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from bagua_autotune.deciding.decision import Keep, Propose, decide
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Trial
from bagua_autotune.search import Problem, believes, make_searcher
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import cases
from bagua_wire.configuration import Configuration
from tests.autotune.deciding.test_decision import BASELINE, FAST, SLOW, history, make_job
from tests.autotune.simulated_job import SimulatedJob, truth

Step = tuple[str, Configuration, float | None]
SEARCHED: list[Step] = [
    ("search", BASELINE, 0.2),
    ("search", FAST, 0.17),
    ("search", SLOW, 0.3),
]


def follow(
    steps: Sequence[Step], candidates: Sequence[Configuration] = (BASELINE, FAST, SLOW)
) -> Propose | Keep:
    """What follows some trials, where the searcher's word is taken."""
    job, trials = make_job(), history(*steps)
    searcher = partial(make_searcher, "belief")
    problem = Problem(job.space, candidates)
    return decide(Round(job, trials), lambda: problem, searcher, is_believed=True)


def test_what_is_far_faster_is_kept_after_a_second_visit_to_each_side() -> None:
    assert follow(SEARCHED) == Propose("confirm", BASELINE)
    again: list[Step] = [*SEARCHED, ("confirm", BASELINE, 0.2)]
    assert follow(again) == Propose("confirm", FAST)
    kept = follow([*again, ("confirm", FAST, 0.17)])
    assert isinstance(kept, Keep)
    assert kept.configuration == FAST
    assert kept.gain is not None
    assert 0 < kept.gain.low < kept.gain.center < kept.gain.high


def test_a_default_that_was_in_a_bad_moment_promises_no_gain() -> None:
    steps: list[Step] = [("search", BASELINE, 0.2), ("search", FAST, 0.16), ("search", SLOW, 0.3)]
    steps.append(("confirm", BASELINE, 0.16))
    turns = 0
    decision = follow(steps)
    while isinstance(decision, Propose):
        seconds = {BASELINE: 0.16, FAST: 0.16, SLOW: 0.3}[decision.configuration]
        steps.append((decision.purpose, decision.configuration, seconds))
        decision, turns = follow(steps), turns + 1
        assert turns < 20
    assert decision.configuration == BASELINE


def test_a_small_gain_is_looked_at_twice_and_the_best_may_change_meanwhile() -> None:
    other = Configuration(bucket_bytes=8 * 1024**2, hierarchical="leaders")
    candidates = (BASELINE, FAST, other)
    steps: list[Step] = [
        ("search", BASELINE, 0.2),
        ("search", FAST, 0.185),
        ("search", other, 0.188),
        ("confirm", BASELINE, 0.2),
    ]
    assert follow(steps, candidates) == Propose("confirm", FAST)
    steps += [("confirm", FAST, 0.24), ("confirm", BASELINE, 0.2), ("confirm", FAST, 0.24)]
    decision = follow(steps, candidates)
    assert decision in (Propose("confirm", other), Propose("confirm", BASELINE))


def test_what_visits_never_settle_ends_after_as_many_as_any_confirmation() -> None:
    steps: list[Step] = [*SEARCHED]
    seconds = {BASELINE: (0.2, 0.15), FAST: (0.15, 0.2)}
    while isinstance(decision := follow(steps), Propose):
        own = [at for at, (_, what, _) in enumerate(steps) if what == decision.configuration]
        steps.append(
            ("confirm", decision.configuration, seconds[decision.configuration][len(own) % 2])
        )
        assert len(steps) <= len(SEARCHED) + 12
    assert isinstance(decision, Keep)
    assert decision.configuration == BASELINE


@pytest.mark.parametrize("number", [0, 5, 11])
def test_a_simulated_job_is_left_near_its_best_and_its_claim_holds(number: int) -> None:
    assert believes("belief")
    assert not believes("bayesian")
    case = cases()[number]
    store = Store("sqlite://")
    job = SimulatedJob(Tuner(store, searcher="belief"), case.simulator, "job", number, noise=0.02)
    job.run(3000, until_finished=True)
    times, result = truth(case.simulator), job.status.result
    assert result is not None
    seconds = job.true_seconds(job.configuration)
    assert seconds < 1.05 * min(times.values())
    if result.kept == "winner":
        assert result.low <= job.true_seconds(job.baseline) / seconds <= result.high
    told: list[Trial] = store.trials.of("job")
    assert sum(trial.purpose == "confirm" for trial in told) <= 12
    store.close()
