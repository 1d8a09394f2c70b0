"""Trials and what follows them."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

from bagua_autotune.model.job import Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.trials import Move
from bagua_wire.configuration import Configuration
from tests.autotune.store.samples import BASELINE, FIRST, RESULT, with_buckets_of_its_own
from tests.autotune.support import make_spec


def test_a_trial_runs_is_measured_and_followed(store: Store, job: str) -> None:
    assert store.trials.advance(job, FIRST)
    assert store.trials.get(job, 0) == Trial(0, "search", BASELINE)
    store.trials.start(job, 0, 2.0)
    assert store.trials.get(job, 0).state == "running"
    estimate = Estimate(-1.5, 0.01, 9, 1)
    other = Configuration(BASELINE, bucket_bytes=4 << 20)
    following = Trial(1, "confirm", other)
    assert store.trials.advance(job, Move(3.0, closes=0, estimate=estimate, next_trial=following))
    first, second = store.trials.of(job)
    assert (first.state, first.estimate, first.started_at, first.ended_at) == (
        "measured",
        estimate,
        2.0,
        3.0,
    )
    assert (second, store.jobs.get(job).phase) == (following, "confirming")
    assert store.trials.advance(job, Move(4.0, closes=1, failure="they disagreed", result=RESULT))
    assert store.trials.get(job, 1).failure == "they disagreed"
    assert (store.jobs.get(job).phase, store.jobs.get(job).result) == ("finished", RESULT)


def test_an_unknown_error_survives_storing(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    following = Trial(1, "search", BASELINE)
    store.trials.advance(job, Move(2.0, 0, Estimate(1.0, math.inf, 1), next_trial=following))
    found = store.trials.get(job, 0).estimate
    assert found is not None
    assert found.standard_error == math.inf


def test_a_step_decided_on_an_old_view_changes_nothing(store: Store, job: str) -> None:
    assert store.trials.advance(job, FIRST)
    closing = Move(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=Trial(1, "search", BASELINE))
    assert not store.trials.advance(job, FIRST)
    assert store.trials.advance(job, closing)
    before = store.trials.of(job)
    assert not store.trials.advance(job, closing)
    assert not store.trials.advance(job, replace(closing, closes=1))
    assert store.trials.of(job) == before
    store.jobs.end(job, 3.0)
    assert not store.trials.advance(
        job, replace(closing, closes=1, next_trial=Trial(2, "search", BASELINE))
    )


def test_what_follows_a_trial_may_be_open_before_it_is_measured(store: Store, job: str) -> None:
    assert store.trials.advance(job, FIRST)
    following = Trial(1, "search", Configuration(BASELINE, bucket_bytes=4 << 20))
    ahead = Move(3.0, next_trial=following, leaves=0)
    store.trials.start(job, 0, 2.0)
    assert store.trials.advance(job, ahead)
    assert not store.trials.advance(job, ahead)
    assert [trial.state for trial in store.trials.of(job)] == ["running", "proposed"]
    estimate = Estimate(-1.5, 0.01, 3)
    assert store.trials.close_left(job, 0, estimate, 4.0)
    assert not store.trials.close_left(job, 0, replace(estimate, center=-1.0), 5.0)
    first, second = store.trials.of(job)
    assert (first.state, first.estimate, first.ended_at) == ("measured", estimate, 4.0)
    assert second == following


def test_what_fails_after_its_ranks_were_told_what_follows_is_closed_alone(
    store: Store, job: str
) -> None:
    assert store.trials.advance(job, FIRST)
    store.trials.start(job, 0, 2.0)
    following = Trial(1, "search", Configuration(BASELINE, bucket_bytes=4 << 20))
    assert store.trials.advance(job, Move(3.0, next_trial=following, leaves=0))
    assert store.trials.advance(job, Move(4.0, closes=0, failure="they disagreed"))
    assert not store.trials.advance(job, Move(5.0, closes=0, failure="again"))
    first, second = store.trials.of(job)
    assert (first.state, first.failure) == ("failed", "they disagreed")
    assert second == following


def test_an_explicit_list_of_buckets_survives_storing(store: Store) -> None:
    spec = make_spec(**with_buckets_of_its_own())
    assert store.jobs.create("job", spec, at=1.0)
    assert not store.jobs.create("job", spec, at=2.0)
    chosen = Configuration(spec.default_configuration, buckets=(100, 150))
    store.trials.advance("job", Move(1.0, next_trial=Trial(0, "search", chosen)))
    assert store.trials.get("job", 0).configuration == chosen
    result = replace(RESULT, configuration=chosen, payback_steps=12, cost_steps=1.5)
    store.trials.advance("job", Move(2.0, 0, Estimate(1.0, 0.1, 5), result=result))
    assert (store.jobs.get("job").result, store.jobs.get("job").space) == (result, spec.knobs)


def test_of_many_that_take_the_same_step_one_does(store: Store, job: str) -> None:
    took = []
    threads = [
        threading.Thread(target=lambda: took.append(store.trials.advance(job, FIRST)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(took) == [False] * 5 + [True]
    assert len(store.trials.of(job)) == 1
