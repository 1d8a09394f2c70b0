"""What follows a trial is chosen while it runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Ranks, make_spec

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
        return self.tuner.store.trials("job")

    def steps(self, trial: Trial, count: int) -> list[Observation]:
        made = self.ranks.run(trial.configuration, count)
        return [Observation(step, tuple(seconds)) for step, seconds in made]

    def measure_default(self) -> None:
        while len(self.trials) < 2:
            self.tuner.observe("job", 0, self.steps(self.trials[0], 1))

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
        assert state.trial is not None
        assert state.trial.index == running.index + 1
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


PRECISIONS: dict[str, Any] = {
    "knobs": {
        "bucket_bytes": {"type": "log_integer", "low": 1 << 20, "high": 32 << 20},
        "wire_precision": {"type": "categorical", "values": ["as_is", "bf16"]},
    },
    "default_configuration": {"bucket_bytes": 25 << 20, "wire_precision": "as_is"},
}


def narrow_job() -> Job:
    """A job where bf16 is faster, and has not been measured before."""
    job = Job(**PRECISIONS)
    job.ranks = Ranks(
        noise=0.002, step_seconds=lambda c: 0.1 if c["wire_precision"] == "bf16" else 0.2
    )
    job.measure_default()
    return job


def test_what_changes_the_numbers_is_judged_before_anything_follows_it_once() -> None:
    job, is_ahead = narrow_job(), []
    while len(is_ahead) < 4:
        running = job.switch()
        if is_narrow(running):
            is_ahead.append(len(job.trials) > running.index + 1)
        while len(job.trials) == running.index + 1:
            job.tuner.observe("job", running.index, job.steps(running, 1))
    assert is_ahead == [False, True, True, True]


def is_narrow(trial: Trial) -> bool:
    return trial.configuration["wire_precision"] == "bf16"


def test_what_is_to_follow_and_would_do_the_same_harm_is_given_up_with_the_harmful() -> None:
    job = narrow_job()
    while not (is_narrow(job.trials[-2]) and job.trials[-2].is_open and is_narrow(job.trials[-1])):
        running = job.switch()
        while len(job.trials) == running.index + 1:
            job.tuner.observe("job", running.index, job.steps(running, 1))
    running, following = job.trials[-2:]
    job.tuner.take_event("job", Event("diverged", running.index, job.ranks.step, "it diverged"))
    given_up = job.trials[running.index : following.index + 1]
    assert [trial.state for trial in given_up] == ["failed", "failed"]
    assert not any(is_narrow(trial) for trial in job.trials[following.index + 1 :])


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
    estimate = job.trials[running.index].estimate
    assert estimate is not None
    assert math.isfinite(estimate.center)
    assert job.tuner.open_trial("job") != following
