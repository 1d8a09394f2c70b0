"""Errors on the wire: always RFC 9457 ``application/problem+json``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from flask import Flask, Response, abort, request
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from bagua_autotune.store import UnknownJob, UnknownTrial

logger = logging.getLogger(__name__)

Message = TypeVar("Message", bound=BaseModel)
MOST_ERRORS_NAMED = 3
# Each error takes some microseconds and a kilobyte, and pydantic builds all of them or none.
MOST_ERRORS_BUILT = 1000
LONGEST_DETAIL = 2000
RETRY_AFTER_SECONDS = 2


class ErrorDocument(BaseModel):
    """RFC 9457: ``detail`` is a sentence that says what is wrong."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    type: str = "about:blank"
    title: str
    status: int
    detail: str


def failure(status: int, detail: str) -> Response:
    """A response that says in one sentence what is wrong."""
    body = ErrorDocument(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(body.model_dump_json(), status, content_type="application/problem+json")


def parse(message: type[Message]) -> Message:
    """The request's body as a message; aborts with 400 (not JSON) or 422 (not valid)."""
    try:
        return message.model_validate_json(request.get_data())
    except ValidationError as error:
        abort(*refusal(error))


def query_number(name: str, low: int, high: int) -> int | None:
    """A whole number of the query string, if it is given; aborts with 422 if it is not valid."""
    text = request.args.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        abort(422, f"{name}: must be a whole number from {low} to {high}.")
    return int(text)


def refusal(error: ValidationError) -> tuple[int, str]:
    """A status, and one sentence that names the wrong fields."""
    count = error.error_count()
    if count > MOST_ERRORS_BUILT:
        return 422, f"{count} fields are wrong or unknown."
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return 400, "The body is not JSON."
    texts = []
    for item in found[:MOST_ERRORS_NAMED]:
        where = ".".join(str(part) for part in item["loc"]) or "body"
        texts.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    if len(found) > MOST_ERRORS_NAMED:
        texts.append(f"and {count - MOST_ERRORS_NAMED} more")
    return 422, "; ".join(texts)[:LONGEST_DETAIL] + "."


def install(app: Flask, count_store_error: Callable[[SQLAlchemyError], None]) -> None:
    """Answer every error of the app with an ErrorDocument; count the store's errors."""

    @app.errorhandler(HTTPException)
    def _http(error: HTTPException) -> Response:
        response = failure(error.code or 500, error.description or "")
        for name, value in error.get_headers():
            if name.lower() not in ("content-type", "content-length"):
                response.headers[name] = value
        return response

    @app.errorhandler(UnknownJob)
    def _unknown_job(error: UnknownJob) -> Response:
        return failure(404, f"There is no job {str(error)!r}; register it first.")

    @app.errorhandler(UnknownTrial)
    def _unknown_trial(error: UnknownTrial) -> Response:
        return failure(409, f"The job has no trial {error}; GET its state to see the current one.")

    @app.errorhandler(SQLAlchemyError)
    def _store(error: SQLAlchemyError) -> Response:
        count_store_error(error)
        logger.error("the store failed: %s", error)
        response = failure(503, "The database does not answer at present; try again.")
        response.headers["Retry-After"] = RETRY_AFTER_SECONDS
        return response

    @app.errorhandler(Exception)
    def _bug(error: Exception) -> Response:
        logger.exception("%s %r failed", request.method, request.path)
        return failure(500, "The service failed; its log says why.")
