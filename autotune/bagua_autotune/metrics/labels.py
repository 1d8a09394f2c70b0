"""Why something happened, in a few fixed words: a label must not grow with what clients say."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune.model import reasons
from bagua_autotune.store.errors import NoAnswer

# All that a trial fails for: the ranks could not, or would not, run it together; or it harmed them;
# or it was a whole run, which failed.
FAILURES = (reasons.DISAGREEMENT_CODE, reasons.DIVERGED_CODE, reasons.RUN_FAILED_CODE)
STORE_ERRORS = ("busy", "unavailable", "statement", reasons.OTHER_CODE)


def of_store_error(error: SQLAlchemyError) -> str:
    """Label an error: busy: waited too long for its turn; unavailable: no database; statement: our
    mistake.
    """
    if isinstance(error, PoolTimeout) or "database is locked" in str(error):
        return "busy"
    if isinstance(error, (OperationalError, InterfaceError, NoAnswer)):
        return "unavailable"
    return "statement" if isinstance(error, DBAPIError) else reasons.OTHER_CODE
