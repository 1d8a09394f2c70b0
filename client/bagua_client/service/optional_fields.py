"""Fields of reported steps that an earlier service may not accept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bagua_client.service.client import JobState, StepTimes
from bagua_client.service.transport import ServiceRefused

logger = logging.getLogger(__name__)

MEMORY = "memory"
# By name what the log says when the service does not accept it. The newest come first: fewer
# services know them.
CONSEQUENCES = {
    MEMORY: "the memory that trials take, so its page and results do not tell it",
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
        self,
        steps: Sequence[StepTimes],
        memory: Mapping[str, Any] | None,
        post: Callable[[list[StepTimes], Mapping[str, Any] | None], JobState],
    ) -> JobState:
        """Report the steps, and the memory that their trial takes, with all fields that the service
        accepts. Raises what ``post`` does."""
        given_up = [name for name in CONSEQUENCES if self._refusals[name] >= self._most_refusals]
        told = _without(steps, memory, given_up)
        left = [name for name in CONSEQUENCES if _tells(name, *told)]
        for refused in range(len(left) + 1):
            try:
                state = post(*_without(*told, left[:refused]))
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


def _tells(name: str, steps: Sequence[StepTimes], memory: Mapping[str, Any] | None) -> bool:
    if name == MEMORY:
        return memory is not None
    return any(getattr(step, name) is not None for step in steps)


def _without(
    steps: Sequence[StepTimes], memory: Mapping[str, Any] | None, names: Collection[str]
) -> tuple[list[StepTimes], Mapping[str, Any] | None]:
    nothing: dict[str, Any] = dict.fromkeys(name for name in names if name != MEMORY)
    return [step._replace(**nothing) for step in steps], None if MEMORY in names else memory
