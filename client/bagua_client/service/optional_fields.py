"""Fields of a reported step that an earlier service may not accept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bagua_client.service.client import JobState, StepTimes
from bagua_client.service.transport import ServiceRefused

logger = logging.getLogger(__name__)

# By name what the log says when the service does not accept it. The newest come first: fewer
# services know them.
CONSEQUENCES = {
    "complexity": "the complexity of batches, so longer batches count as slower steps",
    "compute_seconds": "computing times, so it cannot find a slow rank",
}


class OptionalFields:
    """Leaves out the fields that the service refuses.

    Args:
        most_refusals: after so many in a row a field is left out for good.
    """

    def __init__(self, most_refusals: int) -> None:
        self._most_refusals = most_refusals
        self._refusals = dict.fromkeys(CONSEQUENCES, 0)

    def send(
        self, steps: Sequence[StepTimes], post: Callable[[list[StepTimes]], JobState]
    ) -> JobState:
        """Report the steps with all fields that the service accepts. Raises what ``post`` does."""
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
        # The service accepted the rest.
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
