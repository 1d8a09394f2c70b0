"""Why a model is not tuned yet: what its agent waits for, in words."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bagua_client.agent.job import is_warming_up
from bagua_client.announcement import announce
from bagua_client.environment import Environment
from bagua_client.tunable.tunable import Tunable

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""A training that is not tuned by then says once what that waits for."""


def awaited(
    tunable: Tunable, reductions: int, must_wait: bool | None, environment: Environment
) -> str:
    """Return what the first trial waits for.

    Args:
        reductions: how many backward passes have ended in which gradients were synchronised.
        must_wait: whether another model of this job goes first; None: this rank does not know.
    """
    is_left = tunable.is_left  # Then there is no model to ask.
    if not is_left and (refusal := tunable.refusal):
        return f"the end of what prevents it: {refusal}"
    if not is_left and tunable.stands_back:
        return "the end of join(): inside it the ranks may end one by one, and nothing is changed"
    if not reductions:
        return "the first backward pass that synchronises gradients (not under no_sync or no_grad)"
    if not tunable.order_is_agreed:
        return "the order in which gradients become ready, which the next steps show"
    if must_wait:
        return "another model of this job, which is tuned first"
    if not is_left and is_warming_up(tunable, environment):
        return f"the end of an algorithm's warm-up (the model trains with {tunable.algorithm.name})"
    if must_wait is None:
        return "rank 0, which waits for its turn among the job's models, or for the service"
    return "the service, which has not answered with a configuration to try"


class Impatience:
    """Says what a tuning waits for, where that takes long. One line in all, and one at the end.

    Args:
        awaits: what for; empty: it waits no longer.
        speaks: whether this rank says it.
    """

    def __init__(self, awaits: Callable[[], str], speaks: bool) -> None:
        self._awaits = awaits
        self._from_seconds = time.monotonic()
        self._may_speak = self._may_end = speaks

    def step(self) -> None:
        """A forward pass begins."""
        if self._may_speak and time.monotonic() - self._from_seconds >= PATIENCE_SECONDS:
            self._may_speak = False
            if what := self._awaits():
                announce(logger, "autotune: the model is not tuned yet; this waits for %s", what)

    def end(self) -> None:
        """The training is over on this rank."""
        if self._may_end and (what := self._awaits()):
            announce(logger, "autotune: the model was never tuned; this waited for %s", what)
        self.forget()

    def forget(self) -> None:
        """Say nothing more."""
        self._may_speak = self._may_end = False
