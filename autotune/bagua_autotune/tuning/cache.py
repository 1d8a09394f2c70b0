"""Answers that are right for as long as what they were made from is the same. Apart: the tuner, the
views and Bagua's protocol each keep theirs by it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Cache(Generic[Answer]):
    """The latest answer of each job, of so many jobs; thread-safe.

    Of one job one answer is made at a time: who asks meanwhile waits for it.
    """

    def __init__(self, most_jobs: int) -> None:
        self._most_jobs = most_jobs
        self._kept: OrderedDict[str, _Slot[Answer]] = OrderedDict()
        self._guard = threading.Lock()

    def get(self, job_id: str, version: Hashable, make: Callable[[], Answer]) -> Answer:
        """The answer to this version, kept or made."""
        with self._guard:
            slot = self._kept.setdefault(job_id, _Slot())
            self._kept.move_to_end(job_id)
            while len(self._kept) > self._most_jobs:
                self._kept.popitem(last=False)
        with slot.turn:
            if slot.answer is None or slot.answer[0] != version:
                slot.answer = version, make()
            return slot.answer[1]

    def known(self, job_id: str) -> Answer | None:
        """The latest answer of the job, whatever it is to; does not wait."""
        with self._guard:
            slot = self._kept.get(job_id)
            answer = slot.answer if slot else None
        return answer[1] if answer else None


class _Slot(Generic[Answer]):
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.answer: tuple[Hashable, Answer] | None = None
