"""Which replica decides what follows in a job, so that no two do the same work.

It stands alone, as replicas agree by nothing else. A claim is a row with an end time, on any
database. It keeps no connection or transaction open, and that of a killed process delays the job
only until it ends. Claims only save work: should two replicas decide all the same,
``StoredTrials.advance`` takes one of the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert  # its ON CONFLICT is SQLite's, too

from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import ClaimRow, JobRow
from bagua_autotune.store.rows import OF_ID

# Longer than a decision takes on a busy machine. A job may wait so long for a killed replica.
CLAIM_SECONDS = 30.0
# By clocks that nearly agree, none ends later than this.
MOST_SECONDS = 2 * CLAIM_SECONDS
# One that is over is taken, too, and one of a clock that was ahead and has been set right.
CLAIM = insert(ClaimRow).from_select(
    ["job_id", "owner", "until"],
    select(
        JobRow.id,
        bindparam("owner", type_=ClaimRow.owner.type),
        bindparam("until", type_=ClaimRow.until.type),
    ).where(OF_ID),
)
TAKE = CLAIM.on_conflict_do_update(
    index_elements=["job_id"],
    set_={"owner": CLAIM.excluded.owner, "until": CLAIM.excluded.until},
    where=(ClaimRow.until <= bindparam("now")) | (ClaimRow.until > bindparam("latest")),
).returning(ClaimRow.job_id)
RELEASE = delete(ClaimRow).where(
    ClaimRow.job_id == bindparam("job_id"), ClaimRow.owner == bindparam("owner")
)


class Claims:
    """Claims of jobs; the replicas' clocks should nearly agree."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def claimed(self, job_id: str, clock: Callable[[], float]) -> Iterator[bool]:
        """Claim the job for the block; False if another replica has it, or there is no such job.

        Args:
            clock: seconds since the epoch.
        """
        owner = uuid4().hex
        if not self.take(job_id, owner, clock()):
            yield False
            return
        try:
            yield True
        finally:
            self._database.write(RELEASE, job_id=job_id, owner=owner)

    def take(self, job_id: str, owner: str, now: float) -> bool:
        """Claim the job now; False if another replica has it, or there is no such job."""
        ends = {"until": now + CLAIM_SECONDS, "now": now, "latest": now + MOST_SECONDS}
        return bool(self._database.write(TAKE, job_id=job_id, owner=owner, **ends))


def is_in_force(until: float, now: float) -> bool:
    """Whether a claim with this end keeps others from deciding."""
    return now < until <= now + MOST_SECONDS
