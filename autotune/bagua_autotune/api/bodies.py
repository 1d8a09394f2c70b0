"""The bodies of requests: how large each may be, and how they are read.

Parsed, a body of empty lists takes two hundred times its size. So its lists and objects are counted
before it is parsed, and so is everything else that becomes a value of its own. It is parsed into
Python's values once, which all errors of it share: parsed by pydantic, each would hold a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from flask import abort, request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from bagua_autotune.model.job import MOST_TENSORS

Message = TypeVar("Message", bound=BaseModel)
LARGEST_BODY_BYTES = 16 * 1024**2
# More than that are in no message but by mistake: the widest is a mapping of 64 entries.
MOST_MEMBERS = 256
MOST_ERRORS_NAMED = 3
# Each error takes some microseconds and a kilobyte, and pydantic builds all of them or none.
MOST_ERRORS_BUILT = 1000
LONGEST_DETAIL = 2000
# Pydantic names Python's types where the sender knows JSON's.
IN_JSON = {
    "tuple_type": "Input should be a valid array",
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "dataclass_type": "Input should be an object",
    "unexpected_keyword_argument": "Extra inputs are not permitted",
}


class Bounds(NamedTuple):
    """The limits of a body.

    Attributes:
        bytes: its length.
        containers: its lists and objects.
        marks: its lists, objects, commas and colons; it has at most one value more. Those inside of
            strings count, too: names hold hardly any.
    """

    bytes: int
    containers: int
    marks: int


# As many values as a tensor, a bucket or a span has, and room for all else.
MARKS_OF_ALL = 15 * MOST_TENSORS
USUAL = Bounds(64 * 1024, 1000, 10_000)
# By the rule of a route, to which another protocol adds its own. One for each tensor, or for each
# step.
BOUNDS = {
    "/api/v2/jobs/<job_id>": Bounds(LARGEST_BODY_BYTES, MOST_TENSORS + 1000, MARKS_OF_ALL),
    "/api/v2/jobs/<job_id>/observations": Bounds(LARGEST_BODY_BYTES, 31_000, MARKS_OF_ALL),
    "/api/v2/jobs/<job_id>/profiles": Bounds(LARGEST_BODY_BYTES, MOST_TENSORS + 10, MARKS_OF_ALL),
    "/api/v2/copies": Bounds(LARGEST_BODY_BYTES, 2 * MOST_TENSORS, MARKS_OF_ALL),
}


def check_length() -> None:
    """Abort with 413 if the request says that its body is longer than it may be."""
    most = _bounds().bytes
    if (request.content_length or 0) > most:
        abort(413, f"The body has {request.content_length} bytes, which exceeds {most}.")


def parse(message: type[Message]) -> Message:
    """The request's body as a message; aborts with 400 (not JSON), 413 (too large) or 422."""
    return parse_both(message, message)


def parse_both(outline: type[BaseModel], message: type[Message]) -> Message:
    """The request's body as a message, once an outline of it was found right; see :func:`parse`."""
    document = _document()
    if message.model_config.get("extra") == "forbid":
        _check_width(document)
    try:
        if outline is not message:
            outline.model_validate(document)
        return message.model_validate(document)
    except ValidationError as error:
        abort(*refusal(error))


def refusal(error: ValidationError) -> tuple[int, str]:
    """A status, and one sentence that names the wrong fields."""
    count = error.error_count()
    if count > MOST_ERRORS_BUILT:
        return 422, f"{count} fields are wrong or unknown."
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for item in found[:MOST_ERRORS_NAMED]:
        where = ".".join(str(part) for part in item["loc"]) or "body"
        what = IN_JSON.get(item["type"], item["msg"].removeprefix("Value error, "))
        texts.append(f"{where}: {what}")
    if len(found) > MOST_ERRORS_NAMED:
        texts.append(f"and {count - MOST_ERRORS_NAMED} more")
    return 422, "; ".join(texts)[:LONGEST_DETAIL] + "."


def _bounds() -> Bounds:
    rule = request.url_rule
    return BOUNDS.get(rule.rule, USUAL) if rule else USUAL


def _document() -> Any:
    """The body's JSON as Python's values."""
    bounds, body = _bounds(), request.get_data(cache=False)
    containers = body.count(b"[") + body.count(b"{")
    if containers > bounds.containers:
        abort(413, f"The body holds {containers} lists and objects; at most {bounds.containers}.")
    if containers + body.count(b",") + body.count(b":") > bounds.marks:
        abort(413, f"The body holds more than {bounds.marks} values.")
    try:
        document = from_json(body)
    except ValueError:
        abort(400, "The body is not JSON.")
    return document


def _check_width(document: Any) -> None:
    """Abort with 422 if an object is too wide: each unknown field is an error of its own, unless
    they are ignored."""
    unseen: list[Any] = [[document]]
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict):
            if len(value) > MOST_MEMBERS:
                abort(
                    422,
                    f"An object has {len(value)} fields; it should have at most {MOST_MEMBERS}.",
                )
            value = value.values()
        unseen += [part for part in value if isinstance(part, (dict, list))]
