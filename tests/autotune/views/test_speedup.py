"""The figures of tunings that are really made agree with one another, also while the machine
changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.overviews import JobOverview, Overviews
from bagua_autotune.views.speedup import step_pair
from tests.autotune.simulated_job import SimulatedJob
from tests.autotune.support import present
from tests.autotune.tuning.jobs import simulator
from tests.autotune.views.jobs import DEFAULT, FASTER, RESULT, job, reading, trial

SLOWED_FROM = 60


def steady(_step: int) -> float:
    return 1.0


def slower_later(step: int) -> float:
    """The machine becomes half as fast again in the middle of the search."""
    return 1.0 if step < SLOWED_FROM else 1.5


def ever_faster(step: int) -> float:
    return max(0.5, 1 - step / 250)


@cache
def tuned(machine: Callable[[int], float], gbit_per_second: float = 10) -> list[JobOverview]:
    """What is shown of a job after each of its steps in which something new was decided."""
    tuner = Tuner(Store("sqlite://"))
    overviews = Overviews(tuner.store)
    of = simulator(gbit_per_second=gbit_per_second)
    made = SimulatedJob(tuner, of, "job", seed=3, noise=0.01, disturbed=machine)
    shown = [overviews.overview("job")]
    while not made.is_finished and made.step < 3000:
        made.run(1)
        if len(tuner.store.trials.of("job")) > len(shown[-1].trials):
            shown.append(overviews.overview("job"))
    assert made.is_finished
    return [*shown, overviews.overview("job")]


MACHINES = [steady, slower_later, ever_faster]


@pytest.mark.parametrize("machine", MACHINES)
def test_all_figures_that_are_shown_of_a_job_while_it_is_tuned_agree(
    machine: Callable[[int], float],
) -> None:
    """Step times, speed-up, and the limit that was set."""
    compared = 0
    for overview in tuned(machine):
        figures, progress = overview.job.figures, overview.job.progress
        assert progress.max_trials == overview.limits.max_samples == 60
        assert progress.search_trials <= progress.max_trials
        assert progress.confirming_trials <= progress.max_confirming_trials
        kinds = progress.search_trials + progress.confirming_trials
        assert kinds == len(overview.trials)
        if overview.job.state == "tuning":
            assert f"trial {progress.search_trials} of at most 60" in overview.job.headline
        if figures.speedup is None:
            continue
        ratio = present(figures.baseline_seconds) / present(figures.incumbent_seconds)
        assert ratio == pytest.approx(figures.speedup)
        assert progress.speedup == figures.speedup
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("machine", MACHINES)
def test_a_finished_job_has_one_speed_up_and_says_whether_the_machine_changed(
    machine: Callable[[int], float],
) -> None:
    overview = tuned(machine)[-1]
    found, result = overview.job, present(overview.job.result)
    assert found.state == "finished"
    assert found.progress.speedup == found.figures.speedup == result.speedup
    assert found.figures.cost_steps == pytest.approx(result.cost_steps)
    assert found.progress.trials_measured == result.trials
    own = [t for t in overview.trials if t.configuration == overview.default_configuration]
    assert len(own) > 1
    assert {trial.speedup for trial in own} == {1.0}, "the default's own"
    has_changed = machine is not steady
    assert overview.machine_change.startswith("The machine itself changed") == has_changed
    assert overview.machine_change in overview.why


def test_what_was_confirmed_last_is_the_best_while_it_is_confirmed() -> None:
    """And not what an earlier, faster machine measured."""
    for overview in tuned(slower_later):
        confirming = [t for t in overview.trials if t.purpose == "confirm"]
        default = overview.default_configuration
        candidates = [t.words for t in confirming if t.configuration != default]
        if overview.job.state == "confirming" and candidates:
            best = [trial.words for trial in overview.trials if trial.is_best]
            assert best == candidates[-1:]


def test_a_result_s_times_lie_around_what_its_confirmation_measured() -> None:
    """790 and 679 ms are 1.16x; blocks of an earlier time, on another machine, do not count."""
    search = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2)]
    seconds = [0.679, 0.79, 0.79, 0.679]
    sides = [FASTER, DEFAULT, DEFAULT, FASTER]
    blocks = [
        trial(index, side, value, purpose="confirm")
        for index, (side, value) in enumerate(zip(sides, seconds, strict=True), start=2)
    ]
    found = reading(job("finished", RESULT), [*search, *blocks])
    before, after = step_pair(found)
    assert before is not None
    assert after is not None
    assert before / after == pytest.approx(RESULT.speedup)
    assert before * after == pytest.approx(0.79 * 0.679)
