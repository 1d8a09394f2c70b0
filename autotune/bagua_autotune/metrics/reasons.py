"""Why something happened, in a few fixed words: a label must not grow with what clients say."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune.model.job import Result
from bagua_autotune.tuning import decision

OTHER = "other"
WINNER = "winner"
DISAGREEMENT = "disagreement"
IMPOSSIBLE = "impossible"
FAILURES = (DISAGREEMENT, IMPOSSIBLE, OTHER)
STORE_ERRORS = ("busy", "unavailable", "statement", OTHER)
# Result.reason is a sentence for people.
RESULTS = {
    decision.NOTHING_FASTER: "nothing_faster",
    decision.BEST_BEFORE: "earlier_best",
    decision.NOTHING_TO_TRY: "nothing_to_try",
    decision.TOO_FEW_STEPS: "too_few_steps",
}


def of_result(result: Result) -> str:
    """Why a job was left with what it has."""
    if result.kept == "winner":
        return WINNER
    if "disagreed" in result.reason:
        return DISAGREEMENT
    return RESULTS.get(result.reason, OTHER)


def of_failure(failure: str) -> str:
    """Why a trial failed, from what rank 0 said."""
    if "disagreed" in failure:
        return DISAGREEMENT
    return IMPOSSIBLE if "can carry out" in failure else OTHER


def of_store_error(error: SQLAlchemyError) -> str:
    """busy: waited too long for its turn; unavailable: no database; statement: our mistake."""
    if isinstance(error, PoolTimeout) or "database is locked" in str(error):
        return "busy"
    if isinstance(error, (OperationalError, InterfaceError)):
        return "unavailable"
    return "statement" if isinstance(error, DBAPIError) else OTHER
