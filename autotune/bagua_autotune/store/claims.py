"""Which replica decides what follows in a job, so that no two do the same work.

A claim is a row with an end time, on any database. It keeps no connection or transaction open, and
that of a killed process delays the job only until it ends. Claims only save work: should two
replicas decide all the same, ``Store.advance`` takes one of the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import delete, text

from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import ClaimRow

# Longer than a decision takes on a busy machine. A job may wait so long for a killed replica.
CLAIM_SECONDS = 30.0
# By clocks that nearly agree, none ends later than this.
MOST_SECONDS = 2 * CLAIM_SECONDS
# One that is over is taken, too, and one of a clock that was ahead and has been set right.
TAKE = text(
    "INSERT INTO claims (job_id, owner, until) "
    "SELECT id, CAST(:owner AS VARCHAR), CAST(:until AS FLOAT) FROM jobs WHERE id = :job_id "
    "ON CONFLICT (job_id) DO UPDATE SET owner = excluded.owner, until = excluded.until "
    "WHERE claims.until <= :now OR claims.until > :latest RETURNING job_id"
)


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


def is_in_force(until: float, now: float) -> bool:
    """Whether a claim with this end keeps others from deciding."""
    return now < until <= now + MOST_SECONDS


def take(store: Store, job_id: str, owner: str, now: float) -> bool:
    """Claim the job now; False if another replica has it, or there is no such job."""
    ends = {"until": now + CLAIM_SECONDS, "now": now, "latest": now + MOST_SECONDS}
    given = {"job_id": job_id, "owner": owner, **ends}
    with store.database.writing() as session:
        return session.scalar(TAKE, given) is not None
