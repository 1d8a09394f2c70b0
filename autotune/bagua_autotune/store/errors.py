"""The store's errors beside SQLAlchemy's."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError


class StoreError(Exception):
    """The database cannot be used; the message says why and what to do."""


class NoDatabase(StoreError):
    """There is no database yet, and none is to be created."""


class OtherSchema(StoreError):
    """The database has the schema of another release."""


class NoAnswer(SQLAlchemyError):
    """The database server gave no answer a moment ago, so it is not asked now."""


class UnknownJob(Exception):
    """No job has this id."""


class UnknownTrial(Exception):
    """The job has no trial of this index."""


class JobConflict(Exception):
    """Another job has this id."""
