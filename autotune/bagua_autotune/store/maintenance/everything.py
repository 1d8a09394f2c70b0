"""Deletes all that is stored on this host: databases, and the copies that trainings keep."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import parse, shown
from bagua_autotune.store.engine.reserve import ENDING
from bagua_autotune.store.engine.tables import Base, SchemaRow
from bagua_autotune.store.errors import StoreError, trouble
from bagua_autotune.store.maintenance.backups import BESIDE, unused
from bagua_autotune.store.maintenance.retention import copies_folder


def found(urls: Sequence[str]) -> list[str]:
    """What would be deleted, in words, of these databases and of the copies."""
    there = [shown(parse(url)) for url in urls if _file(url) is None or _files(url)]
    copies = copies_folder()
    return [*there, *([f"the folder {copies}"] if copies.exists() else [])]


def delete(urls: Sequence[str]) -> None:
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
