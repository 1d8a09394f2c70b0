"""The bounded queue from rank 0's training thread to its reporter thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from bagua_client.measuring.profiler import Recording

LARGEST_INBOX = 512
LARGEST_INBOX_BYTES = 16 * 2**20
VALUE_BYTES = 32  # a float in a list
RANK_BYTES = 240  # what holds one rank's
READY_BYTES = 200  # a tensor's mark in a recording


class RankTimes(NamedTuple):
    """What one rank knew by now.

    Attributes:
        first_step: the number of the first step in ``seconds``.
        seconds: of that step and those after it.
        compute_seconds: how long of that the rank computed; NaN: it does not know. Empty after
            the tuning, and where it knows of none.
        complexities: of its batches, likewise; negative ones are of the model's inputs.
    """

    first_step: int
    seconds: Sequence[float]
    compute_seconds: Sequence[float] = ()
    complexities: Sequence[float] = ()

    def between(self, first: int, last: int) -> RankTimes:
        """Those of the steps from ``first`` to ``last``."""
        if first <= self.first_step and self.first_step + len(self.seconds) <= last + 1:
            return self  # as nearly always, on the training thread
        first_step, *parts = self
        begin, end = max(first - first_step, 0), max(last + 1 - first_step, 0)
        return RankTimes(first_step + begin, *(part[begin:end] for part in parts))


@dataclass(frozen=True)
class GatheredTimes:
    """Step times of all ranks.

    Attributes:
        trial: the index of the one they were measured under; None: after the tuning.
        by_rank: each rank's.
        memory: that the fullest rank took until then, as in API v2; None: it is not known.
    """

    trial: int | None
    by_rank: list[RankTimes]
    memory: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Event:
    """An event that the service must know; the fields are API v2's."""

    kind: str
    trial: int | None
    step: int
    message: str
    seconds: float | None = None
    memory: Mapping[str, Any] | None = None


Message = GatheredTimes | Recording | Event


class Inbox:
    """A queue whose writer never waits. When it is full, as while the service does not answer, it
    drops the oldest step times and profiles first, then the oldest events, but never the end."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._bytes += _about_bytes(message)
            while (surplus := self._surplus()) is not None:
                self._messages.remove(surplus)
                self._bytes -= _about_bytes(surplus)
                self._dropped += 1
            self._changed.notify()

    def take_dropped(self) -> int:
        """Return how many messages were dropped since the last call."""
        with self._changed:
            dropped, self._dropped = self._dropped, 0
        return dropped

    def take_more(self, trial: int) -> GatheredTimes | None:
        """The oldest message, if it is of this trial's steps."""
        with self._changed:
            first = self._messages[0] if self._messages else None
            if not isinstance(first, GatheredTimes) or first.trial != trial:
                return None
            self._pop()
            return first

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def has_event(self, kinds: Collection[str]) -> bool:
        """Whether an event of one of these kinds waits."""
        with self._changed:
            events = (each for each in self._messages if isinstance(each, Event))
            return any(event.kind in kinds for event in events)

    def wake(self) -> None:
        """Wake a reader that waits, so that it returns at once."""
        with self._changed:
            self._changed.notify()

    def take(self, timeout_seconds: float) -> Message | None:
        """The oldest message; None if none comes in time."""
        with self._changed:
            if not self._messages:
                self._changed.wait(timeout_seconds)
            return self._pop() if self._messages else None

    def _pop(self) -> Message:
        message = self._messages.popleft()
        self._bytes -= _about_bytes(message)
        return message

    def _surplus(self) -> Message | None:
        """Return what to drop next if there is too much; never the newest, and no event for its
        bytes.
        """
        is_too_much = len(self._messages) > LARGEST_INBOX
        if not is_too_much and self._bytes <= LARGEST_INBOX_BYTES:
            return None
        older = islice(self._messages, len(self._messages) - 1)
        found = min(older, key=_rank_of_keeping, default=None)
        return found if is_too_much or not isinstance(found, Event) else None


def _rank_of_keeping(message: Message) -> int:
    """Return the rank of keeping: messages with a lower one are dropped first."""
    if not isinstance(message, Event):
        return 0
    return 1 + (message.kind == "ended")


def _about_bytes(message: Message) -> int:
    """Return about how many bytes a message takes in memory. Ranks mostly tell as many steps as the
    first one; counting each rank's would take the training thread long where there are thousands.
    """
    if isinstance(message, GatheredTimes):
        first = message.by_rank[0]
        values = sum(map(len, first[1:]))
        return len(message.by_rank) * (RANK_BYTES + values * VALUE_BYTES)
    if isinstance(message, Recording):
        return RANK_BYTES + READY_BYTES * len(message.order)
    return RANK_BYTES + len(message.message)
