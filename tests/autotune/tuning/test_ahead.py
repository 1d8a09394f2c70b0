"""What follows a trial is chosen while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Ranks, make_spec, present

STEPS_OF_A_TRIAL = 3
"""One is reported by itself, two come late."""


class Job:
    """Ranks that make one step before they report, and two more until they have switched."""

    def __init__(self, **spec: Any) -> None:
        self.tuner = Tuner(Store("sqlite://"))
        self.tuner.register("job", make_spec(**spec))
        self.ranks = Ranks(noise=0.002)

    @property
    def trials(self) -> list[Trial]:
        return self.tuner.store.trials.of("job")

    def steps(self, trial: Trial, count: int) -> list[Observation]:
        made = self.ranks.run(trial.configuration, count)
        return [Observation(step, tuple(seconds)) for step, seconds in made]

    def measure_default(self) -> None:
        while len(self.trials) < 2:
            self.tuner.observe("job", 0, self.steps(self.trials[0], 1))

    def measure(self, running: Trial) -> None:
        """Until it is known what follows."""
        while len(self.trials) == running.index + 1:
            assert self.tuner.open_trial("job"), "the tuning has ended"
            self.tuner.observe("job", running.index, self.steps(running, 1))

    def switch(self) -> Trial:
        """The ranks go on to the open trial, and tell the last steps of the one before."""
        before, now = self.trials[-2:]
        self.tuner.observe("job", before.index, self.steps(before, 2))
        self.tuner.take_event("job", Event("switched", now.index, self.ranks.step))
        return self.trials[now.index]


def test_ranks_are_told_what_follows_before_their_first_step_of_a_trial() -> None:
    job = Job()
    job.measure_default()
    for _ in range(4):
        running = job.switch()
        assert job.trials[-1].index == running.index + 1
        assert job.tuner.open_trial("job") == job.trials[-1]
        assert job.trials[-1].configuration != running.configuration
        state = job.tuner.observe("job", running.index, job.steps(running, 1))
        assert present(state.trial).index == running.index + 1
        assert job.trials[running.index].state == "running"
    left = job.trials[1:4]
    assert [trial.state for trial in left] == ["measured"] * 3
    assert all(trial.estimate and trial.estimate.count == STEPS_OF_A_TRIAL for trial in left)


def test_last_steps_that_come_after_the_next_trial_has_begun_count_too() -> None:
    """As GPUs tell them: what follows the next trial is chosen before they come."""
    job = Job()
    job.measure_default()
    for _ in range(5):
        before, running = job.trials[-2:]
        job.tuner.take_event("job", Event("switched", running.index, job.ranks.step))
        job.tuner.observe("job", before.index, job.steps(before, 2))
        job.tuner.observe("job", running.index, job.steps(running, 1))
    known = job.trials[1:-3]
    assert len(known) == 3
    assert all(trial.estimate and trial.estimate.count == STEPS_OF_A_TRIAL for trial in known)


def test_the_default_is_measured_before_anything_follows_it() -> None:
    job = Job()
    job.tuner.take_event("job", Event("switched", 0, 1))
    job.tuner.observe("job", 0, job.steps(job.trials[0], 2))
    assert len(job.trials) == 1


def narrow_job(values: Sequence[str] = ("as_is", "bf16"), knob: str = "wire_precision") -> Job:
    """A job where all but the first of these values are faster, and change the numbers."""
    job = Job(
        knobs={
            "bucket_bytes": {"type": "log_integer", "low": 1 << 20, "high": 32 << 20},
            knob: {"type": "categorical", "values": values},
        },
        default_configuration={"bucket_bytes": 25 << 20, knob: values[0]},
    )
    seconds = {value: 0.2 - 0.02 * place for place, value in enumerate(values)}
    job.ranks = Ranks(noise=0.002, step_seconds=lambda c: seconds[c[knob]])
    job.measure_default()
    return job


def change(trial: Trial) -> Any:
    return list(trial.configuration.values())[1]


def run_until(job: Job, reached: Callable[[Trial], bool]) -> Trial:
    """The trial that then runs, of which only the switch was told."""
    running = job.switch()
    while not reached(running):
        job.measure(running)
        running = job.switch()
    return running


def is_ahead_of(job: Job, running: Trial) -> bool:
    return len(job.trials) > running.index + 1


def test_the_first_trial_with_each_change_of_the_numbers_is_measured_by_itself() -> None:
    job = narrow_job(("as_is", "bf16", "fp16"))
    judged, was_ahead = {"as_is"}, []
    for _ in range(5):
        running = run_until(job, lambda running: change(running) != "as_is")
        was_ahead.append(is_ahead_of(job, running))
        if was_ahead[-1]:
            assert {change(running), change(job.trials[-1])} <= judged
        job.measure(running)
        judged.add(change(running))
    assert judged == {"as_is", "bf16", "fp16"}
    assert sum(was_ahead) > 2


def test_nothing_follows_ranks_that_do_not_wait_for_each_other_before_they_are_measured() -> None:
    for algorithm, waits in (("async", False), ("bytegrad", True)):
        job = narrow_job(("gradient_allreduce", algorithm), "algorithm")
        first = run_until(job, lambda running: change(running) != "gradient_allreduce")
        assert not is_ahead_of(job, first), "measured by itself in any case"
        job.measure(first)
        again = run_until(job, lambda running: change(running) != "gradient_allreduce")
        assert change(again) == algorithm
        assert is_ahead_of(job, again) == waits


def harmed(job: Job, trial: Trial) -> list[Trial]:
    """The ranks tell that it harmed the training; the trials by then."""
    job.tuner.take_event("job", Event("diverged", trial.index, job.ranks.step, "it diverged"))
    return job.trials


def test_what_would_do_the_same_harm_is_given_up_with_the_harmful() -> None:
    job = narrow_job()
    running = run_until(job, lambda _: all(change(trial) == "bf16" for trial in job.trials[-2:]))
    following = job.trials[-1]
    assert is_ahead_of(job, running)
    trials = harmed(job, running)
    narrow = [trial for trial in trials if change(trial) == "bf16"]
    assert narrow[-1] == trials[following.index]
    assert {trial.state for trial in narrow} == {"failed"}
    assert f"(in trial {running.index})" in str(narrow[-1].failure)
    best = job.tuner.status("job").progress.incumbent
    assert best is None or best["wire_precision"] == "as_is"


def test_harm_is_believed_of_a_trial_that_seemed_to_be_measured() -> None:
    job = narrow_job()
    first = run_until(job, lambda running: change(running) == "bf16")
    while len(job.trials) == first.index + 1:
        job.tuner.observe("job", first.index, job.steps(first, 1))
    assert job.trials[first.index].state == "measured"
    trials = harmed(job, first)
    assert {trial.state for trial in trials if change(trial) == "bf16"} == {"failed"}
    assert harmed(job, first) == trials  # told again


@pytest.mark.parametrize("kind", ["disagreement", "diverged"])
def test_a_trial_that_fails_when_its_successor_is_known_is_given_up_alone(kind: Any) -> None:
    job = Job()
    job.measure_default()
    running = job.switch()
    job.tuner.take_event("job", Event(kind, running.index, job.ranks.step, "it went wrong"))
    *_, failed, following = job.trials
    assert (failed.index, failed.state) == (running.index, "failed")
    assert job.tuner.open_trial("job") == following


def test_a_service_that_comes_back_goes_on_with_a_trial_that_was_left() -> None:
    job = Job()
    job.measure_default()
    running = job.switch()
    job.tuner = Tuner(job.tuner.store)
    job.tuner.observe("job", running.index, job.steps(running, 1))
    following = job.switch()
    assert job.trials[running.index].state == "measured"
    estimate = present(job.trials[running.index].estimate)
    assert math.isfinite(estimate.center)
    assert job.tuner.open_trial("job") != following


def test_what_a_confirmation_begins_with_is_visited_while_the_last_trial_is_read() -> None:
    job = Job()
    job.measure_default()
    default = job.trials[0].configuration
    running = job.switch()
    for _ in range(30):
        following = job.trials[-1]
        if following.index == running.index + 1 and following.configuration == default:
            break
        job.measure(running)
        running = job.switch()
    assert following.configuration == default != running.configuration
    assert following.purpose == "search", "it goes on if what runs turns out otherwise"
    assert job.trials[running.index].state == "running"


def test_as_many_samples_as_allowed_are_searched() -> None:
    job = Job(limits={"max_samples": 4})
    job.measure_default()
    while (running := job.switch()).purpose == "search":
        job.measure(running)
    assert sum(trial.purpose == "search" for trial in job.trials) <= 4
