"""What is told of a step beside its times, which an earlier service may not know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bagua_client.service_client import JobState, StepTimes
from bagua_client.transport import ServiceRefused

logger = logging.getLogger(__name__)

# By name what a tuning does without; the newest first, which fewer services know.
CONSEQUENCES = {
    "complexity": "the complexity of batches, so longer batches count as slower steps",
    "compute_seconds": "computing times, so it cannot find a slow rank",
}


class OptionalFields:
    """Leaves out what the service refuses; after some refusals in a row, for good.

    Args:
        most_refusals: of one field.
    """

    def __init__(self, most_refusals: int) -> None:
        self._most_refusals = most_refusals
        self._refusals = dict.fromkeys(CONSEQUENCES, 0)

    def send(
        self, steps: Sequence[StepTimes], post: Callable[[list[StepTimes]], JobState]
    ) -> JobState:
        """Tell the steps with as much as the service takes. Raises what ``post`` does."""
        given_up = [name for name in CONSEQUENCES if self._refusals[name] >= self._most_refusals]
        told = _without(steps, given_up)
        left = [n for n in CONSEQUENCES if any(getattr(step, n) is not None for step in told)]
        for refused in range(len(left) + 1):
            try:
                state = post(_without(told, left[:refused]))
            except ServiceRefused as error:
                if refused == len(left):
                    raise
                reason = error
            else:
                break
        # It took the rest: a tuning does without these.
        for place, name in enumerate(left):
            self._refusals[name] = self._refusals[name] + 1 if place < refused else 0
            if self._refusals[name] == self._most_refusals:
                logger.warning(
                    "autotune: the service does not accept %s (%s)", CONSEQUENCES[name], reason
                )
        return state


def _without(steps: Sequence[StepTimes], names: Collection[str]) -> list[StepTimes]:
    nothing: dict[str, Any] = dict.fromkeys(names)
    return [step._replace(**nothing) for step in steps]
