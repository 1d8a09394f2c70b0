"""Where jobs, trials and observations live: any database that SQLAlchemy speaks to."""

from __future__ import annotations

from bagua_autotune.store.errors import (
    JobConflict,
    OtherSchema,
    StoreError,
    UnknownJob,
    UnknownTrial,
)
from bagua_autotune.store.isolation import read_each
from bagua_autotune.store.store import Step, Store

__all__ = [
    "JobConflict",
    "OtherSchema",
    "Step",
    "Store",
    "StoreError",
    "UnknownJob",
    "UnknownTrial",
    "read_each",
]
