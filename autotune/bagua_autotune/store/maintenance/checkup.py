"""Checks a database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.store import Store
from bagua_autotune.store.engine.postgresql import SIZE
from bagua_autotune.store.engine.sqlite import look_over, remote_kind
from bagua_autotune.store.engine.tables import SCHEMA_VERSION, JobRow
from bagua_autotune.store.errors import UnknownJob, remedy
from bagua_wire.knob_kinds import describe_bytes

MOST_ERRORS_TOLD = 10
# With less, a large report or a migration may not fit.
LEAST_FREE_BYTES = 100 * 1024**2
ROOM_MADE = "make room there, or delete old jobs (`bagua-autotune prune --older-than DAYS`)"
MOVED = (
    "end all that uses it, and move it to a disk of this machine, or use PostgreSQL; a service "
    "that is started alone changes the journal mode"
)
RESTORED = "put a backup in its place (`bagua-autotune restore FILE`)"
DELETE_ORPHANS = (
    "PRAGMA foreign_keys = ON; DELETE FROM {table} WHERE rowid IN "
    "(SELECT rowid FROM pragma_foreign_key_check('{table}'))"
)


@dataclass(frozen=True)
class Finding:
    """What was found, in one sentence; of a fault also what to do about it."""

    words: str
    remedy: str = ""

    @property
    def is_fault(self) -> bool:
        return bool(self.remedy)


def examine(store: Store) -> Iterator[Finding]:
    """Check an open database in every way; takes as long as reading all of it."""
    yield Finding(f"{store.database} has schema version {SCHEMA_VERSION}, this release's")
    try:
        yield from _sqlite(store) if store.database.is_sqlite else _postgresql(store)
        yield from _jobs(store)
    except SQLAlchemyError as error:
        yield Finding(
            f"the database cannot be read: {getattr(error, 'orig', error)}", remedy(error)
        )


def _mended(error: str, file: Path) -> str:
    """What to do about a line of SQLite's integrity check."""
    if "index" in error:  # it can be made anew from its table
        return f"stop the service, and sqlite3 {file} REINDEX; if that fails, {RESTORED}"
    return f"stop the service, and {RESTORED}"


def _sqlite(store: Store) -> Iterator[Finding]:
    file = Path(str(store.database.url.database))
    with store.database.reading():
        errors, orphans, mode = look_over(store.database.read, MOST_ERRORS_TOLD)
    if not errors:
        yield Finding("SQLite's integrity check finds no fault")
    for error in errors:
        yield Finding(f"SQLite's integrity check: {error}", _mended(error, file))
    for table, count in orphans.items():
        yield Finding(
            f"{count} rows belong to jobs or trials that do not exist, in the table {table}",
            f"nothing shows them, and they only take room; to delete them, sqlite3 {file} "
            f'"{DELETE_ORPHANS.format(table=table)}"',
        )
    kind = remote_kind(store.database.url)
    if kind is None:
        yield Finding(f"its file is on this machine (journal mode {mode})")
    else:
        words = f"its file is on a network file system ({kind}), in journal mode {mode}"
        yield Finding(words, MOVED if mode == "wal" else "")
    if file.exists():
        used, free = file.stat().st_size, shutil.disk_usage(file.parent).free
        words = f"it takes {describe_bytes(used)}; {describe_bytes(free)} are free on its disk"
        yield Finding(words, ROOM_MADE if free < LEAST_FREE_BYTES else "")


def _postgresql(store: Store) -> Iterator[Finding]:
    ((used,),) = store.database.read(SIZE)
    yield Finding(f"it takes {describe_bytes(int(used))}; PostgreSQL's pg_amcheck checks more")


def _jobs(store: Store) -> Iterator[Finding]:
    bounds = select(func.min(JobRow.created_at), func.max(JobRow.last_contact_at))
    with store.database.reading():
        (times,) = store.database.read(bounds)
        ids = store.database.read(select(JobRow.id).order_by(JobRow.created_at))
    readable = 0
    for (job_id,) in ids:
        try:
            store.jobs.get(job_id)
            store.jobs.tensors(job_id)
            store.trials.of(job_id)
        except UnknownJob:  # deleted since
            continue
        except Exception as error:
            words = f"job {job_id} cannot be read: {error!r}"
            yield Finding(words, f"`bagua-autotune delete {job_id}`, or {RESTORED}")
            continue
        readable += 1
    bounded = [f"{datetime.fromtimestamp(at):%F %T}" for at in times if at is not None]
    between = ", from {} to {}".format(*bounded) if bounded else ""
    yield Finding(f"{readable} of {len(ids)} jobs can be read{between}")
