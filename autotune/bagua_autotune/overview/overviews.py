"""Summaries and overviews of jobs, each made once per revision of the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bagua_autotune.model.job import CUT_SHORT, Event, Job
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.text import describe
from bagua_autotune.overview.cache import Cache
from bagua_autotune.overview.curve import Curve, closed, make_curve
from bagua_autotune.overview.layouts import JobLayouts, Role, make_layouts
from bagua_autotune.overview.reading import LATEST_STEPS, Reading, read
from bagua_autotune.overview.steps import (
    Best,
    RankTime,
    Series,
    Switch,
    best_so_far,
    exposed_seconds,
    rank_times,
    switches,
    thin_out,
)
from bagua_autotune.overview.summary import LATEST_PROFILES, Summaries, Summary, make_summary
from bagua_autotune.overview.words import baseline_trial, explain, stock_ddp_snippet
from bagua_autotune.store import contacts, digests, read_each
from bagua_autotune.store.contacts import Contact
from bagua_autotune.tuning.rounds import of_round
from bagua_autotune.tuning.standing import best_trial
from bagua_autotune.tuning.status import TrialStatus, trial_statuses
from bagua_autotune.tuning.tuner import Tuner

# A hundred kilobytes each, and only looked at one by one.
OVERVIEWS_KEPT = 32
# A list of jobs sums up for so long what changed; what is left is shown as it was, and comes first
# next time.
LIST_BUDGET_SECONDS = 0.1
NEWEST_EVENTS = 200


@dataclass(frozen=True)
class ShownTrial(TrialStatus):
    """``words``: its configuration; ``is_best``: the first one of the best (see best_trial)."""

    words: str
    is_best: bool


@dataclass(frozen=True)
class Overview:
    """All that is shown of a job while it runs; see the messages of /api/v2."""

    summary: Summary
    job: Job
    trials: Sequence[ShownTrial]
    steps: Series
    switches: Sequence[Switch]
    best: Sequence[Best]
    ranks: Sequence[RankTime]
    why: str
    stock_ddp: str
    events: Sequence[Event]


class FittedCurve(NamedTuple):
    """``shown``: when the job was made, its round, whether its training ended; ``trials``: closed
    ones of that round, which is not the shown one if the training ended within it.
    """

    shown: tuple[float, int, bool]
    trials: int
    curve: Curve


class Overviews:
    """Methods of one job raise UnknownJob if there is no such job. Thread-safe.

    Args:
        summaries: of the tuner's store, where others look at them too.
        stopwatch: seconds, for the budget.
    """

    def __init__(
        self,
        tuner: Tuner,
        summaries: Summaries | None = None,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tuner = tuner
        self._store = tuner.store
        self._stopwatch = stopwatch
        self._summaries = summaries or Summaries(self._store)
        self._overviews: Cache[Overview] = Cache(OVERVIEWS_KEPT)
        self._curves: Cache[FittedCurve] = Cache(OVERVIEWS_KEPT)
        self._layouts: Cache[JobLayouts] = Cache(OVERVIEWS_KEPT)
        # Fits are bound by Python's lock: more at once only slow the requests down, and all that
        # wait would leave no thread to the ranks.
        self._one_fit = threading.Lock()

    def summaries(self, name: str | None = None, limit: int = 100) -> list[Summary]:
        """Newest first; see page."""
        return self.page(name, limit)[0]

    def page(
        self, name: str | None = None, limit: int = 100, after: str | None = None
    ) -> tuple[list[Summary], str | None]:
        """Newest first, those behind the job ``after``, and the last one's id if there are more.

        A job that cannot be read is left out. Where many changed, some have the figures, and the
        ``revision``, of a while ago; never another state, and never an older last contact.
        """
        newest = contacts.newest(self._store, name, limit + 1, after)
        following = newest[limit - 1].id if len(newest) > limit else None
        newest = newest[:limit]
        until = self._stopwatch() + LIST_BUDGET_SECONDS
        longest_ago = sorted(newest, key=self._known_at)
        each = read_each(longest_ago, lambda contact: self._listed(contact, until))
        found = {summary.id: summary for summary in each}
        return [found[contact.id] for contact in newest if contact.id in found], following

    def summary(self, job_id: str) -> Summary:
        return self._summary_of(contacts.of_job(self._store, job_id))

    def _summary_of(self, contact: Contact) -> Summary:
        deciding = self.tuner.is_deciding(contact.id)
        found = self._summaries.of(contact).summary
        return replace(found, deciding=deciding, last_contact_at=contact.last_contact_at)

    def _listed(self, contact: Contact, until: float) -> Summary:
        known = self._summaries.known(contact)
        if known is None or self._stopwatch() < until:
            return self._summary_of(contact)
        found = known.summary
        # Its headline tells the state too, so that cannot be mended.
        if (found.state, found.ended_at) != (contact.phase, contact.ended_at):
            return self._summary_of(contact)
        deciding = self.tuner.is_deciding(contact.id)
        return replace(found, deciding=deciding, last_contact_at=contact.last_contact_at)

    def _known_at(self, contact: Contact) -> float:
        known = self._summaries.known(contact)
        return known.summary.last_contact_at if known else 0.0

    def overview(self, job_id: str) -> Overview:
        contact = contacts.of_job(self._store, job_id)
        deciding = self.tuner.is_deciding(job_id)
        found = self._overviews.get(job_id, contact.version, lambda: self._make(job_id))
        last = contact.last_contact_at
        summary = replace(found.summary, deciding=deciding, last_contact_at=last)
        return replace(found, summary=summary)

    def curve(self, job_id: str) -> Curve:
        """What the search believes; made anew once a trial was closed.

        While one is being made, nobody waits: who asks gets the latest one, or none. That it rests
        on fewer trials than were closed says that there is more to come.
        """
        job = self._store.job(job_id)
        trials = closed(of_round(self._store.trials(job_id), job.round))
        shown = job.created_at, job.round, job.phase in CUT_SHORT
        known = self._curves.known(job_id)
        if known and (known.shown, known.trials) == (shown, trials):
            return known.curve
        if not self._one_fit.acquire(blocking=False):
            return known.curve if known and known.shown == shown else Curve(0)
        try:
            made = self._curves.get(
                job_id,
                (shown, trials),
                lambda: FittedCurve(shown, trials, make_curve(self.tuner, job_id)),
            )
        finally:
            self._one_fit.release()
        return made.curve

    def buckets(self, job_id: str) -> JobLayouts:
        """How the tensors are cut by default, and by the best configuration so far."""
        job = self._store.job(job_id)
        best = best_trial(job, self._store.trials(job_id))
        configurations: dict[Role, Configuration] = {"default": job.baseline}
        if best is not None:
            configurations["incumbent"] = best.configuration
        version = job.created_at, *configurations.values()
        return self._layouts.get(
            job_id, version, lambda: make_layouts(self.tuner.layouts(job), configurations)
        )

    def _make(self, job_id: str) -> Overview:
        with self._store.database.reading():
            return self._put_together(read(self._store, job_id))

    def _put_together(self, reading: Reading) -> Overview:
        summary = make_summary(self._store, reading)
        job, job_id = reading.job, reading.job.id
        best = best_trial(job, reading.trials)
        has_seconds = reading.objective.seconds(0.0) is not None
        times = digests.step_times(self._store, job_id) if has_seconds else []
        return Overview(
            summary=summary,
            job=job,
            trials=[
                ShownTrial(
                    **vars(status),
                    words=describe(status.configuration),
                    is_best=best is not None and status.index == best.index,
                )
                for status in trial_statuses(job, reading.trials, reading.objective)
            ],
            steps=thin_out(times),
            switches=switches(reading),
            best=best_so_far(reading),
            ranks=rank_times(reading.latest) if has_seconds else [],
            why=explain(reading, summary.figures, self._exposed(reading)),
            stock_ddp=stock_ddp_snippet(best.configuration if best else job.baseline),
            events=self._store.events(job_id, NEWEST_EVENTS),
        )

    def _exposed(self, reading: Reading) -> Mapping[int, float]:
        """Communication that computing does not hide, of the best trial and the baseline's."""
        job = reading.job
        wanted = [best_trial(job, reading.trials), baseline_trial(job, reading.shown)]
        found: dict[int, float] = {}
        for trial in filter(None, wanted):
            steps = digests.latest_observations(self._store, job.id, trial.index, LATEST_STEPS)
            profiles = digests.latest_profiles(self._store, job.id, LATEST_PROFILES, trial.index)
            exposed = exposed_seconds(steps, profiles)
            if exposed is not None:
                found[trial.index] = exposed
        return found
