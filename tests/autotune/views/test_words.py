"""What people read: the headline, why, and what to paste."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bagua_autotune.model.job import Job, Result, Trial
from bagua_autotune.tuning.status import job_state
from bagua_autotune.views.speedup import make_figures
from bagua_autotune.views.words import explain, make_headline
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

KEPT = replace(
    RESULT,
    configuration=DEFAULT,
    kept="baseline",
    reason="nothing was clearly faster",
    reason_code="nothing_faster",
)
TRIED = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.25), trial(2, SLOWER)]
CONFIRMED = [*TRIED[:2], trial(2, FASTER, 0.25, purpose="confirm")]


def headline(of: Job, trials: list[Trial]) -> str:
    found = reading(of, trials)
    return make_headline(found, job_state(of, trials), make_figures(found, []))


def why(of: Job, trials: list[Trial], exposed: dict[int, float] | None = None) -> str:
    found = reading(of, trials)
    return explain(found, make_figures(found, []), exposed or {})


AGAIN = [*CONFIRMED, trial(3, FASTER, round=1)]


@pytest.mark.parametrize(
    ("of", "trials", "words"),
    [
        (job(), [], "Tuning: measuring the default, trial 1 of at most 60"),
        (job(), [trial(0, DEFAULT)], "Tuning: measuring the default, trial 1 of at most 60"),
        (
            job(),
            TRIED,
            "Tuning: 1.20x (1.18 to 1.22) so far, not confirmed, trial 3 of at most 60, ",
        ),
        (
            job(),
            [trial(0, DEFAULT, 0.3), trial(1, SLOWER)],
            "Tuning: nothing faster than the default",
        ),
        (
            job("confirming"),
            CONFIRMED,
            "Confirming: 1.20x (1.18 to 1.22) so far, not confirmed, confi",
        ),
        (
            job("finished", RESULT),
            CONFIRMED,
            "Tuned: 1.56x (1.51 to 1.60) with bucket 1 MiB, hierarc",
        ),
        (job("finished", KEPT), TRIED[:2], "Tuned: the default stays, nothing was clearly faster"),
        (job("finished", replace(KEPT, reason="")), TRIED[:2], "Tuned: the default stays"),
        (job("ended"), [trial(0, DEFAULT)], "The training ended before its tuning did"),
        (
            job("lost"),
            [trial(0, DEFAULT)],
            "The training was lost before its tuning ended; its tuning ",
        ),
        (
            job("ended"),
            TRIED,
            "The training ended before its tuning did, 1.20x (1.18 to 1.22) so far, ",
        ),
        (
            job("tuning", RESULT, round=1),
            AGAIN,
            "Tuning again: measuring the default, trial 1 of at ",
        ),
        (
            job("ended", RESULT, round=1),
            AGAIN,
            "The training ended while it was being tuned again; befo",
        ),
    ],
)
def test_the_headline_says_whether_it_is_done_and_how_much_faster(
    of: Job, trials: list[Trial], words: str
) -> None:
    said = headline(of, trials)
    assert said.startswith(words)
    assert said[-1].isalnum()


def test_a_trial_of_a_single_value_has_no_interval() -> None:
    trials = [trial(0, DEFAULT, 0.3, count=1), trial(1, FASTER, 0.25, count=1)]
    assert headline(job(), trials).startswith("Tuning: 1.20x so far, not confirmed, ")


def test_values_that_are_alike_do_not_tell_how_sure_they_are() -> None:
    sure = [replace(t, estimate=replace(t.estimate, standard_error=0.0)) for t in TRIED[:2]]  # type: ignore[type-var]
    assert headline(job(), sure).startswith("Tuning: 1.20x so far, not confirmed, ")
    alike = job("finished", replace(RESULT, low=1.56, high=1.56))
    assert headline(alike, sure) == "Tuned: 1.56x with bucket 1 MiB, hierarchical"
    figures = make_figures(reading(alike, sure), [])
    assert (figures.speedup, figures.speedup_low, figures.speedup_high) == (1.56, None, None)
    kept = make_figures(reading(job("finished", replace(KEPT, speedup=1, low=1, high=1)), sure), [])
    assert (kept.speedup, kept.speedup_low, kept.speedup_high) == (1, 1, 1)


def test_the_ranks_reason_cannot_command_a_terminal() -> None:
    hostile = replace(KEPT, reason="the ranks disagreed: \x1b[31m")
    assert "\x1b" not in headline(job("finished", hostile), TRIED[:2])
    assert "\x1b" not in why(job("finished", hostile), TRIED[:2])


TOO_FEW = replace(KEPT, reason="too few steps remain to make up for a search")


@pytest.mark.parametrize(
    ("result", "trials", "exposed", "words"),
    [
        (None, [trial(0, DEFAULT)], {}, ["Nothing is measured yet: the default comes first."]),
        (
            None, TRIED, {0: 0.12, 1: 0.04},
            ["Of 2 configurations, bucket 1 MiB, hierarchical is the fastest so far, not conf",
             ": 250 ms a step, the default 300 ms. ", "40 ms of a step, and 120 ms of the de"],
        ),
        (
            None, [trial(0, DEFAULT, 0.3), trial(1, SLOWER, 0.4)], {0: 0.12},
            ["Of 2 configurations, the default is the fastest so far. ", "120 ms of the default"],
        ),
        (
            RESULT, CONFIRMED, {},
            ["Of 2 configurations, bucket 1 MiB, hierarchical was the fastest; when it and the",
             "1.56x (1.51 to 1.60) as fast: 219 ms a step, the default 342 ms."],
        ),
        (
            RESULT, TRIED[:2], {},
            ["It was the best in an earlier run, and measured beside the default it is again "
             "the best, 1.56x (1.51 to 1.60) as fast: 219 ms a step, the default 342 ms."],
        ),
        (TOO_FEW, [], {}, [f"The default stays: {TOO_FEW.reason}; 0 configurations measured."]),
        (
            KEPT, TRIED[:2], {},
            ["The default stays: nothing was clearly faster; 2 configurations measured. The be",
             "1.20x (1.18 to 1.22) as fast as the default, which was measured in trial 0 alone"],
        ),
    ],
)  # fmt: skip
def test_why_names_what_was_compared(
    result: Result | None, trials: list[Trial], exposed: dict[int, float], words: list[str]
) -> None:
    said = why(job("finished" if result else "tuning", result), trials, exposed)
    assert said.startswith(words[0])
    assert all(each in said for each in words)
    assert said.endswith(".")


def test_a_confirmation_that_confirmed_nothing_says_what_it_measured() -> None:
    """Not what the search saw of an earlier, faster machine: 141 ms, and 205 ms of the default."""
    trials = [trial(0, DEFAULT, 0.15), trial(1, FASTER, 0.141)]
    for side in (FASTER, DEFAULT, DEFAULT, FASTER) * 3:
        trials.append(trial(len(trials), side, 0.205, purpose="confirm"))
    found = why(job("finished", KEPT), trials)
    measured = re.search(r"hierarchical, was (\d\.\d\d)x .* when both were measured again", found)
    assert measured, found
    assert float(measured[1]) == pytest.approx(1, abs=0.05)
    assert "The machine itself changed during the tuning" in found
    assert "141 ms" not in found


def test_what_is_said_of_a_result_is_of_its_own_round() -> None:
    """Round 1 was tuned again, on a machine of half the speed, when the training ended."""
    second = [trial(3, FASTER, 0.5, round=1), trial(4, DEFAULT, 0.6, round=1)]
    ended = job("ended", RESULT, round=1)
    said = why(ended, [*CONFIRMED, *second])
    assert said.startswith("The training ended while it was being tuned again; before that: Of 2 ")
    assert said.endswith("1.56x (1.51 to 1.60) as fast: 219 ms a step, the default 342 ms.")
    found = make_figures(reading(ended, [*CONFIRMED, *second]), [])
    before = make_figures(reading(job("finished", RESULT), CONFIRMED), [])
    for figure in ("baseline_seconds", "incumbent_seconds", "search_steps", "cost_seconds"):
        assert getattr(found, figure) == getattr(before, figure)
    again = make_figures(reading(job("tuning", RESULT, round=1), [*CONFIRMED, *second]), [])
    assert again.baseline_seconds == pytest.approx(0.6)
    assert again.speedup == pytest.approx(1.2)


def test_what_communication_leaves_to_be_gained_stands_beside_the_speed_up() -> None:
    """A job that waits for 57 of 921 ms can be 1.07x as fast; the rest was a neighbour's doing."""
    little = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.29)]
    found = reading(job(), little, ceiling=HIDDEN)
    figures = make_figures(found, [])
    assert (round(figures.ceiling or 0, 3), figures.is_noise) == (1.066, False)
    assert figures.default_exposed_seconds == 0.057
    so_far = "Tuning: 1.03x (1.02 to 1.05) of at most 1.07x so far, not confirmed, trial 2"
    assert make_headline(found, job_state(job(), little), figures).startswith(so_far)

    lucky = reading(job(), TRIED, ceiling=HIDDEN)
    figures = make_figures(lucky, [])
    assert figures.is_noise
    assert figures.payback_steps is None, "it earns nothing"
    assert (figures.speedup, figures.speedup_high) == (None, None), "no figure above the ceiling"
    so_far = "Tuning: what seems faster so far is noise: at most 1.07x is possible, trial"
    state = job_state(job(), TRIED, HIDDEN)
    assert make_headline(lucky, state, figures).startswith(so_far)
    assert state.progress.speedup is None, "nor on the console"
    assert explain(lucky, figures, {0: 0.057, 1: 0.01}).endswith(
        "Communication that computing does not hide takes 10 ms of a step, and 57 ms of the "
        "default's, which took 921 ms: without it a step would be at most 1.07x as fast, and what "
        "seems faster is noise."
    )


def test_a_result_above_the_ceiling_says_that_computing_became_faster() -> None:
    found = reading(job("finished", RESULT), CONFIRMED, ceiling=HIDDEN)
    figures = make_figures(found, [])
    assert not figures.is_noise, "it was confirmed"
    assert figures.ceiling is None
    assert headline(job("finished", RESULT), CONFIRMED) == (
        make_headline(found, job_state(job("finished", RESULT), CONFIRMED), figures)
    )
    assert explain(found, figures, {0: 0.057, 1: 0.01}).endswith(
        "and 57 ms of the default's: more was gained than that, so computing itself takes less "
        "time, too."
    )
