"""Looks at what a user trains, before it is tuned: an error in one is a reason not to tune it, and
never an error of the training.

What looks by itself answers with that reason (:func:`a_look`), which the ranks then tell one
another. What they make of a model once all have answered goes by :func:`together`: where one rank
fails, none goes on, so that no rank waits for another that has given up.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from bagua_client.communication.agreement import attempt
from bagua_client.tunable.observers import in_a_line

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
    group: dist.ProcessGroup,
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
    if dist.get_rank(group) == int(ranks.partition(",")[0]):
        logger.warning("autotune is off: %s (%s)", reason, error.splitlines()[0])
    raise NotTuned(f"{reason}; see its log")


def seen(look: Callable[[], T], otherwise: T) -> T:
    """What ``look`` finds; ``otherwise`` where it fails, which something else is a reason of."""
    try:
        return look()
    except Exception as error:
        logger.debug("a look at the model has failed", exc_info=error)
        return otherwise
