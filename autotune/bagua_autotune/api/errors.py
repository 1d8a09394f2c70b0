"""Errors on the wire: always RFC 9457 ``application/problem+json``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from http import HTTPStatus

from flask import Flask, Response, abort, request
from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from bagua_autotune.store.errors import UnknownJob, UnknownTrial, trouble

logger = logging.getLogger(__name__)

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


def query_number(name: str, low: int, high: int) -> int | None:
    """A whole number of the query string, if it is given; aborts with 422 if it is not valid."""
    text = request.args.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        abort(422, f"{name}: must be a whole number from {low} to {high}.")
    return int(text)


def query_flag(name: str) -> bool:
    """Whether the query string says true; aborts with 422 if it says neither true nor false."""
    text = request.args.get(name, "false")
    if text not in ("true", "false"):
        abort(422, f"{name}: must be true or false.")
    return text == "true"


def install(app: Flask, count_store_error: Callable[[SQLAlchemyError], None]) -> None:
    """Answer every error of the app with an ErrorDocument; count the store's errors."""
    # For a path with // werkzeug would answer a redirect, which is a page of HTML.
    app.url_map.merge_slashes = False

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
        response = failure(503, trouble(error))
        response.headers["Retry-After"] = RETRY_AFTER_SECONDS
        return response

    @app.errorhandler(Exception)
    def _bug(error: Exception) -> Response:
        logger.exception("%s %r failed", request.method, request.path)
        return failure(500, "The service failed; its log says why.")
