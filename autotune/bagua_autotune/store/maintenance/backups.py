"""Copies a SQLite database while it is used, puts a copy in the place of the database, and deletes
all that is stored on this host: databases, and the copies that trainings keep.

What a killed process wrote last is beside the file, in its log (``-wal``). SQLite would replay it
over any file of that name, so a copy must never take the place of a file whose log is left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.store import Store
from bagua_autotune.store.engine import migrations
from bagua_autotune.store.engine.location import FILE_MODE, make_folder, parse, shown
from bagua_autotune.store.engine.sqlite import BUSY_SECONDS, ENDING
from bagua_autotune.store.engine.tables import Base, SchemaRow
from bagua_autotune.store.errors import OtherSchema, StoreError, trouble
from bagua_autotune.store.maintenance.retention import copies_folder

# What SQLite keeps beside a database while it is used.
BESIDE = ("-wal", "-shm", "-journal")
# The bytes that SQLite locks for all who use a file; its file format lays down where they are.
LOCK_BEGIN, LOCK_BYTES = 0x40000000, 512


@dataclass(frozen=True)
class Restored:
    """What is in a database that was restored.

    Attributes:
        last_contact_at: of its newest report, in seconds since the epoch; None: it has no job.
    """

    jobs: int
    last_contact_at: float | None


def backup(url: str, file: Path) -> None:
    """Copy a SQLite database as it is at this moment, also while a service writes to it.

    Raises:
        StoreError: it is no SQLite database or cannot be read; the file exists or cannot be
            written.
    """
    source = _sqlite(url, "pg_dump copies a PostgreSQL database")
    origin = Path(str(source.database))
    if not origin.is_file():
        raise StoreError(f"there is no database {shown(source)}; --database names another")
    if file.exists():
        raise StoreError(f"{file} exists already; name another file")
    part = file.with_name(file.name + ".part")
    try:
        _copy(origin, part)
        os.replace(part, file)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{shown(source)} cannot be copied to {file}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def restore(url: str, file: Path) -> Restored:
    """Put a copy in the place of a SQLite database, which is gone then, with its log.

    If it fails, or is cut off, the database is the old one or the new one, never a mixture.

    Raises:
        StoreError: it is no SQLite database, or one that somebody uses; the copy is missing,
            damaged, of a newer release or none of this service's; there is no room for it.
    """
    target_url = _sqlite(url, "pg_restore puts a copy of a PostgreSQL database back")
    target = Path(str(target_url.database)).resolve()
    if not file.is_file():
        raise StoreError(f"there is no file {file}")
    if target.exists() and target.samefile(file):
        raise StoreError(f"{file} is the database itself; name a copy of it")
    part = target.with_name(target.name + ".part")
    try:
        make_folder(target.parent)
        _copy(file, part)
        restored = _look_into(part, file)
        _give_to_owner(part, target)
        with unused(target):
            for ending in BESIDE:
                target.with_name(target.name + ending).unlink(missing_ok=True)
            os.replace(part, target)
        _note_on_disk(target.parent)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{file} cannot be restored to {target}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return restored


def _sqlite(url: str, otherwise: str) -> URL:
    parsed = parse(url)
    if parsed.get_backend_name() != "sqlite":
        raise StoreError(f"{shown(parsed)} is no SQLite file; {otherwise}")
    return parsed


def _copy(origin: Path, part: Path) -> None:
    """Raises sqlite3.Error if the copy, which only this user may read, is damaged."""
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
    with (
        closing(sqlite3.connect(origin, timeout=BUSY_SECONDS)) as source,
        closing(sqlite3.connect(part)) as copy,
    ):
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # so that the one file holds everything
        (found,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"it is damaged ({found})")


def _look_into(part: Path, file: Path) -> Restored:
    """Raises StoreError unless it is a database that this release can use."""
    with closing(sqlite3.connect(part)) as copy:
        try:
            (version,) = copy.execute("SELECT version FROM schema_version").fetchone()
            jobs, newest = copy.execute(
                "SELECT COUNT(*), MAX(last_contact_at) FROM jobs"
            ).fetchone()
        except (sqlite3.Error, TypeError) as error:
            raise StoreError(f"{file} is no database of this service") from error
    try:
        migrations.refuse_unknown(version, str(file))
    except OtherSchema as error:
        raise StoreError(f"nothing is restored: {error}") from error
    return Restored(jobs, newest)


def _give_to_owner(part: Path, target: Path) -> None:
    """The service's user must be able to use what root restores."""
    owner = (target if target.exists() else target.parent).stat()
    if os.geteuid() == 0:
        os.chown(part, owner.st_uid, owner.st_gid)


@contextmanager
def unused(file: Path) -> Iterator[None]:
    """Keep all others from using the file inside the block. Raises StoreError if somebody does."""
    if not file.exists():
        yield
        return
    try:
        connection = _taken(file)
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise _in_use(file) from error
        with _locked(file):  # SQLite cannot read it: that may be why it is replaced
            yield
        return
    with closing(connection):
        yield


def _taken(file: Path) -> sqlite3.Connection:
    """The only connection to the file, with what was left in its log put into it: should this be
    cut off, the file holds everything. Raises sqlite3.DatabaseError."""
    connection = sqlite3.connect(file, timeout=0, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        connection.execute("BEGIN EXCLUSIVE")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("r+b") as opened:
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, LOCK_BYTES, LOCK_BEGIN)
        except (BlockingIOError, PermissionError) as error:
            raise _in_use(file) from error
        yield


def _in_use(file: Path) -> StoreError:
    return StoreError(
        f"the database {file} is in use, and nothing is changed; stop the service, and whatever "
        "else reads it, first"
    )


def _note_on_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def everything(urls: Sequence[str]) -> list[str]:
    """What would be deleted, in words, of these databases and of the copies."""
    there = [shown(parse(url)) for url in urls if _file(url) is None or _files(url)]
    copies = copies_folder()
    return [*there, *([f"the folder {copies}"] if copies.exists() else [])]


def delete_everything(urls: Sequence[str]) -> None:
    """Delete the databases, with all that is beside them, and the copies.

    Raises:
        StoreError: somebody uses one, or it cannot be deleted; the others may be gone.
    """
    for url in urls:
        file = _file(url)
        if file is None:
            _empty(url)
            continue
        try:
            with unused(file):
                for each in _files(url):
                    each.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{file} cannot be deleted: {error}") from error
    try:
        shutil.rmtree(copies_folder())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"the copies cannot be deleted: {error}") from error


def _file(url: str) -> Path | None:
    """Of a database of SQLite."""
    parsed = parse(url)
    is_file = parsed.get_backend_name() == "sqlite"
    return Path(parsed.database or ":memory:").resolve() if is_file else None


def _files(url: str) -> list[Path]:
    """The files of a database that are there. Its own comes last: SQLite would replay the log of a
    file over another one of its name."""
    file = _file(url)
    endings = (*BESIDE, ENDING, "")
    paths = [file.with_name(file.name + each) for each in endings] if file else []
    return [path for path in paths if path.exists()]


def _empty(url: str) -> None:
    """Delete all rows of a server's database; it stays, and who uses it can go on."""
    with closing(Store(url, as_found=True)) as store:
        try:
            with store.database.writing() as run:
                for table in reversed(Base.metadata.sorted_tables):
                    if table is not SchemaRow.__table__:
                        run(table.delete())
        except SQLAlchemyError as error:
            raise StoreError(f"{store.database} is not emptied: {trouble(error)}") from error
