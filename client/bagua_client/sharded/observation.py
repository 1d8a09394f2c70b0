"""What is seen of a sharded model's steps on one rank; all of it is called by way of the
observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bagua_client.tunable.observers import Observers
from bagua_client.tunable.timeline import Timeline


class Observation:
    """What is seen of one model's steps.

    Args:
        knows_computing: whether the time until the last gradient is ready, without what is spent
            in communication, is what this rank computes.

    Attributes:
        on_last_ready: called when the gradients of a step's last unit are ready on this rank.
        parts: for the first of several units that communicate as one, the places of all.
    """

    def __init__(self, observers: Observers, knows_computing: bool = True) -> None:
        self.on_last_ready: Callable[[], None] | None = None
        self.parts: Mapping[int, tuple[int, ...]] = {}
        self._observers, self._knows_computing = observers, knows_computing
        self._timeline: Timeline | None = None
        self._seen: list[int] = []
        self._last: int | None = None

    def record(self, timeline: Timeline | None) -> None:
        """Record the next steps in ``timeline``; None: stop recording."""
        self._timeline = timeline

    def scatter_begins(self, unit: int, size_bytes: int) -> Callable[[], None] | None:
        """The gradients of a unit are ready on this rank. Returns what to call when they are
        reduced, if anything.

        Args:
            size_bytes: 0: nobody will tell when, so that nothing is recorded.
        """
        self._seen.append(unit)
        on_end = None
        if self._timeline is not None and size_bytes:
            for place in self.parts.get(unit, (unit,)):
                self._timeline.tensor_ready(place)
            on_end = partial(self._observers.call, self._timeline.bucket_starts(size_bytes))
        is_last = unit == self._last and self._knows_computing
        if is_last and self.on_last_ready is not None:
            self.on_last_ready()
        return on_end

    def gather_begins(self, unit: int, size_bytes: int) -> Callable[[], None] | None:
        """A unit is about to be gathered. Returns what to call when it is there, if anything."""
        if self._timeline is None:
            return None
        return partial(self._observers.call, self._timeline.gather_starts(unit, size_bytes))

    def backward_ends(self) -> None:
        """The next step's last unit is taken to be this one's."""
        self._last = self._seen[-1] if self._seen else None
        self._seen.clear()

    def close(self) -> None:
        """Observe nothing."""
        self.on_last_ready = None
        self.record(None)
