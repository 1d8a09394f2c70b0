"""A job that ran before begins with what was best then, and does not trust it blindly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bagua_autotune.deciding.ending import confirmed_gain
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Event, Inherited
from bagua_autotune.model.statistics import Estimate, Interval
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration, Value
from tests.autotune.deciding.test_decision import FAST, make_job
from tests.autotune.support import MIB, Ranks, drive, make_spec, present
from tests.autotune.tuning.jobs import simulator, slower_than_best, tuned

pytestmark = pytest.mark.slow


def configurations(tuner: Tuner, job_id: str) -> list[Configuration]:
    return [trial.configuration for trial in tuner.store.trials.of(job_id)]


def test_the_second_run_is_at_its_best_from_the_first_switch_and_sure_after_two_trials(
    tuner: Tuner,
) -> None:
    first = tuned(tuner, "first", simulator())
    assert first.status.result is not None
    assert first.status.result.kept == "winner"
    for run in (1, 2):
        job = tuned(tuner, f"run{run}", simulator(), 100 * run)
        assert configurations(tuner, f"run{run}") == [job.baseline, first.configuration]
        assert [switch.configuration for switch in job.switches] == [
            job.baseline,
            first.configuration,
            first.configuration,
        ]
        result = present(job.status.result)
        assert result.kept == "winner"
        truth = job.true_seconds(job.baseline) / job.true_seconds(job.configuration)
        assert result.low * 0.97 < truth < result.high * 1.03
        assert result.trials == 2


def test_what_a_training_names_wins_where_it_is_the_best_though_no_candidate(
    tuner: Tuner,
) -> None:
    """Candidates' sizes are powers of two and the halves between them."""
    named = {"bucket_bytes": 10 * MIB, "hierarchical": "off"}

    def step_seconds(configuration: Mapping[str, Value]) -> float:
        return 0.12 if configuration["bucket_bytes"] == 10 * MIB else 0.2

    tuner.register("job", make_spec(begin_with=named, limits={"max_samples": 12}))
    found = present(drive(tuner, "job", Ranks(0, 0.01, step_seconds)).result)
    assert (found.kept, found.configuration) == ("winner", Configuration(named))


def test_what_was_best_on_another_network_is_not_kept_where_it_is_not(tuner: Tuner) -> None:
    """The same fingerprint, but the machine is not the one that it was."""
    first = tuned(tuner, "first", simulator())
    stored = Configuration(bucket_bytes=8 * MIB, hierarchical="leaders", channels=2)
    result = present(first.status.result)
    tuner.store.jobs.replace_result("first", replace(result, configuration=stored))
    changed = simulator(gbit_per_second=25, inside_gbit_per_second=20)
    assert changed.step_seconds(stored) > changed.step_seconds(changed.default)
    job = tuned(tuner, "second", changed, 1)
    assert configurations(tuner, "second")[1] == stored
    assert len(configurations(tuner, "second")) > 2
    assert job.configuration != stored
    assert slower_than_best(job) < 0.05


def test_a_stored_best_that_the_ranks_cannot_run_is_left(tuner: Tuner) -> None:
    stored = tuned(tuner, "first", simulator()).configuration

    class Failing(Tuner):
        """Its ranks disagree whenever they shall run what was best before."""

        def take_event(self, job_id: str, event: Event) -> None:
            trial = self.open_trial(job_id)
            if event.kind == "switched" and trial and trial.configuration == stored:
                event = Event("disagreement", event.trial, event.step, "out of memory")
            super().take_event(job_id, event)

    job = tuned(Failing(tuner.store), "second", simulator(), 1)
    tried = configurations(tuner, "second")
    assert tried.count(stored) == 1
    assert len(tried) > 3
    assert job.configuration != stored
    assert slower_than_best(job) < 0.05


def test_a_job_that_lacks_a_knob_does_not_begin_with_it(tuner: Tuner) -> None:
    tuned(tuner, "first", simulator())
    job = tuned(tuner, "second", simulator(), 1, knobs=("bucket_bytes", "hierarchical"))
    inherited = present(tuner.store.jobs.get("second").inherited)
    assert inherited.configuration is None
    assert len(configurations(tuner, "second")) > 2
    assert job.status.result is not None


def inheriting(gain: float) -> Inherited:
    return Inherited(configuration=dict(FAST), gain=gain, source="job0")


def confirmed(gain: float, measured: float, error: float) -> Interval | None:
    """Of a stored gain, after measuring one of the two sides that much faster."""
    round_ = Round(replace(make_job(), inherited=inheriting(gain)), [])
    assert round_.stored_best == FAST
    blocks = [Estimate(center, error, 20) for center in (0.0, -measured)]
    return confirmed_gain(round_, *blocks)


def test_a_gain_is_confirmed_by_trials_that_fit_it_and_by_no_others() -> None:
    found = present(confirmed(0.2, 0.19, 0.005))
    assert 0.17 < found.low < found.center < found.high < 0.21
    assert confirmed(0.2, 0.02, 0.005) is None, "much less than it was"
    assert confirmed(0.2, 0.5, 0.005) is None, "much more: something else has changed"
    assert confirmed(0.2, 0.19, math.inf) is None, "nothing is known"
    vague = present(confirmed(0.2, 0.1, 0.05))
    assert 0.1 < vague.center < 0.2


def _trials(tuner: Tuner, job_id: str, count: int, **changes: Any) -> list[Configuration]:
    """Its first ones."""
    tuner.register(job_id, make_spec(**changes))
    drive(tuner, job_id, Ranks(noise=0.001), steps=10, until_trial=count)
    return configurations(tuner, job_id)[:count]


def test_what_the_training_names_is_tried_first_whatever_is_known(tuner: Tuner) -> None:
    asked = {"bucket_bytes": 2 * MIB, "hierarchical": "leaders"}
    for job_id in ("first", "second"):  # the second time a best one is known
        default, then = _trials(tuner, job_id, 2, begin_with=asked)
        assert default == make_spec().default_configuration
        assert then == asked
        (note,) = tuner.store.events.of(job_id, 10)
        assert note.message == (
            "tries bucket 2 MiB, hierarchical first after the default, as the training asked"
        )
        _trials(tuner, f"all of {job_id}", 100)
    # It is tried, and no more: a better one wins.
    _trials(tuner, "whole", 100, begin_with=asked, fingerprint="whole")
    result = present(tuner.store.jobs.get("whole").result)
    assert result.configuration["bucket_bytes"] != 2 * MIB


def test_what_the_training_names_must_be_among_its_knobs() -> None:
    with pytest.raises(ValueError, match="begin_with: no value for knob 'hierarchical'"):
        make_spec(begin_with={"bucket_bytes": MIB})
    with pytest.raises(ValueError, match="begin_with: knob 'hierarchical' is 'tree'"):
        make_spec(begin_with={"bucket_bytes": MIB, "hierarchical": "tree"})


def test_an_explicit_list_of_buckets_is_stored_and_begun_with(tuner: Tuner) -> None:
    knobs = ("bucket_bytes", "hierarchical", "channels", "buckets")
    tensors = len(simulator().workload.tensors)
    first = tuned(tuner, "first", simulator(), knobs=knobs)
    explicit = Configuration({**first.configuration, "buckets": (tensors - 40, 40)})
    kept = tuner.store.jobs.get("first").result
    assert kept is not None
    tuner.store.jobs.replace_result("first", replace(kept, configuration=explicit))
    tuned(tuner, "second", simulator(), 1, knobs=knobs)
    assert configurations(tuner, "second")[1] == explicit
