"""The schema: created in an empty database, upgraded by Alembic in one of an older release.

All of it is one transaction, on SQLite and PostgreSQL alike. So replicas that start together take
turns, and a failure leaves the database as it was. On PostgreSQL replicas of an older release go on
using it meanwhile and afterwards, so a new column has a default, and no statement waits long for a
table: who uses that table would wait behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, insert, inspect, select, text, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from bagua_autotune.store.engine.location import shown
from bagua_autotune.store.engine.tables import SCHEMA_VERSION, Base, SchemaRow
from bagua_autotune.store.errors import OtherSchema, StoreError, is_table_in_use

if TYPE_CHECKING:
    from alembic.script import Script

logger = logging.getLogger(__name__)

# Any number that other users of the same PostgreSQL database are unlikely to lock.
POSTGRESQL_LOCK = 0x6261677561
# Below PostgreSQL's deadlock_timeout of 1 s: what is upgraded gives way, and no request.
LOCK_SECONDS = 0.5
PAUSE_SECONDS = 1.0
# Somebody may be making a copy of the whole database.
PATIENCE_SECONDS = 3600.0
REVISIONS = Path(__file__).with_name("revisions")


def prepare(engine: Engine) -> None:
    """Give the database the schema of this release.

    Raises:
        OtherSchema: its schema is newer, or could not be upgraded.
    """
    until, is_told = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        try:
            _prepare(engine)
            return
        except DBAPIError as error:
            if not is_table_in_use(error) or time.monotonic() > until:
                raise
        if not is_told:
            logger.info("the database's tables are in use; it is upgraded between two requests")
            is_told = True
        time.sleep(PAUSE_SECONDS)


def _prepare(engine: Engine) -> None:
    with engine.begin() as connection:
        # On SQLite the transaction has taken the only lock for writing already.
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({POSTGRESQL_LOCK})"))
            connection.execute(text(f"SET LOCAL lock_timeout = {int(1e3 * LOCK_SECONDS)}"))
        version = _version(connection)
        if version is None:
            Base.metadata.create_all(connection)
            connection.execute(insert(SchemaRow).values(version=SCHEMA_VERSION))
        elif version != SCHEMA_VERSION:
            _migrate(connection, version, shown(engine.url))


def is_needed(engine: Engine) -> bool:
    """Whether the database has another schema than this release's, or none."""
    with engine.connect().execution_options(read_only=True) as connection:
        return _version(connection) != SCHEMA_VERSION


def check(engine: Engine) -> None:
    """Check that the database has the schema of this release.

    Raises:
        OtherSchema: it has another schema.
        StoreError: it has none.
    """
    with engine.connect().execution_options(read_only=True) as connection:
        version = _version(connection)
    database = shown(engine.url)
    if version is None:
        raise StoreError(f"the database {database} is empty: no service has used it yet")
    if version != SCHEMA_VERSION:
        refuse_unknown(version, database)
        raise OtherSchema(
            f"the database {database} is of an older release (schema version {version}, this "
            f"one needs {SCHEMA_VERSION}); start this release's service on it once"
        )


def _version(connection: Connection) -> int | None:
    if not inspect(connection).has_table(SchemaRow.__tablename__):
        return None
    return connection.scalar(select(SchemaRow.version))


def _migrate(connection: Connection, version: int, database: str) -> None:
    refuse_unknown(version, database)
    logger.info(
        "the database %s is being upgraded from schema version %d to %d; it may take a while",
        *(database, version, SCHEMA_VERSION),
    )
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    try:
        with Operations.context(MigrationContext.configure(connection)):
            for revision in revisions():
                if int(revision.revision) > version:
                    revision.module.upgrade()
        connection.execute(update(SchemaRow).values(version=SCHEMA_VERSION))
    except SQLAlchemyError as error:
        if is_table_in_use(error):
            raise
        reason = error.args[0] if error.args else error
        raise OtherSchema(
            f"the database {database} stays at schema version {version}: it could "
            f"not be upgraded to {SCHEMA_VERSION}: {reason}"
        ) from error


def revisions() -> Iterator[Script]:
    """What leads from each version of the schema to the next, the oldest first."""
    from alembic.script import ScriptDirectory  # takes long to import, and is seldom needed

    scripts = ScriptDirectory(str(REVISIONS), version_locations=[str(REVISIONS)])
    yield from reversed(list(scripts.walk_revisions()))


def refuse_unknown(version: int, database: str) -> None:
    """Raise OtherSchema unless this release can use or upgrade a database of that schema."""
    if not 1 <= version <= SCHEMA_VERSION:
        age = "newer" if version > SCHEMA_VERSION else "unknown"
        raise OtherSchema(
            f"the database {database} has the {age} schema version {version}, this "
            f"release needs {SCHEMA_VERSION}: use a matching release or another --database"
        )
