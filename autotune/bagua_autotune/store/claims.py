"""Which replica decides what follows in a job, so that no two do the same work.

A claim is a row with an end time, on any database. It keeps no connection or transaction open, and
that of a killed process delays the job only until it ends. Claims only save work: should two
replicas decide all the same, ``Store.advance`` takes one of the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError

from bagua_autotune.store import Store
from bagua_autotune.store.tables import ClaimRow, JobRow

# Longer than a decision takes on a busy machine. A job may wait so long for a killed replica.
CLAIM_SECONDS = 30.0


@contextmanager
def claimed(store: Store, job_id: str, clock: Callable[[], float]) -> Iterator[bool]:
    """Claim the job for the block; False if another replica has it, or there is no such job.

    Args:
        clock: seconds since the epoch; the replicas' clocks should nearly agree.
    """
    owner = uuid4().hex
    if not take(store, job_id, owner, clock()):
        yield False
        return
    try:
        yield True
    finally:
        with store.database.writing() as session:
            own = delete(ClaimRow).where(ClaimRow.job_id == job_id, ClaimRow.owner == owner)
            session.execute(own)


def take(store: Store, job_id: str, owner: str, now: float) -> bool:
    """Claim the job now; False if another replica has it, or there is no such job."""
    until = now + CLAIM_SECONDS
    over = update(ClaimRow).where(ClaimRow.job_id == job_id, ClaimRow.until <= now)
    try:
        with store.database.writing() as session:
            taken = over.values(owner=owner, until=until).returning(ClaimRow.job_id)
            if session.scalar(taken) is not None:
                return True
            is_free = session.get(ClaimRow, job_id) is None
            if is_free and session.scalar(select(JobRow.id).where(JobRow.id == job_id)):
                session.add(ClaimRow(job_id=job_id, owner=owner, until=until))
                return True
    except IntegrityError:
        pass  # another replica took it at the same moment
    return False
