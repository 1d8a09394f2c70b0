"""Calls what only observes a training: an error in that is never an error of the training.

Hooks on gradients, buckets, optimizers and forward passes observe, as do clocks, recordings and
what the training reports. All of them are called through here. After an error the rank goes on to
take part in every message of the ranks. In its next one it tells the others, and all stop the
tuning in the same step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Observers:
    """The observers of one model, on one rank.

    Attributes:
        has_failed: whether one of them has. What they know is then of no use.
    """

    def __init__(self, rank: int = 0) -> None:
        self.has_failed = False
        self._rank = rank
        self._lock = threading.Lock()

    def call(self, observe: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What ``observe`` returns; None, and a line in the log, if it fails. From any thread."""
        try:
            return observe(*args, **kwargs)
        except Exception as error:
            self._failed(error)
            return None

    def tell(self, observe: Callable[[T], object], told: T) -> None:
        """Give ``observe`` what the training reports.

        Raises:
            TypeError: that is nothing to report, which is the training's own mistake.
        """
        try:
            observe(told)
        except TypeError:
            raise
        except Exception as error:
            self._failed(error)

    @contextmanager
    def around(self, observe: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """The context that ``observe`` makes; only what runs inside may raise."""
        context = ExitStack()
        self.call(lambda: context.enter_context(observe()))
        try:
            yield
        finally:
            self.call(context.close)

    def _failed(self, error: Exception) -> None:
        """Log the first failure: later ones may follow from it."""
        with self._lock:
            is_first, self.has_failed = not self.has_failed, True
        if is_first:
            logger.error(
                "autotune stops: an error in observing the training on rank %d, which goes on (%s)",
                self._rank,
                in_a_line(error),
            )
        logger.debug("what observes the training has failed", exc_info=error)


def in_a_line(error: Exception) -> str:
    """The error in one line, with its place; torch's further lines are about itself."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__} in {place}: {first}"
