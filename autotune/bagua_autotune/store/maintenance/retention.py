"""Keeps the database small: thins out old steps, and deletes old jobs or those that are named.

Each transaction is small, so that no report waits long for the database.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, select, update
from sqlalchemy.dialects.postgresql import insert  # its ON CONFLICT is SQLite's, too
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import OVER, SILENT_SECONDS, Job, Trial
from bagua_autotune.model.text import describe_seconds
from bagua_autotune.model.view import Moment, View
from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import data_folder
from bagua_autotune.store.engine.tables import ChoreRow, JobRow, ObservationRow, TrialRow
from bagua_autotune.store.errors import DISK_FULL, JobLives, UnknownJob, trouble
from bagua_autotune.store.rows import OF_TRIAL, locked
from bagua_wire.messages import JobPhase

logger = logging.getLogger(__name__)

CHORE = "retention"
TURN = insert(ChoreRow).values(name=CHORE, due_at=bindparam("next"), done_until=0)
TAKE_TURN = TURN.on_conflict_do_update(
    index_elements=["name"],
    set_={"due_at": TURN.excluded.due_at},
    where=(ChoreRow.due_at <= bindparam("now")) | (ChoreRow.due_at > bindparam("latest")),
).returning(ChoreRow.done_until)
DAY_SECONDS = 86_400
ROWS_AT_ONCE = 1000
# How many of its last steps a trial keeps: those that figures and explanations use; else enough to
# draw it. The first step stays, too: it says when the ranks switched.
KEPT_STEPS = 20
KEPT_FOR_PICTURES = 3
LARGEST_COPY_BYTES = 16 * 1024**2  # as JSON


class DeletedJob(View):
    """A job that was deleted, or would be."""

    id: str
    name: str
    state: JobPhase
    last_contact_at: Moment


class Deleted(View):
    """The jobs that were deleted: one for each life of the training, the first one first."""

    jobs: list[DeletedJob]


class Pruned(View):
    """The jobs that were deleted, oldest first; with ``dry_run`` those that would be."""

    dry_run: bool
    jobs: list[DeletedJob]


DELETED_COLUMNS = JobRow.id, JobRow.name, JobRow.phase.label("state"), JobRow.last_contact_at


def claim(store: Store, now: float, pause_seconds: float) -> float | None:
    """Take the turn, which one of the replicas gets once in each pause. One that would come after
    two pauses is of a clock that was ahead.

    Returns:
        Jobs whose last report came before this time are thinned already; None: not our turn.
    """
    given = {"next": now + pause_seconds, "now": now, "latest": now + 2 * pause_seconds}
    with store.database.writing() as run:
        found = run(TAKE_TURN, **given)
    return found[0].done_until if found else None


def note_thinned(store: Store, until: float) -> None:
    """Note that the jobs whose last report came before then are thinned."""
    store.database.write(update(ChoreRow).where(ChoreRow.name == CHORE).values(done_until=until))


def prune_now(store: Store, days: int, dry_run: bool = False) -> Pruned:
    """Delete the jobs that have not reported for so many days, and give their space back.

    Args:
        dry_run: delete nothing, only list them.
    """
    before = time.time() - days * DAY_SECONDS
    if dry_run:
        return Pruned(dry_run=True, jobs=old_jobs(store, before))
    with deleting(store):
        return Pruned(dry_run=False, jobs=prune(store, before))


def old_jobs(store: Store, before: float) -> list[DeletedJob]:
    """The jobs whose last report came before then, oldest first."""
    query = select(*DELETED_COLUMNS).where(JobRow.last_contact_at < before)
    found = store.database.read(query.order_by(JobRow.created_at))
    return [DeletedJob(**row._asdict()) for row in found]


def prune(store: Store, before: float) -> list[DeletedJob]:
    """Delete the jobs whose last report came before then, with all that belongs to them."""
    is_old, found = JobRow.last_contact_at < before, old_jobs(store, before)
    gone = (delete_where(store, (JobRow.id == old.id) & is_old) for old in found)
    deleted = [job for job in gone if job]
    if deleted:
        _forget(store, deleted)
    return deleted


def thin(store: Store, since: float, before: float) -> int:
    """Delete most steps of the jobs that are over and whose last report came between both times.

    Their figures, results and profiles stay. Jobs of ``/api/v1`` have few steps and keep all.

    Returns:
        How many steps were deleted.
    """
    over = select(JobRow.id).where(
        JobRow.protocol == "v2",
        JobRow.phase.in_(OVER),
        JobRow.last_contact_at >= since,
        JobRow.last_contact_at < before,
    )
    return sum(_thin_job(store, job_id) for (job_id,) in store.database.read(over))


def _thin_job(store: Store, job_id: str) -> int:
    try:
        with store.database.reading():
            job, trials = store.jobs.get(job_id), store.trials.of(job_id)
    except UnknownJob:
        return 0
    looked_into, deleted = _looked_into(job, trials), 0
    for index in [trial.index for trial in trials if not trial.is_open]:
        kept = KEPT_STEPS if index in looked_into else KEPT_FOR_PICTURES
        while count := _thin_trial(store, job_id, index, kept):
            deleted += count
    return deleted


def _looked_into(job: Job, trials: Sequence[Trial]) -> set[int]:
    """The trials of the default, of the result (or the best so far), and the newest."""
    wanted = [job.baseline, job.result and job.result.configuration]
    found = {trial.index for trial in trials if trial.configuration in wanted}
    found |= {trial.index for trial in trials[-2:]}  # the last may not have been observed
    measured = [(trial.estimate.center, trial.index) for trial in trials if trial.estimate]
    return found | {min(measured)[1]} if measured else found


def _thin_trial(store: Store, job_id: str, index: int, kept: int) -> int:
    """Delete some of its steps, but not the first and the last ones; returns how many."""
    steps = select(ObservationRow.id).join(TrialRow).where(OF_TRIAL)
    steps = steps.order_by(ObservationRow.step.desc()).offset(kept)
    thinned = update(TrialRow).where(OF_TRIAL)
    which: dict[str, Any] = {"job_id": job_id, "trial": index}
    try:
        with locked(store.database, job_id) as (run, _):
            ids = [step_id for (step_id,) in run(steps, **which)][:-1][:ROWS_AT_ONCE]
            if ids:
                run(delete(ObservationRow).where(ObservationRow.id.in_(ids)))
                run(thinned.values(thinned_steps=TrialRow.thinned_steps + len(ids)), **which)
            return len(ids)
    except UnknownJob:
        return 0


@contextmanager
def deleting(store: Store) -> Iterator[None]:
    """For a block that deletes: it can on a full disk, too, and its space is given back."""
    with store.database.making_room():
        yield
        try:
            store.database.shrink()
        except SQLAlchemyError as error:
            if trouble(error) != DISK_FULL:
                raise
            # What was deleted is deleted.
            logger.warning("the space of what was deleted is not given back yet: %s", error)


def delete_training(store: Store, job_id: str, force: bool = False) -> Deleted:
    """Delete a job with all lives of its training, and the copies of it on this host.

    Args:
        force: also if the training may still run, which goes on. While it is being tuned its next
            report finds no job, so it registers again and is tuned from its beginning; a search
            with whole runs goes on without being stored. Bagua's own workers would fail instead,
            so theirs is not deleted until it was silent for an hour.

    Raises:
        UnknownJob: there is no such job.
        JobLives: its training may still run; nothing is deleted.
    """
    now = time.time()
    with deleting(store):
        return Deleted(jobs=_delete_lives(store, job_id, force, now))


def _delete_lives(store: Store, job_id: str, force: bool, now: float) -> list[DeletedJob]:
    may_go = JobRow.ended_at.is_not(None) | (JobRow.last_contact_at < now - SILENT_SECONDS)
    if force:
        may_go |= JobRow.protocol != "v1"
    ids = [life for life, _ in store.lives.of(job_id)]
    _refuse_living(store, ids, may_go, now)
    found = (delete_where(store, (JobRow.id == life) & may_go) for life in ids)
    deleted = [job for job in found if job]
    if not deleted:
        _refuse_living(store, ids, may_go, now)  # it was heard of again just now
        raise UnknownJob(job_id)  # another replica was the first
    _forget(store, deleted)
    return deleted


def _forget(store: Store, deleted: Sequence[DeletedJob]) -> None:
    """Delete what is left of jobs that are deleted."""
    store.families.forget()
    forget_copies([job.id for job in deleted])


def _refuse_living(store: Store, ids: list[str], may_go: ColumnElement[bool], now: float) -> None:
    columns = JobRow.id, JobRow.protocol, JobRow.last_contact_at
    for living in store.database.read(select(*columns).where(JobRow.id.in_(ids), ~may_go)):
        ago = describe_seconds(max(0.0, now - living.last_contact_at))
        raise JobLives(living.id, ago, living.protocol)


def delete_where(store: Store, which: ColumnElement[bool]) -> DeletedJob | None:
    """Delete the one job of which this is true, for as long as it is true of it."""
    steps = select(ObservationRow.id).join(TrialRow).join(JobRow).where(which).limit(ROWS_AT_ONCE)
    deletion = delete(ObservationRow).where(ObservationRow.id.in_(steps))
    while len(store.database.write(deletion.returning(ObservationRow.id))) == ROWS_AT_ONCE:
        pass
    gone = store.database.write(delete(JobRow).where(which).returning(*DELETED_COLUMNS))
    return DeletedJob(**gone[0]._asdict()) if gone else None


# The copies of tunings that trainings keep on this host, as files (see docs/elastic.md). The client
# writes them (``bagua_client.reporter.copies``): the time in a line, and then the copy as
# compressed JSON, which names the jobs that are in it.


def copies_folder() -> Path:
    """Where this user's trainings keep them."""
    return data_folder() / "copies"


def forget_copies(job_ids: Collection[str]) -> None:
    """Delete the copies in which one of the jobs is. A training that runs writes another one."""
    wanted = set(job_ids)
    for file in copies_folder().glob("*.copy") if wanted else ():
        with suppress(OSError):
            if not wanted.isdisjoint(_job_ids(file.read_bytes())):
                file.unlink()


def _job_ids(kept: bytes) -> set[str]:
    """The jobs in a copy; none if it cannot be read, as no training could."""
    try:
        inflated = zlib.decompressobj().decompress(kept.partition(b"\n")[2], LARGEST_COPY_BYTES)
        copy: Any = json.loads(inflated)
        return {str(job["id"]) for job in copy["jobs"]}
    except (zlib.error, ValueError, RecursionError, KeyError, TypeError):
        return set()
