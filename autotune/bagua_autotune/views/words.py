"""A job in words: in one sentence, why it runs what it runs, and as Python for stock DDP."""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.model.job import CUT_SHORT, Job, Trial
from bagua_autotune.model.knobs import BUCKET_KNOB, Value
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.model.text import (
    clean,
    describe,
    describe_count,
    describe_left,
    describe_seconds,
    describe_speedup,
)
from bagua_autotune.tuning.decision import NOTHING_FASTER
from bagua_autotune.tuning.standing import best as best_of
from bagua_autotune.tuning.standing import best_trial, is_settled, standing
from bagua_autotune.tuning.status import Progress
from bagua_autotune.views.figures import Figures
from bagua_autotune.views.reading import Reading

ENDED_EARLY = "Ended before the tuning did"
LOST_EARLY = "Lost before the tuning ended; it goes on when the training does"


def make_headline(reading: Reading, progress: Progress, figures: Figures) -> str:
    """For example ``Tuned: 1.56x (1.51 to 1.60) with bucket 1 MiB, hierarchical``."""
    job = reading.job
    result = job.result
    if result and is_settled(job):
        if result.kept == "winner":
            times = describe_speedup(result.speedup, result.low, result.high)
            outcome = f"{times} with {describe(result.configuration)}"
        else:
            outcome = ", ".join(["the default stays", *filter(None, [clean(result.reason)])])
        if job.phase == "finished":
            return f"Tuned: {outcome}"
        return f"{_end(job)} while it was tuned again; before that: {outcome}"
    so_far = _so_far(job, progress, figures)
    if job.phase in CUT_SHORT:
        return ", ".join([LOST_EARLY if job.phase == "lost" else ENDED_EARLY, *so_far])
    word = "Confirming" if job.phase == "confirming" else "Tuning"
    again = " again" if job.round else ""
    pace = _pace(max(1, len(reading.round)), progress)
    return f"{word}{again}: " + ", ".join([*(so_far or ["measuring the default"]), *pace])


def _end(job: Job) -> str:
    return "Lost" if job.phase == "lost" else "Ended"


def _so_far(job: Job, progress: Progress, figures: Figures) -> list[str]:
    if figures.speedup is None:
        return []
    if progress.incumbent == job.baseline:
        return ["nothing faster than the default so far"]
    times = describe_speedup(figures.speedup, figures.speedup_low, figures.speedup_high)
    return [f"{times} so far, not confirmed"]


def _pace(trials: int, progress: Progress) -> list[str]:
    """``trial 7 of at most 68``, ``at most 80 s left``."""
    pace = [f"trial {trials} of at most {progress.max_trials}"]
    if progress.seconds_left is not None:
        pace.append(describe_left(progress.seconds_left))
    return pace


def explain(reading: Reading, figures: Figures, exposed_seconds: Mapping[int, float]) -> str:
    """What was compared, by how much it differs, and what communication is hidden.

    Args:
        exposed_seconds: communication that computing does not hide, per step, by trial index;
            of the best trial and of the baseline's, where it is known.
    """
    job = reading.job
    best = best_trial(job, reading.trials)
    if job.result and is_settled(job):
        is_cut = job.phase in CUT_SHORT
        again = f"{_end(job)} while it was tuned again; before that: " if is_cut else ""
        sentences = [again + _result(reading)]
    elif best is None:
        sentences = ["Nothing is measured yet: the default comes first."]
    else:
        sentences = [_fastest_so_far(reading, best, figures)]
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
    is_decided = job.result is not None and job.result.reason.startswith(NOTHING_FASTER)
    if others is None or default is None or not is_decided:
        return ""
    words = f", the best of the others {describe(others.configuration)}"
    own, other = _seconds(reading, default), _seconds(reading, others.estimate)
    if own is None or other is None:
        return words
    return f"{words}: {describe_seconds(other)} a step, the default {describe_seconds(own)}"


def _seconds(reading: Reading, found: Estimate) -> float | None:
    return reading.objective.seconds(found.center)


def _fastest_so_far(reading: Reading, best: Trial, figures: Figures) -> str:
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
    measured = {trial.configuration for trial in reading.shown if trial.estimate}
    return describe_count(len(measured), "configuration")


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


DEFAULT_BYTES = 25 * 1024**2


def _call(configuration: Mapping[str, Value]) -> str:
    """The call, without what stock DDP cannot do."""
    size = configuration.get(BUCKET_KNOB)
    # DDP counts in units of 2**20 bytes and takes fractions.
    megabytes = (size if isinstance(size, int) else DEFAULT_BYTES) / 1024**2
    return f"DistributedDataParallel(model, bucket_cap_mb={megabytes:.4g})"


def _missing(configuration: Mapping[str, Value]) -> str:
    """What stock DDP cannot do, in words; empty if it can do all."""
    return describe({k: v for k, v in configuration.items() if k != BUCKET_KNOB and v != "off"})


def stock_ddp_line(configuration: Mapping[str, Value]) -> str:
    """The result for PyTorch's own class in one line; what that cannot do is a comment."""
    without = _missing(configuration)
    return f"{_call(configuration)}  # without: {without}" if without else _call(configuration)


def stock_ddp_snippet(configuration: Mapping[str, Value]) -> str:
    """The same in several lines, ready to paste."""
    without = _missing(configuration)
    comment = [f"# Stock DDP cannot do the rest: {without}."] if without else []
    lines = [
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        *comment,
        f"model = {_call(configuration)}",
    ]
    return "\n".join(lines)
