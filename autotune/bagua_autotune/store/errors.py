"""What the store raises beside SQLAlchemy's own errors."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError


class StoreError(Exception):
    """The database cannot be used; the message says why and what to do."""


class NoDatabase(StoreError):
    """There is none yet, and none is to be made."""


class OtherSchema(StoreError):
    """It has the schema of another release."""


class NoAnswer(SQLAlchemyError):
    """The database server is not asked at present, as it gave no answer."""


class UnknownJob(Exception):
    """No job has this id."""


class UnknownTrial(Exception):
    """The job has no trial of this index."""


class JobConflict(Exception):
    """The job's id is taken by a job of other content."""
