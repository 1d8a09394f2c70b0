"""Statements that are carried out on the driver's own connections (see database)."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sqlalchemy import Dialect


class Statement:
    """A statement of SQLAlchemy whose parameters have names; compiled once for each driver."""

    def __init__(self, clause: Any) -> None:
        self._clause = clause
        self._compiled: dict[str, tuple[str, Mapping[str, Any]]] = {}
        named: Any = namedtuple
        names = [column.key for column in self._clause.exported_columns]
        self.make_row: Callable[[Any], Any] = named("Row", names, rename=True)._make

    def compiled(self, dialect: Dialect) -> tuple[str, Mapping[str, Any]]:
        """Its text, and the values that it has already."""
        found = self._compiled.get(dialect.driver)
        if found is None:
            style = "named" if dialect.driver in ("pysqlite", "pg8000") else "pyformat"
            of_driver: Any = type(dialect)
            made = self._clause.compile(dialect=of_driver(paramstyle=style))
            found = self._compiled[dialect.driver] = str(made), made.params
        return found


class Run(Protocol):
    """Runs one statement, and returns its rows."""

    def __call__(self, statement: Statement, **values: Any) -> list[Any]: ...
