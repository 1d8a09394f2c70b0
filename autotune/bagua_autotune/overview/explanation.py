"""Why a job runs what it runs: a sentence or two, of nothing but what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.model.text import clean, describe, describe_seconds, describe_speedup
from bagua_autotune.overview.best import best_trial, is_settled
from bagua_autotune.overview.figures import Figures
from bagua_autotune.overview.reading import Reading
from bagua_autotune.tuning.decision import NOTHING_FASTER
from bagua_autotune.tuning.standing import best as best_of
from bagua_autotune.tuning.standing import standing


def explain(reading: Reading, figures: Figures, exposed_seconds: Mapping[int, float]) -> str:
    """What was compared, by how much it differs, and what communication is hidden.

    Args:
        exposed_seconds: communication that computing does not hide, per step, by trial index;
            of the best trial and of the baseline's, where it is known.
    """
    job = reading.job
    best = best_trial(job, reading.trials)
    if job.result and is_settled(job):
        again = "Ended while it was tuned again; before that: " if job.phase == "ended" else ""
        sentences = [again + _result(reading)]
    elif best is None:
        sentences = ["Nothing is measured yet: the default comes first."]
    else:
        sentences = [_so_far(reading, best, figures)]
    hidden = _hidden(reading, best, exposed_seconds) if best else ""
    return " ".join(filter(None, [*sentences, hidden]))


def _result(reading: Reading) -> str:
    job = reading.job
    result = job.result
    assert result is not None  # it is settled
    tried = _configurations(reading)
    if result.kept == "baseline":
        reason = clean(result.reason) or "nothing was faster beyond doubt"
        return f"The default stays: {reason}; {tried} measured{_closest(reading)}."
    words = describe(result.configuration)
    times = describe_speedup(result.speedup, result.low, result.high)
    if any(trial.purpose == "confirm" and trial.estimate for trial in reading.shown):
        return (
            f"Of {tried}, {words} was the fastest; measured again in turns with the default it "
            f"was {times} as fast."
        )
    return (
        f"It was the best of an earlier run, and measured beside the default it still is: {times}."
    )


def _closest(reading: Reading) -> str:
    """What came closest to the default, where that was what decided."""
    job, trials = reading.job, reading.shown
    others = best_of(job, [trial for trial in trials if trial.configuration != job.baseline])
    default = standing(trials, job.baseline)
    is_decided = job.result is not None and job.result.reason == NOTHING_FASTER
    if others is None or default is None or not is_decided:
        return ""
    words = f", the best of the others {describe(others.configuration)}"
    own, other = _seconds(reading, default), _seconds(reading, others.estimate)
    if own is None or other is None:
        return words
    return f"{words}: {describe_seconds(other)} a step, the default {describe_seconds(own)}"


def _seconds(reading: Reading, found: Estimate) -> float | None:
    return reading.objective.seconds(found.center)


def _so_far(reading: Reading, best: Trial, figures: Figures) -> str:
    if best.configuration == reading.job.baseline:
        return f"Of {_configurations(reading)}, the default is the fastest so far."
    times = ""
    if figures.incumbent_seconds is not None and figures.baseline_seconds is not None:
        times = (
            f": {describe_seconds(figures.incumbent_seconds)} a step, "
            f"the default {describe_seconds(figures.baseline_seconds)}"
        )
    words = describe(best.configuration)
    return (
        f"Of {_configurations(reading)}, {words} is the fastest so far, not confirmed yet{times}."
    )


def _configurations(reading: Reading) -> str:
    count = len({trial.configuration for trial in reading.shown if trial.estimate})
    return f"{count} configuration" + ("" if count == 1 else "s")


def _hidden(reading: Reading, best: Trial, exposed_seconds: Mapping[int, float]) -> str:
    """How much of a step is spent waiting for communication."""
    baseline = baseline_trial(reading.job, reading.shown)
    own = exposed_seconds.get(best.index)
    default = exposed_seconds.get(baseline.index) if baseline else None
    if own is None:
        return ""
    text = f"Communication that computing does not hide takes {describe_seconds(own)} of a step"
    if default is None or (baseline and baseline.index == best.index):
        return f"{text}."
    return f"{text}, under the default {describe_seconds(default)}."


def baseline_trial(job: Job, trials: list[Trial]) -> Trial | None:
    """The first measured trial of the default."""
    return next((t for t in trials if t.configuration == job.baseline and t.estimate), None)
