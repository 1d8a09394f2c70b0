"""What the service does unasked: it marks lost jobs, and keeps its database small."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.store import Store
from bagua_autotune.store.maintenance import retention
from bagua_autotune.store.maintenance.retention import DAY_SECONDS
from bagua_autotune.tuning.lost_jobs import LOOK_SECONDS, Leases

logger = logging.getLogger(__name__)

JUMP_SECONDS = 60.0
"""A clock that is kept right is moved by less at once."""
LOOKS = 12
"""How often, at least, a replica checks in each pause whether it is its turn."""


class Upkeep:
    """Marks lost jobs; from time to time one of the replicas deletes old steps and jobs.

    Args:
        thin_days: days after its last contact until a job loses most steps; 0: it never does.
        keep_days: days after its last contact until a job is deleted; 0: it never is.
        pause_seconds: between two deletions.
        clock: seconds since the epoch.
        steady: seconds of a clock that is never set.
    """

    def __init__(
        self,
        store: Store,
        thin_days: float,
        keep_days: float,
        pause_seconds: float = 3600.0,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._thin_days = thin_days
        self._keep_days = keep_days
        self._pause_seconds = pause_seconds
        self._clock, self._steady = clock, steady
        self._offset_seconds = clock() - steady()
        self._even_from_seconds = -math.inf
        self._leases = Leases(store, clock)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the upkeep in a thread that ends with the process, or with ``stop``."""
        threading.Thread(target=self._run, name="upkeep", daemon=True).start()

    def stop(self) -> None:
        """Stop: begin no further work."""
        self._stopping.set()

    def _run(self) -> None:
        look_seconds = min(LOOK_SECONDS, self._pause_seconds / LOOKS)
        while not self._stopping.wait(look_seconds):
            try:
                self._leases.look()
                if self.clock_is_even():
                    self.once()
            except SQLAlchemyError as error:
                logger.error(
                    "upkeep failed, as the database did: %s; trying again later",
                    error,
                )
            except Exception:
                logger.exception("upkeep failed; trying again later")

    def clock_is_even(self) -> bool:
        """Whether the clock has not jumped for a pause. By a clock that jumped all jobs may seem
        old, until those that run are heard of again or the clock is set right."""
        steady_seconds = self._steady()
        before, self._offset_seconds = self._offset_seconds, self._clock() - steady_seconds
        jump_seconds = self._offset_seconds - before
        if abs(jump_seconds) > JUMP_SECONDS:
            self._even_from_seconds = steady_seconds + self._pause_seconds
            logger.warning(
                "upkeep: the clock jumped by %.0f s; nothing is deleted for the next %.0f s",
                *(jump_seconds, self._pause_seconds),
            )
        return steady_seconds >= self._even_from_seconds

    def once(self) -> bool:
        """Delete what is old now. False if it is not this replica's turn."""
        now = self._clock()
        with self._store.database.making_room():
            thinned_until = retention.claim(self._store, now, self._pause_seconds)
        if thinned_until is None:
            return False
        with retention.deleting(self._store):
            self._delete(now, thinned_until)
        return True

    def _delete(self, now: float, thinned_until: float) -> None:
        pruned, steps = 0, 0
        if self._keep_days:
            pruned = len(retention.prune(self._store, now - self._keep_days * DAY_SECONDS))
        if self._thin_days:
            until = now - self._thin_days * DAY_SECONDS
            steps = retention.thin(self._store, thinned_until, until)
            retention.note_thinned(self._store, max(until, thinned_until))
        if pruned or steps:
            logger.info(
                "upkeep: deleted %d jobs without a report for %g days, and %d steps of jobs "
                "without a report for %g days",
                *(pruned, self._keep_days, steps, self._thin_days),
            )
