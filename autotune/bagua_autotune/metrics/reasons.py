"""Why something happened, in a few fixed words: a label must not grow with what clients say."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune.model.job import Result
from bagua_autotune.store.errors import NoAnswer
from bagua_autotune.tuning import decision

OTHER = "other"
# All that a trial fails for: the ranks could not, or would not, run it together; or it harmed them.
FAILURES = (decision.DISAGREEMENT_CODE, decision.DIVERGED_CODE)
STORE_ERRORS = ("busy", "unavailable", "statement", OTHER)


def of_result(result: Result) -> str:
    """Why a job was left with what it has."""
    return result.reason_code or _of_older_result(result)


def _of_older_result(result: Result) -> str:
    """Of a release that stored no code: from its sentence."""
    if result.kept == "winner":
        return decision.WINNER_CODE
    if result.reason.startswith("the ranks disagreed"):
        return decision.DISAGREEMENT_CODE
    return decision.REASON_CODES.get(result.reason, OTHER)


def of_store_error(error: SQLAlchemyError) -> str:
    """busy: waited too long for its turn; unavailable: no database; statement: our mistake."""
    if isinstance(error, PoolTimeout) or "database is locked" in str(error):
        return "busy"
    if isinstance(error, (OperationalError, InterfaceError, NoAnswer)):
        return "unavailable"
    return "statement" if isinstance(error, DBAPIError) else OTHER
