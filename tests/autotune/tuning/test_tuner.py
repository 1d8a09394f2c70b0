"""Whole tunings of simulated jobs, on real stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest

from bagua_autotune.model.job import Event, Job, Observation
from bagua_autotune.search import searcher
from bagua_autotune.search.searcher import RandomSearcher
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.tuning.background import TunerListener
from bagua_autotune.tuning.status import JobState
from bagua_autotune.tuning.tuner import TrialNotNamed, Tuner
from bagua_autotune.views.lists import every_trial
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from tests.autotune.support import MIB, Ranks, drive, make_spec, peaked, present

BASELINE = Configuration(make_spec().default_configuration)


def at_trial(tuner: Tuner, index: int) -> Ranks:
    """Those of a new job, which run this trial."""
    tuner.register("job", make_spec())
    ranks = Ranks(noise=0.001)
    while present(tuner.open_trial("job")).index < index:
        drive(tuner, "job", ranks, polls=1)
    return ranks


@pytest.mark.parametrize("seed", range(2))
def test_a_noisy_job_ends_near_the_optimum(tuner: Tuner, seed: int) -> None:
    tuner.register(f"job{seed}", make_spec())
    status = drive(tuner, f"job{seed}", Ranks(seed, noise=0.05))
    assert status.state == "finished"
    assert status.result is not None
    best = peaked({"bucket_bytes": 4 * MIB, "hierarchical": "leaders"})
    assert peaked(status.configuration) < 1.05 * best
    truth = peaked(BASELINE) / peaked(status.configuration)
    assert status.result.low * 0.97 < truth < status.result.high * 1.03
    assert status.result.trials < 30


def test_the_warm_up_does_not_count(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    slow = [Observation(step, (2.0,) * 4) for step in range(1, 6)]
    fast = [Observation(step, (0.2,) * 4) for step in range(6, 40)]
    tuner.observe("job", 0, slow)
    assert tuner.status("job").trial.index == 0
    tuner.observe("job", 0, fast)
    first = every_trial(tuner.store, "job")[0]
    assert (first.state, first.seconds) == ("measured", pytest.approx(0.2))
    assert first.outliers == 0


def test_a_trial_that_is_far_slower_is_over_after_a_step(tuner: Tuner) -> None:
    at_trial(tuner, 1)
    # Nobody runs a tenfold step more often than needed to be sure of it.
    tuner.observe("job", 1, [Observation(1001, (2.0,) * 4)])
    assert tuner.open_trial("job").index == 2
    first = every_trial(tuner.store, "job")[1]
    assert (first.state, first.steps) == ("measured", 1)


def test_steps_that_come_before_the_ranks_have_switched_count_in_the_next_decision(
    tuner: Tuner,
) -> None:
    at_trial(tuner, 1)
    tuner.observe("job", 1, [Observation(1001, (2.0,) * 4)])
    # The first one was a pause.
    tuner.observe("job", 1, [Observation(step, (0.15,) * 4) for step in range(1002, 1007)])
    assert tuner.store.trials.of("job")[1].estimate.count == 1
    tuner.observe("job", 2, [Observation(1010, (2.0,) * 4)])
    found = tuner.store.trials.of("job")[1].estimate
    assert found.center == pytest.approx(math.log(0.15))
    assert found.count == 5


def test_a_short_training_is_searched_for_less_long(tuner: Tuner) -> None:
    trials = {110: 0, 1_000_000: 0}
    for steps, seed in product(trials, range(3)):
        name = f"job{steps}-{seed}"
        spec = make_spec(limits={"remaining_steps": steps}, fingerprint=f"{name:0>64}")
        tuner.register(name, spec)
        drive(tuner, name, Ranks(seed, noise=0.03))
        trials[steps] += len(tuner.store.trials.of(name))
    assert 0 < trials[110] < trials[1_000_000]


def test_the_result_says_what_the_search_cost_and_when_that_is_earned(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    ranks = Ranks(noise=0.001)
    while (trial := tuner.open_trial("job")) is not None:
        if trial.state == "proposed":
            tuner.take_event("job", Event("switched", trial.index, ranks.step, seconds=0.01))
        steps = ranks.run(trial.configuration, 4)
        tuner.observe("job", trial.index, [Observation(step, tuple(made)) for step, made in steps])
    result = present(tuner.status("job").result)
    assert result.kept == "winner"
    extra_seconds = 0.01 * len(tuner.store.trials.of("job")) + sum(
        4 * math.ceil(trial.steps / 4) * max(0.0, (trial.seconds or 0.0) - peaked(BASELINE))
        for trial in every_trial(tuner.store, "job")
    )
    assert result.cost_seconds == pytest.approx(extra_seconds, rel=0.05)
    assert result.cost_steps == pytest.approx(result.cost_seconds / peaked(BASELINE), rel=0.01)
    assert result.payback_steps is not None
    earned = result.payback_steps * peaked(BASELINE) * (1 - 1 / result.speedup)
    assert earned == pytest.approx(result.cost_seconds, rel=0.2)


def test_a_disagreement_fails_the_trial_and_the_next_is_another(tuner: Tuner) -> None:
    ranks = at_trial(tuner, 1)
    banned = tuner.open_trial("job")
    tuner.take_event("job", Event("disagreement", banned.index, 50, "rank 3 has other buckets"))
    assert tuner.store.trials.of("job")[1].failure == "rank 3 has other buckets"
    status = drive(tuner, "job", ranks)
    assert status.state == "finished"
    later = [trial.configuration for trial in tuner.store.trials.of("job")[2:]]
    assert later
    assert banned.configuration not in later


def test_a_late_disagreement_about_a_closed_trial_is_only_noted(tuner: Tuner) -> None:
    ranks = at_trial(tuner, 2)
    late = Event("disagreement", 1, message="late")
    tuner.take_event("job", late)
    assert tuner.open_trial("job").index == 2
    assert [event.kind for event in tuner.store.events.of("job")] == ["disagreement"]
    before = drive(tuner, "job", ranks)
    tuner.take_event("job", late)
    assert tuner.status("job") == before, "nor does it change the final choice"


def test_switching_starts_a_trial_and_late_data_does_not_reopen_one(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    tuner.take_event("job", Event("switched", 0, 1, seconds=0.1))
    assert tuner.status("job").trial.state == "running"
    ranks = Ranks(noise=0.001)
    while tuner.open_trial("job").index < 1:
        drive(tuner, "job", ranks, polls=1)
    status = tuner.observe("job", 0, [Observation(10_000, (0.1,) * 4)])
    assert present(status.trial).index == 1
    assert tuner.store.observations.of("job", 0)[-1][1].step == 10_000
    with pytest.raises(UnknownTrial):
        tuner.observe("job", 7, [Observation(10_000, (0.1,) * 4)])
    with pytest.raises(UnknownTrial):
        tuner.take_event("job", Event("note", 7))


def test_training_that_ends_leaves_the_job_and_training_again_resumes_it(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    drive(tuner, "job", Ranks(), polls=10)
    before = tuner.open_trial("job")
    tuner.take_event("job", Event("ended"))
    status = tuner.status("job")
    assert (status.state, status.trial, status.configuration) == ("ended", None, BASELINE)
    tuner.register("job", make_spec())
    assert tuner.status("job").trial.index == before.index


def test_a_protocol_can_close_trials_itself(tuner: Tuner) -> None:
    tuner.register("job", make_spec(), protocol="v1")
    many = [Observation(step, (100.0, None, 90.0, 95.0)) for step in range(100)]
    tuner.store.observations.add("job", 0, many, 1.0)
    assert tuner.open_trial("job").index == 0
    assert tuner.close_trial("job", 0)
    assert not tuner.close_trial("job", 0)
    assert not tuner.close_trial("job", 1), "a trial never observed cannot be closed"
    assert tuner.open_trial("job").index == 1
    late = [Observation(step, (200.0,) * 4) for step in range(100, 400)]
    tuner.reestimate("job", 0, [*many, *late])
    assert tuner.store.trials.get("job", 0).estimate.center == -173.75


def test_listeners_are_told_of_new_steps_wherever_they_stand_in_a_batch() -> None:
    told: list[Observation] = []

    class Listener(TunerListener):
        def on_observed(self, job: Job, observations: Sequence[Observation]) -> None:
            told.extend(observations)

    tuner = Tuner(Store("sqlite://"), listeners=[Listener()])
    tuner.register("job", make_spec())
    first, known, last = (Observation(step, (0.2,) * 4) for step in range(3))
    tuner.observe("job", 0, [known])
    tuner.observe("job", 0, [first, last, known])
    assert told == [known, first, last]


def test_progress_grows_and_is_bounded(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    ranks, before = Ranks(noise=0.001), tuner.status("job").progress
    assert (before.trials_measured, before.speedup, before.seconds_left) == (0, None, None)
    while tuner.open_trial("job").index < 3:
        drive(tuner, "job", ranks, polls=1)
    progress = tuner.status("job").progress
    assert progress.trials_measured == 3
    assert progress.speedup >= 1.0
    assert progress.seconds_left >= 0.0
    done = drive(tuner, "job", ranks)
    assert done.progress.trials_measured <= done.progress.max_trials
    assert done.progress.seconds_left == 0.0


class BrokenSearcher(RandomSearcher):
    """Learns the first trials and fails then, as a matrix does that turns out singular."""

    def ask(self) -> Configuration:
        if len(self._costs) >= 2:
            raise ArithmeticError("singular matrix")
        return super().ask()


def test_a_search_that_fails_holds_no_job_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(searcher.OURS, "broken", f"{__name__}:BrokenSearcher")
    tuner = Tuner(Store("sqlite://"), "broken")
    tuner.register("job", make_spec(limits={"max_samples": 6}))
    status = drive(tuner, "job", Ranks(noise=0.001))
    assert status.state == "finished"
    assert status.result is not None
    assert len({trial.configuration for trial in tuner.store.trials.of("job")}) == 6
    failures = [record for record in caplog.records if "search failed" in record.message]
    assert [bool(record.exc_info) for record in failures] == [True] + [False] * (len(failures) - 1)
    assert "singular matrix" in failures[-1].message


def finish(tuner: Tuner) -> JobState:
    tuner.register("job", make_spec(limits={"max_samples": 6}))
    return drive(tuner, "job", Ranks(noise=0.001))


def test_ranks_that_cannot_run_the_final_choice_end_on_the_baseline(tuner: Tuner) -> None:
    before = present(finish(tuner).result)
    assert before.kept == "winner"
    event = Event("disagreement", None, 999, "rank 3 ran out of\nmemory")
    tuner.take_event("job", event)
    once = tuner.status("job")
    assert (once.state, once.configuration, once.trial) == ("finished", BASELINE, None)
    result = present(once.result)
    assert (result.kept, result.configuration) == ("baseline", BASELINE)
    assert (result.speedup, result.low, result.high) == (1.0, 1.0, 1.0)
    assert (result.trials, result.steps) == (before.trials, before.steps)
    assert result.summary.startswith(
        "bucket 25 MiB, flat (the default) kept: the ranks disagreed: rank 3 ran out of\\nmemory; "
    )
    tuner.take_event("job", event)
    assert tuner.status("job") == once


def test_a_trial_that_harms_the_training_fails(tuner: Tuner) -> None:
    at_trial(tuner, 1)
    # Of a report that began before the trial did: nothing fails.
    tuner.take_event("job", Event("diverged", None, 5, "x"))
    tuner.take_event("job", Event("diverged", 1, 50, "the loss is not finite"))
    assert (
        tuner.store.trials.of("job")[1].failure == "the training suffered: the loss is not finite"
    )
    assert tuner.open_trial("job").index == 2


def test_a_disagreement_sent_twice_fails_one_trial(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    for _ in range(2):
        tuner.take_event("job", Event("disagreement", 0, 5, "x"))
    assert [trial.state for trial in tuner.store.trials.of("job")] == ["failed", "proposed"]
    with pytest.raises(TrialNotNamed):
        tuner.take_event("job", Event("disagreement", None, 5, "x"))
    assert len(tuner.store.trials.of("job")) == 2


def test_messages_of_ranks_reach_the_log_as_one_line(
    tuner: Tuner, caplog: pytest.LogCaptureFixture
) -> None:
    tuner.register("job", make_spec())
    tuner.take_event("job", Event("disagreement", 0, 5, "\x1b[2Jx\nERROR forged"))
    assert "\\x1b[2Jx\\nERROR forged" in caplog.text
    assert "\x1b" not in caplog.text
    assert tuner.store.trials.of("job")[0].failure == "\\x1b[2Jx\\nERROR forged"


def test_many_tensors_are_cut_once_and_not_for_every_decision(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    tensors = tuner.store.jobs.tensors

    def counted(job_id: str) -> list[Tensor]:
        reads.append(job_id)
        return tensors(job_id)

    monkeypatch.setattr(tuner.store.jobs, "tensors", counted)
    finish(tuner)
    assert len(tuner.store.trials.of("job")) > 6
    assert reads == ["job"]


def test_a_training_about_to_end_is_left_as_it_is(tuner: Tuner) -> None:
    tuner.register("job", make_spec(limits={"remaining_steps": 99}))
    status = tuner.status("job")
    assert (status.state, status.trial, status.configuration) == ("finished", None, BASELINE)
    assert status.result is not None
    assert (status.result.kept, status.result.cost_steps) == ("baseline", 0)
    assert "too few steps remain" in status.result.summary
