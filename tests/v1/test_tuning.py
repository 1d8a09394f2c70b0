"""Whole tunings by Bagua's rules, on the real core and store, with simulated workers."""

from __future__ import annotations

import logging
import math
import random

import pytest

from bagua_v1.hyperparameters import tensor, to_configuration
from bagua_v1.tuning import Trials
from tests.autotune.support import Later, make_spec, present, registration, stored_jobs
from tests.v1.worker import (
    BEST,
    MIB,
    TENSORS,
    Wire,
    Worker,
    cycle,
    cycles,
    enter,
    peaked,
    ranks_of,
    run,
    tuning,
)

pytestmark = pytest.mark.slow


def test_two_ranks_end_together_on_the_best_buckets(store):
    service = tuning(store, None, "bayesian")
    workers = [Worker(service, "net", rank, peaked) for rank in range(2)]
    run(workers)
    assert peaked(0, workers[0].running) == BEST
    (job,) = stored_jobs(store)
    assert job.result is not None
    assert job.result.kept == "winner"


def test_noise_and_ranks_of_unequal_speed_do_not_mislead(store):
    noise = random.Random(0)

    def speed(rank: int, wire: Wire) -> float:
        return (100 + peaked(rank, wire) / MIB) * (1.0, 0.4)[rank] * noise.gauss(1, 0.01)

    # Each rank speaks to a replica of its own on the same database.
    workers = [Worker(tuning(store, searcher="bayesian"), "net", rank, speed) for rank in range(2)]
    run(workers)
    assert peaked(0, workers[0].running) == BEST


def test_a_rank_that_lags_behind_holds_the_answer(store):
    service = tuning(store)
    a, b = workers = ranks_of(service)
    cycles(workers, 100, 700)
    a.report(700)
    a.ask(700)  # all go on from 600: it may change once more
    held = a.running
    for iteration in range(800, 1500, 100):
        a.report(iteration)
        a.ask(iteration)
        assert a.running == held
    b.report(700)
    b.ask(700)
    assert b.running == held


def test_registering_again_does_not_reset_the_tuning(store):
    service = tuning(store)
    workers = ranks_of(service)
    cycles(workers, 100, 600)
    running = workers[0].running
    assert service.register("net", TENSORS) != running, "a registration is answered the baseline"
    workers[0].ask(500)
    assert workers[0].running == running


def test_spans_order_each_model_by_itself(store):
    service = tuning(store)
    workers = [Worker(service, "net", rank, peaked) for rank in range(2)]
    service.register("other", TENSORS[:3])
    enter(workers)
    service.order(["nobody's", "layer2.weight", "layer0.weight", "layer2.weight"])
    service.order(["layer1.weight", "layer0.weight"])
    cycles(workers, 100, 300)
    flat = [member["name"] for bucket in workers[0].running["buckets"] for member in bucket]
    unknown = [f"layer{i}.weight" for i in range(3, 5)]
    assert flat == [*unknown, "layer2.weight", "layer0.weight", "layer1.weight"]


def test_spans_that_come_between_two_ranks_do_not_part_them(store):
    service = tuning(store)
    a, b = workers = ranks_of(service)
    cycle(workers, 100)
    a.report(200)
    a.ask(200)
    service.order(["layer4.weight", "layer0.weight"])
    b.report(200)
    b.ask(200)
    assert a.running == b.running
    (job,) = stored_jobs(store)
    assert store.trials.of(job.id)[0].state == "proposed"
    cycle(workers, 300)
    assert store.trials.of(job.id)[0].state == "running", "the switch was at 200"


def test_spans_and_another_rank_that_come_during_an_ask_do_not_part_them(store, monkeypatch):
    service = tuning(store)
    a, b = workers = ranks_of(service)
    cycle(workers, 100)
    next_grant = Trials.next_grant

    def interrupted(*arguments):
        monkeypatch.undo()
        service.order(["layer4.weight", "layer0.weight"])
        b.report(200)
        b.ask(200)
        return next_grant(*arguments)

    monkeypatch.setattr(Trials, "next_grant", interrupted)
    a.report(200)
    a.ask(200)
    flat = [member["name"] for bucket in b.running["buckets"] for member in bucket]
    assert flat[-1] == "layer0.weight"
    assert a.running == b.running


def test_reports_that_come_late_count_for_the_trial_they_measured(store):
    service = tuning(store)
    a, b = workers = ranks_of(service, lambda rank, wire: 10.0 - rank)
    cycles(workers, 100, 700)
    a.report(700)
    a.ask(700)
    (job,) = stored_jobs(store)
    closed = store.trials.of(job.id)[1]
    assert closed.state == "measured"
    assert closed.estimate is not None
    # Rank 1 was 10 % slower before, so it is expected to be so again; then its report arrives.
    assert closed.estimate.center == pytest.approx(-9.5)
    b.speed = lambda rank, wire: 7.0
    b.report(700)
    b.ask(700)
    for worker in workers:
        worker.speed = lambda rank, wire: 8.5
    cycle(workers, 800)
    values = [o.values for index, o in store.observations.of(job.id) if index == 1]
    assert values == [(10.0, 9.0), (10.0, 7.0), (8.5, 8.5)]
    late = present(store.trials.of(job.id)[1].estimate)
    assert late.center == pytest.approx((-9.5 - 8.5 - 8.5) / 3)


def test_nobody_waits_for_a_decision_and_what_is_run_meanwhile_counts(store):
    later = Later()
    service = tuning(store, background=later)
    workers = ranks_of(service)
    cycle(workers, 100)
    baseline = workers[0].running
    for iteration in range(200, 700, 100):
        cycle(workers, iteration)
        assert workers[0].running == baseline
    assert len(later.waiting) == 1
    workers[0].report(700)
    workers[0].ask(700)
    later.finish()  # between two ranks' asks at one iteration
    workers[1].report(700)
    workers[1].ask(700)
    assert [worker.running for worker in workers] == [baseline] * 2
    (job,) = stored_jobs(store)
    assert store.trials.of(job.id)[0].estimate.count == 2
    cycle(workers, 800)
    assert workers[0].running != baseline
    assert store.trials.of(job.id)[0].estimate.count == 6


def test_a_decision_lost_with_the_service_is_made_again(store):
    lost = Later()
    service = tuning(store, background=lost)
    workers = ranks_of(service)
    cycles(workers, 100, 500)
    assert lost.waiting
    for worker in workers:
        worker.service = tuning(store)
    cycles(workers, 500, 700)
    (job,) = stored_jobs(store)
    assert [trial.state for trial in store.trials.of(job.id)] == ["measured", "proposed"]


def test_ranks_that_never_meet_are_told_of_once(store, caplog):
    caplog.set_level(logging.WARNING)
    service = tuning(store, world_size=3)
    workers = ranks_of(service)
    cycles(workers, 100, 2000)
    (warning,) = caplog.messages
    assert "rank 2 has not reported" in warning
    assert store.observations.of(stored_jobs(store)[0].id) == []


def test_recurring_pauses_do_not_decide_which_configuration_wins(store):
    noise = random.Random(0)
    service = tuning(store, searcher="bayesian")
    window = 0

    def speed(rank: int, wire: Wire) -> float:
        pause = 0.66 if window % 4 == 0 else 1.0
        distance = math.log2(wire["bucket_size"] / (40 * MIB))
        return 100 * (1 - 0.02 * distance**2) * noise.gauss(1, 0.005) * pause

    workers = ranks_of(service, speed)
    while not workers[0].is_completed:
        window += 1
        cycle(workers, 100 * window)
    assert workers[0].running["bucket_size"] in range(20 * MIB, 80 * MIB)


def test_reports_of_unknown_hyperparameters_are_ignored(store):
    service = tuning(store)
    service.register("net", TENSORS)
    service.report("net", 0, 100, to_configuration(12345, True), 1.0)
    (job,) = stored_jobs(store)
    assert store.observations.of(job.id) == []


def test_spans_reach_every_job_still_tuned_however_many_others_there_are(store):
    service = tuning(store, world_size=1)
    service.register("net", TENSORS)
    small = make_spec(tensors=registration()["tensors"][:1])
    for number in range(110):
        store.jobs.create(f"other{number}", small, at=2_000_000.0 + number)
        service.register(f"model{number}", [tensor("x", 1, "f32")])
    service.order(["layer4.weight", "layer3.weight"])
    (worker,) = ranks_of(service, count=1)
    cycles([worker], 100, 300)
    last = [member["name"] for bucket in worker.running["buckets"] for member in bucket][-2:]
    assert last == ["layer4.weight", "layer3.weight"]


def test_a_job_that_only_asks_stays_in_contact(store):
    service = tuning(store)
    (worker,) = ranks_of(service, count=1)
    (job,) = stored_jobs(store)
    for _ in range(100):
        worker.ask(0)
    assert stored_jobs(store)[0].last_contact_at > job.last_contact_at + 60


def test_without_a_world_size_the_ranks_seen_are_shown(store):
    ranks_of(tuning(store, world_size=None), count=3)
    assert stored_jobs(store)[0].world_size == 3


def test_extreme_speeds_break_nothing(store):
    noise = random.Random(1)
    extremes = [0.0, -0.0, 5e-324, 1.7e308, -1.7e308, 1.0]
    service = tuning(store)
    run([Worker(service, "net", rank, lambda *_: noise.choice(extremes)) for rank in range(2)])
