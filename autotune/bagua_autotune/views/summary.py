"""What is known of each job, summed up once per revision, for all who look at many jobs; and the
lives of one training, which was killed or resized and started again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagua_autotune.measuring.rounds import is_settled
from bagua_autotune.model.job import Api, Job, Trial, TrialState
from bagua_autotune.model.reasons import failure_code
from bagua_autotune.model.view import Moment, View
from bagua_autotune.store import Store
from bagua_autotune.store.jobs import Contact, read_each
from bagua_autotune.tuning.cache import Cache
from bagua_autotune.tuning.status import JobState, job_state
from bagua_autotune.views.reading import Reading, read
from bagua_autotune.views.speedup import Figures, make_figures, saved_rank_seconds, spent
from bagua_autotune.views.words import make_headline
from bagua_wire.words import describe

# Enough for a median.
LATEST_PROFILES = 3


class JobSummary(JobState):
    """A job as a list shows it.

    ``headline`` is one plain sentence; ``revision`` is raised by whatever is written of the job,
    and is that of the figures, which in a list may be of a while ago. ``reason``: for programs, why
    a tuned job was left with what it has; null while it is being tuned, and without a result.
    ``life``: which one of its training it is, see Life. ``saved_rank_seconds``: time of its ranks
    that tuning has saved, less what it cost; null where that is not known. ``team``: whose it is.
    """

    protocol: Api
    world_size: int
    created_at: Moment
    last_contact_at: Moment
    ended_at: Moment | None
    is_lost: bool
    revision: int
    headline: str
    reason: str | None = None
    figures: Figures
    life: int = 1
    saved_rank_seconds: float | None = None
    team: str | None = None


def make_summary(store: Store, reading: Reading) -> JobSummary:
    """Sum up what was read; whether the job is deciding is nothing that is stored."""
    job = reading.job
    profiles = []
    if not any(observation.compute for observation in reading.latest):
        profiles = store.profiles.latest(job.id, LATEST_PROFILES)
    state = job_state(job, reading.trials, reading.shown.ceiling)
    figures = make_figures(reading, profiles)
    return JobSummary(
        **vars(state),
        protocol=job.protocol,
        world_size=job.world_size,
        created_at=job.created_at,
        last_contact_at=job.last_contact_at,
        ended_at=job.ended_at,
        is_lost=job.is_lost,
        revision=job.revision,
        headline=make_headline(reading, state, figures),
        reason=job.result.reason_code if job.result and is_settled(job) else None,
        figures=figures,
        life=store.lives.place_of(job.id).number,
        saved_rank_seconds=saved_rank_seconds(reading),
        team=job.team,
    )


@dataclass(frozen=True)
class Totals:
    """The steps and seconds of all rounds, and what the ranks run.

    Attributes:
        trials: how many are in each state.
        failures: how many failed, by the code of the reason.
        drifts: lasting changes of the step times that the ranks told of.
        search_steps, search_seconds: of all rounds, as the figures tell them of one.
        running: the trial that the ranks run; until they have switched to one that is proposed,
            the one before it.
        is_current: whether the latest steps are of what runs now; not so between a trial's begin
            and its first steps.
    """

    trials: Mapping[TrialState, int]
    failures: Mapping[str, int]
    drifts: int
    search_steps: int
    search_seconds: float
    running: Trial | None
    is_current: bool


def make_totals(reading: Reading) -> Totals:
    """Add up what was read."""
    job, trials = reading.job, reading.trials
    running = _running(reading)
    searches = [spent(reading, number) for number in range(job.round + 1)]
    return Totals(
        trials=Counter(trial.state for trial in trials),
        failures=Counter(failure_code(t.failure or "") for t in trials if t.state == "failed"),
        drifts=reading.drifts,
        search_steps=sum(search.bill.steps for search in searches),
        search_seconds=sum(search.seconds for search in searches),
        running=running,
        is_current=job.is_over or (running is not None and running.index in reading.steps),
    )


def _running(reading: Reading) -> Trial | None:
    trials = reading.trials
    if reading.job.is_over or not trials or not trials[-1].is_open:
        return None
    *others, last = trials
    if last.state != "proposed":
        return last
    before = others[-1] if others and others[-1].round == last.round else None
    return before if before and (before.estimate or before.is_open) else None


# A few kilobytes each.
MOST_JOBS = 5000


@dataclass(frozen=True)
class JobSum:
    """A job's latest round, and all of them together."""

    summary: JobSummary
    totals: Totals


class Summaries:
    """Keeps the summaries of a store's jobs. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: Cache[JobSum] = Cache(MOST_JOBS)

    def of(self, contact: Contact) -> JobSum:
        """The job's summary, as new as the contact, or newer. Raises UnknownJob if there is no such
        job."""
        return self._kept.get(contact.id, contact.version, lambda: self._make(contact.id))

    def known(self, contact: Contact) -> JobSum | None:
        """The job's latest summary; None if it was never summed up."""
        found = self._kept.known(contact.id)
        is_of_it = found is not None and found.summary.created_at == contact.created_at
        return found if is_of_it else None

    def _make(self, job_id: str) -> JobSum:
        with self._store.database.reading():
            reading = read(self._store, job_id)
            summary = make_summary(self._store, reading)
            return JobSum(summary, make_totals(reading))


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
