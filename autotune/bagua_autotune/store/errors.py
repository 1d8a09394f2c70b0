"""The store's errors beside SQLAlchemy's, and what a failed database is to a stranger."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import RUNS, Api

NO_ANSWER = "The database does not answer at present; try again."
DISK_FULL = "The database's disk is full: nothing is stored until there is room; then try again."
FILE_LOST = (
    "The database's file was deleted or replaced while the service used it: nothing is stored, and "
    "the service's log says what to do."
)
READ_ONLY = "The database is read-only at present: nothing is stored."
DAMAGED = "The database is damaged; `bagua-autotune restore` puts a backup in its place."
# What errors say: SQLite's words, and PostgreSQL's SQLSTATEs, as its words may be translated.
SIGNS = (
    ("disk is full", DISK_FULL),
    ("no space left on device", DISK_FULL),
    ("53100", DISK_FULL),
    ("readonly database", READ_ONLY),
    ("25006", READ_ONLY),
    ("disk image is malformed", DAMAGED),
    ("not a database", DAMAGED),
)
REMEDIES = {
    NO_ANSWER: "look whether it runs, and whether this machine and user may use it",
    DISK_FULL: "make room on its disk, or delete jobs (`bagua-autotune prune --older-than DAYS`)",
    READ_ONLY: "let this user write the file and its folder, or name the server that writes",
    DAMAGED: "stop the service, and put a backup in its place (`bagua-autotune restore FILE`)",
}
TABLE_IN_USE = ("55p03", "40p01")  # a lock that it waited too long for, and a deadlock


class StoreError(Exception):
    """The database cannot be used; the message says why and what to do."""


class NoDatabase(StoreError):
    """There is no database yet, and none is to be created."""


class OtherSchema(StoreError):
    """The database has the schema of another release."""


class NoAnswer(SQLAlchemyError):
    """The database server gave no answer a moment ago, so it is not asked now."""


class FileLost(SQLAlchemyError):
    """What is written to the database's file would be lost; the message says why and what to do."""


class DiskFull(SQLAlchemyError):
    """There is no room beside the database's file."""


class UnknownJob(Exception):
    """Raised where no job has this id."""


class UnknownTrial(Exception):
    """The job has no trial of this index."""


class JobLives(Exception):
    """The job's training may still run."""

    def __init__(self, job_id: str, ago: str, protocol: Api) -> None:
        what, self.can_be_forced = "training", protocol != "v1"
        then = (
            "End it first, or force it: the training then goes on; while it is being tuned it "
            "registers again, and is tuned from its beginning."
        )
        if protocol in RUNS:
            what = "search"
            then = "End it first, or force it: the search then goes on without being stored."
        elif not self.can_be_forced:
            then = "End it first: Bagua's own workers would fail without their job."
        super().__init__(
            f"The {what} of job {job_id} may still run: it was heard of {ago} ago. {then}"
        )


class JobConflict(Exception):
    """Raised where another job has this id."""


def trouble(error: SQLAlchemyError) -> str:
    """What is wrong with the database, in a sentence without paths or names."""
    if isinstance(error, FileLost):
        return FILE_LOST
    if isinstance(error, DiskFull):
        return DISK_FULL
    said = _said(error)
    return next((words for sign, words in SIGNS if sign in said), NO_ANSWER)


def remedy(error: SQLAlchemyError) -> str:
    """What to do about it, in a part of a sentence."""
    return REMEDIES.get(trouble(error), REMEDIES[NO_ANSWER])


def is_table_in_use(error: SQLAlchemyError) -> bool:
    """Whether PostgreSQL gave the statement up because others use what it wanted to change."""
    return any(sign in _said(error) for sign in TABLE_IN_USE)


def _said(error: SQLAlchemyError) -> str:
    orig = getattr(error, "orig", None) or error
    return f"{getattr(orig, 'sqlstate', '')} {orig}".lower()
