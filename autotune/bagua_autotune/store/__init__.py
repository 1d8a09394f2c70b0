"""Where jobs, trials and observations live: any database that SQLAlchemy speaks to."""

from __future__ import annotations

from bagua_autotune.store.database import StoreError
from bagua_autotune.store.store import JobConflict, Step, Store, UnknownJob, UnknownTrial

__all__ = ["JobConflict", "Step", "Store", "StoreError", "UnknownJob", "UnknownTrial"]
