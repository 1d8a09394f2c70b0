"""Who listens to a model in the place of an agent, and to what the client logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
