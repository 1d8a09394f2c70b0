"""Jobs whose step times change after they were tuned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.rounds import TRIAL_STEPS, Round, as_of_now, trial_steps
from bagua_autotune.model.job import Event, Job, Limits, Observation, Trial
from bagua_autotune.store import Store
from bagua_autotune.store.observations import Steps
from bagua_autotune.tuning.background import TunerListener
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration
from tests.autotune.deciding.test_decision import BASELINE, make_job
from tests.autotune.simulated_job import SimulatedJob
from tests.autotune.support import Clock, Ranks, drive, make_spec, present
from tests.autotune.tuning.jobs import simulator, slower_than_best, tuned

# Buckets of 8 to 11 MiB are best before, and slower than larger ones by a third afterwards.
BEFORE = simulator(gbit_per_second=25)
AFTER = simulator(gbit_per_second=25, latency_seconds=5e-3)
SIZE = ("bucket_bytes",)


def drift(step: int = 10**6) -> Event:
    return Event("drift", None, step, "0.2 s became 0.3 s", 0.3)


def round_of(tuner: Tuner, job_id: str, number: int) -> list[Configuration]:
    return [t.configuration for t in tuner.store.trials.of(job_id) if t.round == number]


@pytest.mark.parametrize("seed", range(2))
def test_a_network_that_changes_for_good_is_tuned_for_again(tuner: Tuner, seed: int) -> None:
    job = tuned(tuner, "job", BEFORE, seed, knobs=SIZE)
    job.run(200)
    assert job.drifts == []
    kept, changed_at = job.configuration, job.step
    job.simulator = AFTER
    assert slower_than_best(job) > 0.2
    job.run(100)
    assert job.status.round == 1, "within 100 steps"
    job.run(1000, until_finished=True)
    assert job.is_finished
    assert job.step - changed_at < 400
    assert slower_than_best(job) < 0.03
    first = list(dict.fromkeys([kept, job.baseline]))
    assert round_of(tuner, "job", 1)[: len(first)] == first
    result = present(job.status.result)
    truth = job.true_seconds(job.baseline) / job.true_seconds(job.configuration)
    assert result.low * 0.97 < truth < result.high * 1.03
    assert result.trials == len(round_of(tuner, "job", 1))


def test_a_short_disturbance_opens_no_round(tuner: Tuner) -> None:
    job = SimulatedJob(
        tuner, BEFORE, "job", 0, disturbed=lambda step: 2.0 if 1000 <= step < 1020 else 1.0
    )
    job.run(1500)
    assert (job.status.round, job.drifts) == (0, [])


def test_a_round_knows_what_the_one_before_had_learned(tuner: Tuner) -> None:
    tuned(tuner, "job", BEFORE)
    tuner.take_event("job", drift())
    job = tuner.store.jobs.get("job")
    problem = Knowledge(tuner.store).problem(Round.of(job, tuner.store.trials.of("job")))
    assert problem.predictor is not None, "before any trial of this round was profiled"


@pytest.mark.slow
def test_what_all_steps_changed_alike_ends_in_what_was_kept(tuner: Tuner) -> None:
    """Such as a device whose clock fell: everything is slower, the same is best."""
    job = SimulatedJob(tuner, BEFORE, "job", 0, disturbed=lambda step: 1.5 if step > 600 else 1.0)
    job.run(600)
    assert job.is_finished
    job.run(600)
    assert job.status.round == 1
    assert job.is_finished
    assert slower_than_best(job) < 0.03


def finished(tuner: Tuner, **limits: int) -> None:
    tuner.register("job", make_spec(limits={"max_samples": 6, **limits}))
    assert drive(tuner, "job", Ranks(noise=0.001)).state == "finished"


def test_a_job_that_kept_its_default_searches_again(tuner: Tuner) -> None:
    tuner.register("job", make_spec(limits={"max_samples": 6}))
    flat = drive(tuner, "job", Ranks(noise=0.001, step_seconds=lambda _: 0.2))
    assert present(flat.result).kept == "baseline"
    tuner.take_event("job", drift())
    status = drive(tuner, "job", Ranks(1, noise=0.001))
    assert (status.state, status.round) == ("finished", 1)
    assert present(status.result).kept == "winner", "now there is something to gain"
    again = round_of(tuner, "job", 1)
    assert again[0] == flat.configuration
    assert again[1] != flat.configuration, "measured once is enough"


def test_while_a_job_is_tuned_again_its_state_says_so(tuner: Tuner) -> None:
    finished(tuner)
    before = tuner.status("job")
    tuner.take_event("job", drift())
    status = tuner.status("job")
    assert (status.state, status.round) == ("tuning", 1)
    assert status.trial is not None
    assert status.trial.configuration == before.configuration
    assert status.trial.index == len(tuner.store.trials.of("job")) - 1
    assert status.result == before.result, "the last one, until there is another"
    assert status.progress.trials_measured == 0
    tuner.take_event("job", drift())
    assert tuner.status("job").round == 1, "a second report of the same change"


def test_a_round_that_was_opened_and_no_more_goes_on_at_the_next_report(tuner: Tuner) -> None:
    """Such as when the service died in between."""
    finished(tuner)
    kept = tuner.status("job").configuration
    assert tuner.store.jobs.open_round("job", 2e9)
    assert tuner.open_trial("job") is None
    tuner.take_event("job", drift())
    status = tuner.status("job")
    assert (status.state, status.round) == ("tuning", 1)
    assert present(status.trial).configuration == kept
    status = drive(tuner, "job", Ranks(1, noise=0.001))
    assert (status.state, status.round) == ("finished", 1)


def test_the_time_of_a_round_is_counted_from_its_beginning() -> None:
    now = 1000.0
    tuner = Tuner(Store("sqlite://"), clock=lambda: now)
    finished(tuner)
    now += 36_000.0
    tuner.take_event("job", drift())
    assert tuner.status("job").progress.elapsed_seconds == 0.0
    now += 7.0
    result = present(drive(tuner, "job", Ranks(1, noise=0.001)).result)
    assert result.seconds <= 7.0


def test_a_drift_of_a_job_that_is_tuned_changes_nothing(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    before = tuner.status("job")
    tuner.take_event("job", drift())
    assert tuner.status("job").model_copy(update={"progress": before.progress}) == before
    assert [event.kind for event in tuner.store.events.of("job")] == ["drift"]


def test_a_job_whose_training_ended_is_not_tuned_again(tuner: Tuner) -> None:
    finished(tuner)
    tuner.take_event("job", Event("ended"))
    tuner.take_event("job", drift())
    assert (tuner.status("job").round, tuner.status("job").trial) == (0, None)


def test_a_job_is_tuned_so_often_and_not_more_often(tuner: Tuner) -> None:
    finished(tuner, max_rounds=3)
    ranks = Ranks(1, noise=0.001)
    ranks.run({"bucket_bytes": 1, "hierarchical": "off"}, 10_000)
    for number in (1, 2, 2, 2):
        ranks.run({"bucket_bytes": 1, "hierarchical": "off"}, 10_000)
        (last,) = ranks.run({"bucket_bytes": 1, "hierarchical": "off"}, 1)
        tuner.take_event("job", drift(last[0]))
        assert drive(tuner, "job", ranks).round == number
        assert tuner.status("job").state == "finished"


@pytest.mark.parametrize(
    ("first", "last", "remaining"), [(0, 0, 1000), (50, 350, 700), (0, 999, 1), (0, 1200, 800)]
)
def test_what_remains_of_a_training_shrinks_as_it_runs(
    first: int, last: int, remaining: int
) -> None:
    """One that outlives what was expected of it may run as long again."""
    job = make_job(remaining_steps=1000)
    observed = [Steps(first, first, 1), Steps((first + last) // 2, last, 5)]
    assert as_of_now(Round(job, []), observed).remaining_steps == remaining
    assert as_of_now(Round(job, []), []).remaining_steps == 1000


@pytest.mark.parametrize(
    ("max_seconds", "searched", "summary", "code"),
    [
        (1e6, 8, "", "winner"),
        (40.0, 7, "; the search ended when BAGUA_AUTOTUNE_MAX_MINUTES was over", "winner"),
        (1.0, 1, "kept: only the default was measured before BAGUA_AUTOTUNE_MAX_MINUTES was over",
         "only_default"),
    ],
)  # fmt: skip
def test_when_its_time_is_over_a_search_ends_and_is_confirmed(
    max_seconds: float, searched: int, summary: str, code: str
) -> None:
    tuner = Tuner(Store("sqlite://"), clock=Clock())
    tuner.register("job", make_spec(limits={"max_seconds": max_seconds}))
    drive(tuner, "job", Ranks(noise=0.002))
    trials = tuner.store.trials.of("job")
    count = sum(trial.purpose == "search" for trial in trials)
    assert count >= searched if max_seconds > 100 else count == searched
    result = present(tuner.status("job").result)
    assert result.reason_code == code
    assert (code == "winner") == any(trial.purpose == "confirm" for trial in trials)
    assert summary in result.summary
    assert bool(summary) == ("BAGUA_AUTOTUNE_MAX_MINUTES" in result.summary)


def test_without_a_bound_of_its_own_a_round_ends_after_ten_minutes() -> None:
    """Of a noisy job whose trials take some 23 seconds each."""
    clock = Clock()
    tuner = Tuner(Store("sqlite://"), clock=clock)
    tuner.register("job", make_spec(limits={"max_samples": 500, "remaining_steps": 10**9}))
    ranks = Ranks(noise=0.3)
    while (trial := tuner.open_trial("job")) is not None:
        clock.now += 20.0
        steps = ranks.run(trial.configuration, 10)
        told = [Observation(step, tuple(seconds)) for step, seconds in steps]
        tuner.observe("job", trial.index, told)
    result = present(tuner.status("job").result)
    assert 400.0 < result.seconds <= 600.0 + 30.0, "the last trial is measured to its end"


def test_steps_of_half_a_minute_are_tuned_for_longer_than_ten_minutes() -> None:
    trials = [
        Trial(n, "search", BASELINE, "measured", started_at=120.0 * n, ended_at=120.0 * (n + 1))
        for n in range(8)
    ]
    long, short = (Round(make_job(), trials[:count]) for count in (8, 1))
    assert long.seconds == 960.0
    assert (long.most_seconds, long.search_seconds) == (2400.0, 1440.0)
    assert not long.has_searched_long
    assert not long.is_out_of_time
    assert short.most_seconds == 2400.0
    quick = [replace(t, started_at=2.0 * t.index, ended_at=2.0 * (t.index + 1)) for t in trials]
    assert Round(make_job(), quick).most_seconds == 600.0
    assert Round(make_job(), quick).search_seconds == 600.0 - 8 * 2.0
    given = Round(replace(make_job(), limits=Limits(max_seconds=10.0)), trials)
    assert given.most_seconds == 10.0, "a bound that is set holds for long steps, too"


def test_a_confirmation_ends_with_the_time_of_its_round() -> None:
    """With what it knows by then: the default, or a winner that is confirmed."""
    clock = Clock()
    tuner = Tuner(Store("sqlite://"), clock=clock)
    tuner.register("job", make_spec(limits={"max_seconds": 100.0}))
    ranks = Ranks(noise=0.05)
    while (trial := tuner.open_trial("job")) is not None:
        if trial.purpose == "confirm":
            clock.now += 100.0
        steps = ranks.run(trial.configuration, 10)
        tuner.observe("job", trial.index, [Observation(s, tuple(v)) for s, v in steps])
    trials = tuner.store.trials.of("job")
    assert sum(trial.purpose == "confirm" for trial in trials) == 1
    result = present(tuner.status("job").result)
    assert result.configuration == BASELINE
    assert "before BAGUA_AUTOTUNE_MAX_MINUTES was over" in result.summary


def test_a_default_that_was_kept_as_its_time_was_over_is_no_best_of_an_earlier_run() -> None:
    tuner = Tuner(Store("sqlite://"), clock=Clock())
    tuner.register("short", make_spec(limits={"max_seconds": 10.0}))
    drive(tuner, "short", Ranks(noise=0.002, step_seconds=lambda _: 0.2))
    result = present(tuner.status("short").result)
    assert "nothing was clearly faster before BAGUA_AUTOTUNE_MAX_MINUTES was over" in result.summary
    tuner.register("next", make_spec())
    inherited = tuner.store.jobs.get("next").inherited
    assert inherited is None or inherited.configuration is None


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        ([5], TRIAL_STEPS),
        ([5, 40, 60], TRIAL_STEPS),
        ([5, 40, 60, 88], 24),
        ([5, 5, 5, 5], 1),  # a client that numbers each trial's steps anew
    ],
)
def test_what_a_trial_takes_is_known_after_some_and_without_the_first(
    begins: list[int], expected: float
) -> None:
    """The first one's steps are those in which the job gets warm, too."""
    trials = [Trial(3 + place, "search", BASELINE, "measured") for place in range(len(begins))]
    observed = {3 + place: Steps(begin, begin + 9, 10) for place, begin in enumerate(begins)}
    assert trial_steps(trials, {1: Steps(0, 1, 2), **observed}) == expected


def test_listeners_are_told_of_a_round() -> None:
    told: list[tuple[str, int]] = []

    class Listener(TunerListener):
        def on_round(self, job: Job) -> None:
            told.append((job.id, job.round))

    tuner = Tuner(Store("sqlite://"), listeners=[Listener()])
    finished(tuner, max_rounds=2)
    tuner.take_event("job", drift())
    tuner.take_event("job", drift())
    assert [job_id for job_id, _ in told] == ["job"]
