"""Who listens to a model in the place of an agent, and to what the client logs; and what fails on
purpose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from bagua_client.tunable.tunable import Nobody


class EachStep(Nobody):
    """Calls a function at the end of each step's communication."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def reduced(self) -> None:
        self._call()


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines of that level and above that the client logs meanwhile, in this process."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bagua_client")
    before = logger.level
    logger.addHandler(handler)
    if level < logging.WARNING:
        logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def fails_on_purpose(
    owner: Any, name: str, is_on: bool, error: type[Exception]
) -> Iterator[list[int]]:
    """A function or property of the owner fails meanwhile; what it gives has an entry for each
    failure."""
    hits: list[int] = []

    def fail(*_: object, **__: object) -> None:
        hits.append(1)
        raise error(f"{name} fails on purpose\nand says more")

    is_property = isinstance(vars(owner).get(name), property)
    made = property(fail) if is_property else fail
    with mock.patch.object(owner, name, made) if is_on else nullcontext():
        yield hits
