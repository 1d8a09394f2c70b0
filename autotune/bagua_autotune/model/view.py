"""What views of a job are made of; they are what goes over the wire, and are read back there.
Apart, as views, API and command line all stand on it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter

_DATETIME = TypeAdapter(datetime)


def _seconds(at: Any) -> Any:
    return _DATETIME.validate_python(at).timestamp() if isinstance(at, str) else at


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


Moment = Annotated[
    float, BeforeValidator(_seconds), PlainSerializer(_datetime, return_type=datetime)
]
"""Seconds since the epoch; on the wire date and time."""


class View(BaseModel):
    """Something that is shown of a job."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)
