"""What only looks at a training: an error in that is never an error of the training.

Before a model is tuned, what looks at it answers with a reason not to (:func:`a_look`), which the
ranks then tell one another. What they make of a model once all have answered goes by
:func:`together`: where one rank fails, none goes on, so that no rank waits for another that has
given up.

While it trains, hooks on gradients, buckets, optimizers and forward passes observe it, as do
clocks, recordings and what the training reports. All of them are called through
:class:`Observers`. After an error the rank goes on to take part in every message of the ranks. In
its next one it tells the others, and all stop the tuning in the same step.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from bagua_client.communication.agreement import Group, attempt, rank_in

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class NotTuned(RuntimeError):
    """Why a model is not tuned; raised on all of its ranks, after a line in the log of one."""


def a_look(look: Callable[P, str]) -> Callable[P, str]:
    """``look``, which answers why something cannot be done, with its own errors as reasons."""

    @functools.wraps(look)
    def answer(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return look(*args, **kwargs)
        except Exception as error:
            logger.debug("a look at the model has failed", exc_info=error)
            rank = dist.get_rank() if dist.is_initialized() else 0
            return f"an error in looking at the model on rank {rank} ({in_a_line(error)})"

    return answer


def together(
    make: Callable[[], T],
    undo: Callable[[T], object],
    group: Group,
    device: torch.device,
) -> T:
    """What ``make`` makes of a model on this rank. All ranks of ``group`` call this together.

    Args:
        make: waits for no other rank.
        undo: what was made, where another rank could not make it.
        device: that the group communicates from.

    Raises:
        NotTuned: a rank could not, as a line in its log says.
    """
    made: list[T] = []
    ranks, error = attempt(lambda: made.append(make()), group, device)
    if not ranks:
        return made[0]
    for each in made:
        undo(each)
    reason = f"an error in looking at the model on rank {ranks}"
    if rank_in(group) == int(ranks.partition(",")[0]):
        logger.warning("autotune is off: %s (%s)", reason, error.splitlines()[0])
    raise NotTuned(f"{reason}; see its log")


def seen(look: Callable[[], T], otherwise: T) -> T:
    """What ``look`` finds; ``otherwise`` where it fails, which something else is a reason of."""
    try:
        return look()
    except Exception as error:
        logger.debug("a look at the model has failed", exc_info=error)
        return otherwise


def why_not_timed(devices: Iterable[torch.device]) -> str:
    """Why steps on these devices cannot be timed; empty: they can."""
    unknown = sorted({device.type for device in devices} - {"cpu", "cuda"})
    return f"steps on devices of type {', '.join(unknown)} cannot be timed here" if unknown else ""


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
