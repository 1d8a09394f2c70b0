"""Answers: messages as JSON, downloads, and 304 where nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flask import Response, request
from pydantic import BaseModel

UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def answer(message: BaseModel, status: int = 200) -> Response:
    """The message as JSON."""
    return Response(message.model_dump_json(), status, content_type="application/json")


def answer_if_changed(message: BaseModel) -> Response:
    """The message as JSON; 304 if the client already has this version (``If-None-Match``)."""
    response = answer(message)
    response.cache_control.no_cache = True
    response.add_etag()
    response.make_conditional(request)
    return response


def download(text: str | Iterator[str], content_type: str, job_name: str, ending: str) -> Response:
    """A download, named after the job; its parts are sent as they are made."""
    response = Response(text, content_type=content_type)
    name = UNSAFE.sub("-", job_name).strip("-.")[:80] or "job"
    response.headers.set("Content-Disposition", "attachment", filename=f"{name}{ending}")
    return response
