"""What the service does by itself: it finds lost jobs, and keeps its database small."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.store import Store, families, retention
from bagua_autotune.tuning.leases import LOOK_SECONDS, Leases

logger = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0
LOOKS_BETWEEN = 10
PAUSE_SECONDS = 3600.0


class Upkeep:
    """Looks for lost jobs; thins and deletes once an hour, in whichever replica comes first.

    Args:
        thin_days: so long after its last contact a job keeps all its steps; 0: for ever.
        keep_days: so long after it a job is kept; 0: for ever.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        thin_days: float,
        keep_days: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._thin_days = thin_days
        self._keep_days = keep_days
        self._clock = clock
        self._leases = Leases(store, clock)
        self._stopping = threading.Event()

    def start(self) -> None:
        """In a thread that ends with the process, or with ``stop``."""
        threading.Thread(target=self._run, name="upkeep", daemon=True).start()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopping.set()

    def _run(self) -> None:
        looks = 0
        while not self._stopping.wait(LOOK_SECONDS):
            looks += 1
            try:
                self._leases.look()
                if looks % LOOKS_BETWEEN == 0:
                    self.once()
            except SQLAlchemyError as error:
                logger.error("the upkeep of the database waits: the store failed: %s", error)
            except Exception:
                logger.exception("the upkeep of the database failed; it is tried again later")

    def once(self) -> bool:
        """What there is to do now. False if it is not this replica's turn."""
        now = self._clock()
        thinned_until = retention.claim(self._store, now, PAUSE_SECONDS)
        if thinned_until is None:
            return False
        pruned, steps = 0, 0
        if self._keep_days:
            pruned = len(retention.prune(self._store, now - self._keep_days * DAY_SECONDS))
        if pruned:
            families.forget_orphans(self._store)
        if self._thin_days:
            until = now - self._thin_days * DAY_SECONDS
            steps = retention.thin(self._store, thinned_until, until)
            retention.note_thinned(self._store, max(until, thinned_until))
        retention.shrink(self._store)
        if pruned or steps:
            logger.info(
                "upkeep: %d jobs not heard of for %g days are deleted; of jobs not heard of for %g "
                "days %d steps are thinned out",
                *(pruned, self._keep_days, self._thin_days, steps),
            )
        return True
