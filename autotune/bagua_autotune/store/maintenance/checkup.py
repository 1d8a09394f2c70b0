"""Checks a database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.text import describe_bytes
from bagua_autotune.store import Store
from bagua_autotune.store.engine.sqlite import remote_kind
from bagua_autotune.store.engine.tables import SCHEMA_VERSION, JobRow
from bagua_autotune.store.errors import UnknownJob

MOST_ERRORS_TOLD = 10
# With less, a large report or a migration may not fit.
LEAST_FREE_BYTES = 100 * 1024**2


@dataclass(frozen=True)
class Finding:
    """What was found, in one sentence."""

    words: str
    is_fault: bool = False


def examine(store: Store) -> Iterator[Finding]:
    """Check an open database in every way; takes as long as reading all of it."""
    yield Finding(f"{store.database} has schema version {SCHEMA_VERSION}, this release's")
    try:
        yield from _sqlite(store) if store.database.is_sqlite else _postgresql(store)
        yield from _jobs(store)
    except SQLAlchemyError as error:
        yield Finding(f"the database cannot be read: {getattr(error, 'orig', error)}", True)


def _sqlite(store: Store) -> Iterator[Finding]:
    with store.database.reading() as session:
        run = session.connection().exec_driver_sql
        errors = [str(row[0]) for row in run(f"PRAGMA integrity_check({MOST_ERRORS_TOLD})")]
        orphans = len(run("PRAGMA foreign_key_check").all())
        mode = run("PRAGMA journal_mode").scalar()
    if errors == ["ok"]:
        yield Finding("SQLite's integrity check finds no fault")
    else:
        yield from (Finding(f"SQLite's integrity check: {error}", True) for error in errors)
    if orphans:
        yield Finding(f"{orphans} rows belong to jobs or trials that do not exist", True)
    kind = remote_kind(store.database.url)
    if kind is None:
        yield Finding(f"its file is on this machine (journal mode {mode})")
    else:
        words = f"its file is on a network file system ({kind}), in journal mode {mode}"
        yield Finding(words, is_fault=mode == "wal")
    file = Path(str(store.database.url.database))
    if file.exists():
        used, free = file.stat().st_size, shutil.disk_usage(file.parent).free
        words = f"it takes {describe_bytes(used)}; {describe_bytes(free)} are free on its disk"
        yield Finding(words, is_fault=free < LEAST_FREE_BYTES)


def _postgresql(store: Store) -> Iterator[Finding]:
    with store.database.reading() as session:
        size = "SELECT pg_database_size(current_database())"
        used = session.connection().exec_driver_sql(size).scalar()
    yield Finding(f"it takes {describe_bytes(int(used or 0))}; PostgreSQL's pg_amcheck checks more")


def _jobs(store: Store) -> Iterator[Finding]:
    bounds = select(func.min(JobRow.created_at), func.max(JobRow.last_contact_at))
    with store.database.reading() as session:
        times = session.execute(bounds).one()
        ids = list(session.scalars(select(JobRow.id).order_by(JobRow.created_at)))
    readable = 0
    for job_id in ids:
        try:
            store.job(job_id)
            store.tensors(job_id)
            store.trials(job_id)
        except UnknownJob:  # deleted since
            continue
        except Exception as error:
            yield Finding(f"job {job_id} cannot be read: {error!r}", True)
            continue
        readable += 1
    bounded = [f"{datetime.fromtimestamp(at):%F %T}" for at in times if at is not None]
    between = ", from {} to {}".format(*bounded) if bounded else ""
    yield Finding(f"{readable} of {len(ids)} jobs can be read{between}")
