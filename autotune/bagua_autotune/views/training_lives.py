"""The lives of one training, which was killed or resized and started again: which ranks, when, how
each ended, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bagua_autotune.model.job import Job
from bagua_autotune.model.view import Moment, View
from bagua_autotune.store import Store
from bagua_autotune.store.jobs import read_each
from bagua_autotune.views.summary import JobSummary, Summaries
from bagua_wire.words import describe

LifeEnd = Literal["running", "finished", "killed", "resized", "lost"]


class Life(View):
    """A life of a training: a job of its own.

    ``end``: it runs, its training said that it is over (finished, tuned or not), went on with the
    same ranks (killed) or with others (resized), or nothing more is heard of it (lost). ``found``:
    in words, the result, or else what was best until its end.
    """

    job: str
    number: int
    world_size: int
    ranks_per_node: tuple[int, ...]
    created_at: Moment
    last_contact_at: Moment
    end: LifeEnd
    trials_measured: int
    speedup: float | None
    found: str


def make_lives(store: Store, summaries: Summaries, job_id: str) -> list[Life]:
    """All lives of the job's training that are stored, the first one first; none if it is the
    only one."""
    numbers = dict(store.lives.of(job_id))
    if len(numbers) < 2:
        return []
    contacts = [store.jobs.contact(each) for each in numbers]
    found = [each.summary for each in read_each(contacts, summaries.of)]
    jobs = [store.jobs.get(summary.id) for summary in found]
    return [
        _life(numbers[summary.id], summary, job, following)
        for summary, job, following in zip(found, jobs, [*jobs[1:], None], strict=True)
    ]


def _life(number: int, summary: JobSummary, job: Job, following: Job | None) -> Life:
    return Life(
        job=job.id,
        number=number,
        world_size=job.world_size,
        ranks_per_node=job.ranks_per_node,
        created_at=job.created_at,
        last_contact_at=summary.last_contact_at,
        end=_end(job, following),
        trials_measured=summary.progress.trials_measured,
        speedup=summary.progress.speedup,
        found=_found(summary),
    )


def _end(job: Job, following: Job | None) -> LifeEnd:
    has_said_so = job.ended_at is not None and not job.is_lost
    # The ranks of a run that its launcher starts again may well have had time for a last word.
    if has_said_so and (following is None or job.run is None or job.run != following.run):
        return "finished"
    if following is not None:
        return "killed" if following.ranks_per_node == job.ranks_per_node else "resized"
    if job.ended_at is None:
        return "running"
    # The service beside rank 0 sees it go.
    return "killed" if job.phase == "ended" else "lost"


def _found(summary: JobSummary) -> str:
    if summary.result is not None:
        return summary.result.summary
    best = summary.progress.incumbent
    return "nothing yet" if best is None else f"best so far: {describe(best)}"


def name_life(lives: Sequence[Life], job_id: str) -> str:
    """Name which life a job is, where there are several: ``life 2 of 3``; else empty."""
    numbers = {life.job: life.number for life in lives}
    if job_id not in numbers:
        return ""
    return f"life {numbers[job_id]} of {lives[-1].number}"
