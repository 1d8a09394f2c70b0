"""What is said of the memory of a rank's device, which is a constraint on configurations."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

LARGEST_SHARE = 0.9
"""Allocators do not fill a device to the last byte."""


class Lack(enum.IntFlag):
    """How it is seen that what is in force does not fit."""

    NONE = 0
    OVER = 1
    """It took more than it may."""
    RETRIED = 2
    """Memory ran out, and was found only once what was kept for later had been freed."""


class Footprint(NamedTuple):
    """The memory that something takes on one rank's device at its peak, or would take.

    Attributes:
        peak_bytes: what it takes.
        limit_bytes: what it may take.
        device_bytes: what there is for the rank; 0: nothing of this is known.
        lack: only of what is in force.
    """

    peak_bytes: int = 0
    limit_bytes: int = 0
    device_bytes: int = 0
    lack: Lack = Lack.NONE

    @property
    def share(self) -> float:
        """Of what there is."""
        return self.peak_bytes / self.device_bytes if self.device_bytes else 0.0

    def to_json(self, is_predicted: bool = False) -> dict[str, Any]:
        """Return it as API v2 has it."""
        said = {name: getattr(self, name) for name in self._fields[:3]}
        return {**said, "is_predicted": True} if is_predicted else said


def fullest(by_rank: Sequence[Footprint]) -> tuple[int, Footprint]:
    """The rank whose device is the fullest, and what it holds."""
    rank = max(range(len(by_rank)), key=lambda rank: by_rank[rank].share)
    return rank, by_rank[rank]


def why_not_tried(by_rank: Sequence[Footprint]) -> str:
    """In words why a layout may not be tried.

    Args:
        by_rank: what it would take where it may not be tried; else empty ones.
    """
    rank, found = fullest(by_rank)
    needed, limit = _gib(found.peak_bytes), _gib(found.limit_bytes)
    words = f"rank {rank} would need {needed} of its device's memory, and may use {limit}"
    if found.peak_bytes <= found.limit_bytes:
        words += "; that is too far from all that was measured to be tried yet"
    return words


def why_given_up(by_rank: Sequence[Footprint], is_trial: bool) -> str:
    """In words why what is in force does not fit; empty: it does. All ranks find the same.

    Args:
        by_rank: what it took.
        is_trial: else it was kept, and what the training itself needs may have grown for a moment.
    """
    both = Lack.OVER | Lack.RETRIED
    lacking = [
        found if (found.lack if is_trial else found.lack == both) else Footprint()
        for found in by_rank
    ]
    rank, found = fullest(lacking)
    if not found.lack:
        return ""
    taken, limit = _gib(found.peak_bytes), _gib(found.limit_bytes)
    if found.lack & Lack.RETRIED:
        return (
            f"rank {rank} ran out of memory until it freed what it kept for later, at {taken} of "
            f"{_gib(found.device_bytes)}"
        )
    return f"rank {rank} took {taken} of its device's memory, and may use {limit}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"
