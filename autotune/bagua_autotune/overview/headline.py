"""A job in one sentence: is it tuning or done, how much faster is it, how sure is that."""

from __future__ import annotations

from bagua_autotune.model.job import Job
from bagua_autotune.model.text import clean, describe, describe_left, describe_speedup
from bagua_autotune.overview.best import is_settled
from bagua_autotune.overview.figures import Figures
from bagua_autotune.overview.reading import Reading
from bagua_autotune.tuning.status import Progress


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
        return f"Ended while it was tuned again; before that: {outcome}"
    so_far = _so_far(job, progress, figures)
    if job.phase == "ended":
        return ", ".join(["Ended before the tuning did", *so_far])
    word = "Confirming" if job.phase == "confirming" else "Tuning"
    again = " again" if job.round else ""
    pace = _pace(max(1, len(reading.round)), progress)
    return f"{word}{again}: " + ", ".join([*(so_far or ["measuring the default"]), *pace])


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
