"""The trials of a job, each with how fast it was."""

from __future__ import annotations

import pytest

from bagua_autotune.views.trials import shown_trials, trial_views
from tests.autotune.views.jobs import (
    DEFAULT,
    FASTER,
    HIDDEN,
    RESULT,
    SLOWER,
    job,
    reading,
    trial,
)


def test_a_trial_is_compared_with_the_default_measured_beside_it() -> None:
    """The machine became four times as slow; in the middle of that the default takes 0.4 s."""
    first = [trial(0, DEFAULT, 0.2), trial(1, FASTER, 0.15), trial(2, DEFAULT, 0.8)]
    second = [trial(3, DEFAULT, 0.3, round=1), trial(4, FASTER, 0.1, round=1), trial(5, SLOWER)]
    found = trial_views(job(round=1), [*first, *second], {})
    assert [view.speedup for view in found] == [
        1.0, pytest.approx(8 / 3), 1.0, 1.0, pytest.approx(3), None,
    ]  # fmt: skip
    assert [view.seconds for view in found][3:] == [pytest.approx(0.3), pytest.approx(0.1), None]


def test_the_best_is_the_first_trial_of_what_was_kept() -> None:
    measured = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.25), trial(2, FASTER, 0.2)]
    found = shown_trials(reading(job("finished", RESULT), measured))
    assert [(view.index, view.words) for view in found if view.is_best] == [
        (1, "bucket 1 MiB, hierarchical")
    ]


def test_a_trial_above_the_ceiling_is_noise_unless_the_result_is_above_it_too() -> None:
    measured = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.25), trial(2, SLOWER, 0.29)]
    found = shown_trials(reading(job(), measured, ceiling=HIDDEN))
    assert [view.is_noise for view in found] == [False, True, False]
    assert [view.speedup for view in found] == [1.0, None, pytest.approx(0.3 / 0.29)]
    confirmed = reading(job("finished", RESULT), measured, ceiling=HIDDEN)
    assert not any(view.is_noise for view in shown_trials(confirmed)), "computing became faster"
