"""Keeps the database small: thins out old steps and deletes old jobs.

Each transaction is small, so that no report waits long for the database.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, select, text, update

from bagua_autotune.model.job import GIVEN_UP, OVER
from bagua_autotune.model.view import View
from bagua_autotune.store import Store
from bagua_autotune.store.deletion import DELETED_COLUMNS, ROWS_AT_ONCE, DeletedJob, delete_where
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.rows import locked_row
from bagua_autotune.store.tables import ChoreRow, JobRow, ObservationRow, TrialRow

CHORE = "retention"
TAKE_TURN = text(
    "INSERT INTO chores (name, due_at, done_until) VALUES (:name, :next, 0) "
    "ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at "
    "WHERE chores.due_at <= :now RETURNING done_until"
)
DAY_SECONDS = 86_400
PAGES_AT_ONCE = 1000
# How many of its last steps a trial keeps: those that figures and explanations use; else enough to
# draw it. The first step stays, too: it says when the ranks switched.
KEPT_STEPS = 20
KEPT_FOR_PICTURES = 3


class Pruned(View):
    """The jobs that were deleted, oldest first; with ``dry_run`` those that would be."""

    dry_run: bool
    jobs: list[DeletedJob]


def claim(store: Store, now: float, pause_seconds: float) -> float | None:
    """Take the turn, which one of the replicas gets once in each pause.

    Returns:
        Jobs whose last report came before this time are thinned already; None: not our turn.
    """
    given = {"name": CHORE, "next": now + pause_seconds, "now": now}
    with store.database.writing() as session:
        return session.scalar(TAKE_TURN, given)


def note_thinned(store: Store, until: float) -> None:
    """Note that the jobs whose last report came before then are thinned."""
    with store.database.writing() as session:
        session.execute(update(ChoreRow).where(ChoreRow.name == CHORE).values(done_until=until))


def prune_now(store: Store, days: int, dry_run: bool = False) -> Pruned:
    """Delete the jobs that have not reported for so many days, and give their space back.

    Args:
        dry_run: delete nothing, only list them.
    """
    before = time.time() - days * DAY_SECONDS
    if dry_run:
        return Pruned(dry_run=True, jobs=old_jobs(store, before))
    jobs = prune(store, before)
    shrink(store)
    return Pruned(dry_run=False, jobs=jobs)


def old_jobs(store: Store, before: float) -> list[DeletedJob]:
    """The jobs whose last report came before then, oldest first."""
    old = select(*DELETED_COLUMNS).where(_is_old(before)).order_by(JobRow.created_at)
    with store.database.reading() as session:
        return [DeletedJob.model_validate(row) for row in session.execute(old).mappings()]


def prune(store: Store, before: float) -> list[DeletedJob]:
    """Delete the jobs whose last report came before then, with all that belongs to them."""
    found = old_jobs(store, before)
    gone = (delete_where(store, (JobRow.id == old.id) & _is_old(before)) for old in found)
    deleted = [job for job in gone if job]
    if deleted:
        store.forget_families()
    return deleted


def _is_old(before: float) -> ColumnElement[bool]:
    return JobRow.last_contact_at < before


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
    with store.database.reading() as session:
        found = list(session.scalars(over))
    return sum(_thin_job(store, job_id) for job_id in found)


def _thin_job(store: Store, job_id: str) -> int:
    query = select(TrialRow).where(TrialRow.job_id == job_id).order_by(TrialRow.index)
    with store.database.reading() as session:
        row = session.get(JobRow, job_id)
        trials = session.scalars(query).all()
        if row is None:
            return 0
        looked_into = _looked_into(row, trials)
        closed = [trial.id for trial in trials if trial.state in ("measured", *GIVEN_UP)]
    deleted = 0
    for trial_id in closed:
        kept = KEPT_STEPS if trial_id in looked_into else KEPT_FOR_PICTURES
        while count := _thin_trial(store, job_id, trial_id, kept):
            deleted += count
    return deleted


def _looked_into(row: JobRow, trials: Sequence[TrialRow]) -> set[int]:
    """The ids of the trials of the default, of the result (or the best so far), and the newest."""
    wanted = [row.spec["default_configuration"], row.result and row.result["configuration"]]
    found = {trial.id for trial in trials if trial.configuration in wanted}
    found |= {trial.id for trial in trials[-2:]}  # the last may not have been observed
    measured = [(trial.cost, trial.id) for trial in trials if trial.cost is not None]
    return found | {min(measured)[1]} if measured else found


def _thin_trial(store: Store, job_id: str, trial_id: int, kept: int) -> int:
    """Delete some of its steps, but not the first and the last ones; returns how many."""
    steps = select(ObservationRow.id).where(ObservationRow.trial_id == trial_id)
    thinned = update(TrialRow).where(TrialRow.id == trial_id)
    with store.database.writing() as session:
        try:
            locked_row(session, job_id)
        except UnknownJob:
            return 0
        newest_first = steps.order_by(ObservationRow.step.desc()).offset(kept)
        ids = session.scalars(newest_first).all()[:-1][:ROWS_AT_ONCE]
        session.execute(delete(ObservationRow).where(ObservationRow.id.in_(ids)))
        session.execute(thinned.values(thinned_steps=TrialRow.thinned_steps + len(ids)))
        return len(ids)


def shrink(store: Store) -> None:
    """Give the unused space of a SQLite file back to the file system, piece by piece."""
    if not store.database.is_sqlite:
        return
    while True:
        with store.database.writing() as session:
            driver = session.connection().connection.cursor()
            (unused,) = driver.execute("PRAGMA freelist_count").fetchone()
            driver.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
            (left,) = driver.execute("PRAGMA freelist_count").fetchone()
        if left == 0 or left == unused:  # a file of an older release cannot shrink
            return
