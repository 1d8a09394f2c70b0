"""Which jobs are lost: those whose lease ran out, which every word of their ranks renews.

Nothing of a lost job is decided; its open trial is neither scored nor failed. Its next word has it
go on at that trial. Any replica finds out, and of several one says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import CUT_SHORT, RUNS, SILENT_SECONDS, Api, Event, Job
from bagua_autotune.model.text import describe_seconds
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import TunerListener
from bagua_wire.messages import LEASE_SECONDS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
# Who did not look for so long did not listen either: it stood still, or its database did.
MOST_BETWEEN_LOOKS_SECONDS = 4 * LOOK_SECONDS
GONE = "the training process was gone"
HEARD_AGAIN = "the training is heard from again, so its tuning continues"


class Leases:
    """The leases of all jobs of a store. A service that was away, or just begins, cannot know who
    spoke meanwhile: for as long as a lease lasts it goes by an hour instead.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._listens_since = self._looked_at = clock()

    def look(self) -> None:
        """Mark the jobs that are lost by now."""
        now = self._clock()
        if now - self._looked_at > MOST_BETWEEN_LOOKS_SECONDS:
            self._listens_since = now
        listened = now - self._listens_since >= LEASE_SECONDS
        self._lose("v2", now, LEASE_SECONDS if listened else SILENT_SECONDS)
        self._lose("v1", now, SILENT_SECONDS)
        for protocol in RUNS:
            self._lose(protocol, now, LEASE_SECONDS if listened else SILENT_SECONDS)
        self._looked_at = now  # not if the database failed

    def _lose(self, protocol: Api, now: float, patience_seconds: float) -> None:
        # Bagua's workers say nothing any more once they are tuned.
        event = Event("lost", message=_silent(patience_seconds, protocol), at=now)
        for job_id in self._store.jobs.lose_silent(
            protocol, now - patience_seconds, event, also_finished=protocol == "v2"
        ):
            logger.info("job %s: %s", job_id, event.message)
            if protocol not in RUNS:  # who goes on with a search says so itself
                _take_up(self._store, job_id)

    def heard(self, job: Job) -> Job:
        """A job whose ranks spoke; one that was lost goes on."""
        if not job.is_lost:
            return job
        now = self._clock()
        self._store.jobs.resume(job.id, now)
        self._store.events.add(job.id, Event("note", message=HEARD_AGAIN, at=now))
        _let_go(self._store, job)
        logger.info("job %s: %s", job.id, HEARD_AGAIN)
        return self._store.jobs.get(job.id)


def _silent(seconds: float, protocol: Api) -> str:
    taken = "search is interrupted" if protocol in RUNS else "training is taken for lost"
    return f"nothing was heard for {describe_seconds(seconds)}: the {taken}"


# Which jobs are lives of one training, which was killed or resized and started again.
#
# The launcher's name of the run tells, where it has one. Else the lease does: a training that was
# cut short goes on with the next one of the same name and model. Two that run at the same time do
# not.

MOST_LOOKED_AT = 20


def goes_on_with(store: Store, job: Job, model_key: str) -> str | None:
    """The earlier life of a job that was just registered; None: it is the first, or that is not
    known yet (see _take_up)."""
    alike = store.jobs.alike(job.name, model_key, MOST_LOOKED_AT)
    jobs = [j for j in alike if j.id != job.id and store.lives.following(j.id) is None]
    for each in jobs:
        if job.run is not None and each.run == job.run:
            return each.id
    # Those that still run are other trainings, or will be lost.
    ended = next((each for each in jobs if each.ended_at is not None), None)
    return ended.id if ended and _was_cut_short(ended) else None


def _take_up(store: Store, lost: str) -> None:
    """A job that is lost by now may have been started again meanwhile, without a word of its
    end."""
    following = store.lives.begun_since_silence(lost)
    if following is None or store.lives.following(lost) is not None:
        return
    if not store.jobs.get(following).fresh:
        store.lives.join(lost, following)


def _let_go(store: Store, job: Job) -> None:
    """A job that was taken for lost runs: what was taken for its next life is another training,
    unless the launcher says otherwise."""
    following = store.lives.following(job.id)
    if following is not None and (job.run is None or store.jobs.get(following).run != job.run):
        store.lives.part(job.id)


def _was_cut_short(job: Job) -> bool:
    """Whether its training was not over when it ended."""
    return job.phase in CUT_SHORT or job.is_lost


class InHand(TunerListener):
    """Keeps the jobs whose ranks speak to this process, and ends them when nobody is left to speak
    for them. Of a service that one training has for itself."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._job_ids: set[str] = set()

    def on_heard(self, job_id: str) -> None:
        self._job_ids.add(job_id)

    @property
    def has_jobs(self) -> bool:
        return bool(self._job_ids)

    def end(self, at: float) -> None:
        """The training is gone; jobs whose end was told stay as they are."""
        try:
            self._store.jobs.end_gone(list(self._job_ids), Event("ended", message=GONE, at=at))
        except SQLAlchemyError as error:
            logger.error("the jobs of the training cannot be ended: the store failed: %s", error)
