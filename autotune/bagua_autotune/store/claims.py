"""Which replica decides what follows in a job: none does what another does at this moment.

A claim is a row that ends by itself, on any database: one whose process was killed holds a job up
for a while, and none keeps a connection or a transaction open. Nothing rests on it but work that is
spared: of two that decide all the same ``Store.advance`` takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError

from bagua_autotune.store import Store
from bagua_autotune.store.tables import ClaimRow, JobRow

# Longer than a decision takes on a busy machine; so long a job may wait for one that was killed.
CLAIM_SECONDS = 30.0


@contextmanager
def claimed(store: Store, job_id: str, clock: Callable[[], float]) -> Iterator[bool]:
    """Claim the job for the block; False if another has it, or there is no such job.

    Args:
        clock: seconds since the epoch, much the same in all replicas.
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
    """Claim the job from now on; False if another has it, or there is no such job."""
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
