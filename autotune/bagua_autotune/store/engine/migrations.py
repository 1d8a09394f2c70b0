"""The schema: created in an empty database, upgraded in one of an older release.

All of it is one transaction, on SQLite and PostgreSQL alike. So replicas that start together take
turns, and a failure leaves the database as it was. On PostgreSQL replicas of an older release go on
using it meanwhile and afterwards, so a new column has a default, and no statement waits long for a
table: who uses that table would wait behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from sqlalchemy import Connection, Engine, insert, inspect, select, text, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from bagua_autotune.store.engine.location import shown
from bagua_autotune.store.engine.tables import (
    SCHEMA_VERSION,
    Base,
    ChoreRow,
    ClaimRow,
    LifeRow,
    ProfileRow,
    SchemaRow,
)
from bagua_autotune.store.errors import OtherSchema, StoreError, is_table_in_use

logger = logging.getLogger(__name__)

# Any number that other users of the same PostgreSQL database are unlikely to lock.
POSTGRESQL_LOCK = 0x6261677561
# Below PostgreSQL's deadlock_timeout of 1 s: what is upgraded gives way, and no request.
LOCK_SECONDS = 0.5
PAUSE_SECONDS = 1.0
OF_V2 = "SELECT trials.id FROM trials JOIN jobs ON jobs.id = job_id WHERE protocol = 'v2'"
# Somebody may be making a copy of the whole database.
PATIENCE_SECONDS = 3600.0


def prepare(engine: Engine) -> None:
    """Give the database the schema of this release.

    Raises:
        OtherSchema: its schema is newer, or too old, or could not be upgraded.
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
    with engine.connect() as connection:
        return _version(connection) != SCHEMA_VERSION


def check(engine: Engine) -> None:
    """Check that the database has the schema of this release.

    Raises:
        OtherSchema: it has another schema.
        StoreError: it has none.
    """
    with engine.connect() as connection:
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
    try:
        for older in range(version, SCHEMA_VERSION):
            _run(connection, MIGRATIONS[older])
        connection.execute(update(SchemaRow).values(version=SCHEMA_VERSION))
    except SQLAlchemyError as error:
        if is_table_in_use(error):
            raise
        reason = error.args[0] if error.args else error
        raise OtherSchema(
            f"the database {database} stays at schema version {version}: it could "
            f"not be upgraded to {SCHEMA_VERSION}: {reason}"
        ) from error


def _run(connection: Connection, steps: Iterable[str | dict[str, str] | type[Base]]) -> None:
    for step in steps:
        if isinstance(step, type):
            Base.metadata.tables[step.__tablename__].create(connection)
            continue
        statement = step if isinstance(step, str) else step.get(connection.dialect.name)
        if statement is not None:
            connection.exec_driver_sql(statement)


def refuse_unknown(version: int, database: str) -> None:
    """Raise OtherSchema unless this release can use or upgrade a database of that schema."""
    missing = [older for older in range(version, SCHEMA_VERSION) if older not in MIGRATIONS]
    if version > SCHEMA_VERSION or missing:
        age = "newer" if version > SCHEMA_VERSION else "older"
        raise OtherSchema(
            f"the database {database} has the {age} schema version {version}, this "
            f"release needs {SCHEMA_VERSION}: use a matching release or another --database"
        )


# From each version to the next: statements, of both databases or by database, and tables that are
# created in today's form (whoever changes such a table must write its older form here).
MIGRATIONS: dict[int, tuple[str | dict[str, str] | type[Base], ...]] = {
    # Profiles, rounds, and the keys of similar jobs.
    2: (
        "ALTER TABLE jobs ADD COLUMN round BIGINT DEFAULT '0' NOT NULL",
        "ALTER TABLE jobs ADD COLUMN fingerprint TEXT DEFAULT '' NOT NULL",
        "ALTER TABLE jobs ADD COLUMN model_key TEXT DEFAULT '' NOT NULL",
        "ALTER TABLE jobs ADD COLUMN network_key TEXT DEFAULT '' NOT NULL",
        "ALTER TABLE jobs ADD COLUMN inherited JSON",
        "ALTER TABLE trials ADD COLUMN round BIGINT DEFAULT '0' NOT NULL",
        "CREATE INDEX ix_jobs_fingerprint ON jobs (fingerprint)",
        "CREATE INDEX ix_jobs_model_key ON jobs (model_key)",
        "CREATE INDEX ix_jobs_network_key ON jobs (network_key)",
        {
            "sqlite": "UPDATE jobs SET fingerprint = json_extract(spec, '$.fingerprint')",
            "postgresql": "UPDATE jobs SET fingerprint = spec ->> 'fingerprint'",
        },
        ProfileRow,
    ),
    # Revisions, and computing times. SQLite reads a row up to the last column that it needs. New
    # columns come last, so the tensors, which take megabytes, are moved behind them. SQLite adds no
    # column without a default.
    3: (
        "ALTER TABLE jobs ADD COLUMN revision BIGINT DEFAULT '0' NOT NULL",
        {
            "sqlite": "ALTER TABLE jobs ADD COLUMN moved JSON DEFAULT '[]' NOT NULL",
            "postgresql": "ALTER TABLE jobs ALTER COLUMN tensors SET DEFAULT '[]'",
        },
        {"sqlite": "UPDATE jobs SET moved = tensors"},
        {"sqlite": "ALTER TABLE jobs DROP COLUMN tensors"},
        {"sqlite": "ALTER TABLE jobs RENAME COLUMN moved TO tensors"},
        {
            "sqlite": "CREATE INDEX jobs_by_creation ON jobs "
            "(created_at, id, name, phase, revision, last_contact_at, ended_at)",
            "postgresql": "CREATE INDEX jobs_by_creation ON jobs (created_at, id)",
        },
        "ALTER TABLE observations ADD COLUMN slowest FLOAT",
        "ALTER TABLE observations ADD COLUMN compute JSON",
        {
            "sqlite": "UPDATE observations SET slowest = (SELECT max(value) FROM "
            f'json_each("values")) WHERE trial_id IN ({OF_V2})',
            "postgresql": "UPDATE observations SET slowest = (SELECT max(CAST(value AS FLOAT)) "
            f'FROM json_array_elements_text("values") AS value) WHERE trial_id IN ({OF_V2})',
        },
    ),
    # Keys of events; late and deleted steps, and the cost of each step; upkeep; claims.
    4: (
        "ALTER TABLE events ADD COLUMN key VARCHAR(64)",
        "CREATE UNIQUE INDEX events_by_key ON events (job_id, key)",
        "ALTER TABLE trials ADD COLUMN late_steps BIGINT DEFAULT '0' NOT NULL",
        "ALTER TABLE trials ADD COLUMN thinned_steps BIGINT DEFAULT '0' NOT NULL",
        "ALTER TABLE observations ADD COLUMN cost FLOAT",
        *(ChoreRow, ClaimRow),
    ),
    5: (LifeRow,),
    6: ("ALTER TABLE observations ADD COLUMN complexity FLOAT",),
    7: ("ALTER TABLE trials ADD COLUMN memory JSON",),
    # Revisions of families. Replicas of this release remember a family for as long as its revision
    # is the same; those of the release before, which may still serve, do not raise it. Two ranks
    # would be told different buckets.
    8: (
        "ALTER TABLE families ADD COLUMN revision BIGINT DEFAULT '0' NOT NULL",
        {
            "postgresql": "CREATE FUNCTION raise_revision() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN NEW.revision = OLD.revision + 1; RETURN NEW; END'"
        },
        {
            "postgresql": "CREATE TRIGGER revised_by_older BEFORE UPDATE ON families FOR EACH ROW "
            "WHEN (NEW.revision = OLD.revision) EXECUTE FUNCTION raise_revision()"
        },
    ),
}
