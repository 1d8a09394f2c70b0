"""The memory of a rank's device, which is a constraint on configurations: what is known of it, how
much a configuration needs, and whether it may be tried.

What a configuration takes is predicted; the rest is what was measured. It must stay within a share
of the memory. And were the part of it that is beyond all that was tried twice as large as
predicted, it would still have to fit on the device.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from bagua_client.configuration import Configuration
from bagua_client.layout import Layout

if TYPE_CHECKING:
    from bagua_client.tunable.recomputation import Recomputation

logger = logging.getLogger(__name__)

LARGEST_SHARE = 0.9
"""Allocators do not fill a device to the last byte."""
PREDICTION_ERROR = 0.02
"""By so much of what blocks were never seen to keep the prediction may be off: with batches of
random lengths a peak was 0.2 % above the share (reports/2026-11-gpus.md)."""


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
    if found.limit_bytes <= 0:
        return f"{words}: by default already memory ran out until what was kept for later was freed"
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


# The device.

FULL_SHARE = 0.5
"""Of what torch may take: with more than this, what is kept for later is let go of at a change."""


class Taken(NamedTuple):
    """Attributes:
    peak_bytes: the most that tensors took since the last reset.
    retries: how often memory ran out since the process began, and was found once what was kept
        for later had been freed.
    """

    peak_bytes: int
    retries: int


class DeviceMemory(Protocol):
    """The memory of one device."""

    def reset(self) -> None:
        """Measure the peak from now on. What is kept for later may be let go of."""

    def taken(self) -> Taken:
        """What this process takes."""

    def now_bytes(self) -> int:
        """What its tensors take now."""

    def largest_bytes(self) -> int:
        """The most that was ever allocated at once, of what torch holds now."""

    def allowed_bytes(self) -> int:
        """What torch may take of it, in this process."""

    def reachable_bytes(self) -> int:
        """What torch has of it, in this process, or could have now: others may use it, too."""


class CudaMemory:
    """The memory of a GPU, under torch's own allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        if torch.cuda.memory_reserved(self._device) > FULL_SHARE * self.allowed_bytes():
            # Else blocks that fitted the configuration before are in the way of this one's.
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()

    def now_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def taken(self) -> Taken:
        found = torch.cuda.memory_stats(self._device)
        return Taken(found.get("allocated_bytes.all.peak", 0), found.get("num_alloc_retries", 0))

    def largest_bytes(self) -> int:
        # Torch asks the driver for a segment as large as what is allocated, if that is large. One
        # that grows page by page (expandable_segments) says nothing of it, nor do its pages have to
        # lie side by side.
        sizes = [
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == (self._device.index or 0)
            and not segment.get("is_expandable", False)
        ]
        return max(sizes, default=0)

    def allowed_bytes(self) -> int:
        total = torch.cuda.get_device_properties(self._device).total_memory
        # A training may have limited itself (since torch 2.8 that can be read).
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return int(total * (read(self._device) if read is not None else 1.0))

    def reachable_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device))


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The device's memory; None where nothing is known of it, as on a CPU."""
    if device.type != "cuda":
        return None
    found = CudaMemory(device)
    try:
        found.taken()
        found.allowed_bytes()
        found.reachable_bytes()
    except Exception as error:  # Such as an allocator of the training's own.
        logger.warning(
            "autotune does not know how much memory is used on %s (%s): what needs more of it is "
            "tried all the same",
            device,
            error,
        )
        return None
    return found


# What is measured of it.

COMMUNICATOR_BYTES = 64 * 2**20
"""About what NCCL takes for a process group, beside torch's allocator."""


class MeasuredMemory:
    """The memory of one rank's device: what blocks keep that are not recomputed, and what else a
    layout takes of it, as a subclass says.

    Args:
        device: its memory.
        layout: the one in force, the default's.
        recomputation: of the model's blocks.

    Attributes:
        share: of what there is, that may be used.
    """

    share = LARGEST_SHARE

    def __init__(
        self, device: DeviceMemory, layout: Layout, recomputation: Recomputation | None = None
    ) -> None:
        self._device, self._recomputation = device, recomputation
        self._rest_bytes = self._retries = self._groups = self._largest_bytes = 0
        self._given = self._in_force = layout
        self._proven_bytes, self._is_short = self._taken_bytes(layout), False
        self.begin(layout)

    def _extra_bytes(self, layout: Layout) -> int:
        """What a layout takes beyond the rest, which is the same under all of them."""
        return 0

    def _taken_bytes(self, layout: Layout) -> int:
        """What a layout takes beyond the rest, with what its blocks keep."""
        count, blocks = layout.configuration.recomputed_blocks, self._recomputation
        kept = 0 if blocks is None else blocks.kept_bytes(count)
        return self._extra_bytes(layout) + kept

    def _groups_of(self, configuration: Configuration) -> int:
        """How many process groups of ours a configuration needs."""
        return 0

    def start_from(self, layout: Layout) -> None:
        """This is the default's layout; see :meth:`Tunable.start_from`."""
        self._given = layout

    def begin(self, layout: Layout) -> None:
        """A layout is about to come into force."""
        self._in_force = layout
        self._groups = max(self._groups, self._groups_of(layout.configuration))
        self._device.reset()
        if self._recomputation is not None:
            self._recomputation.was_held_back = False
        self.settle()

    def settle(self) -> None:
        """Blocks of other sizes have been freed by now: memory that runs out counts from here."""
        self._retries = self._device.taken().retries
        if self._recomputation:
            self._largest_bytes = max(self._largest_bytes, self._device.largest_bytes())

    def read(self) -> Footprint:
        """What the layout in force has taken since it came into force, of which is learned."""
        peak_bytes, retries = self._device.taken()
        limit_bytes, device_bytes = self._limits(self._groups)
        lack, taken_bytes = Lack.NONE, self._taken_bytes(self._in_force)
        was_held_back = self._recomputation is not None and self._recomputation.was_held_back
        # The peak may be that of a larger batch, in which no block kept anything.
        in_peak = self._extra_bytes(self._in_force) if was_held_back else taken_bytes
        self._rest_bytes = max(self._rest_bytes, peak_bytes - in_peak)
        if was_held_back:
            peak_bytes = max(peak_bytes, self._rest_bytes + taken_bytes)
        has_retried = retries > self._retries
        if taken_bytes <= self._taken_bytes(self._given):
            # What needs no more than the default is not what fills the memory.
            self._is_short |= has_retried
        else:
            lack |= Lack.RETRIED if has_retried and not self._is_short else Lack.NONE
            lack |= Lack.OVER if peak_bytes > limit_bytes else Lack.NONE
        if not lack:
            self._proven_bytes = max(self._proven_bytes, taken_bytes)
        return Footprint(peak_bytes, limit_bytes, device_bytes, lack)

    def misfit(self, layout: Layout) -> Footprint | None:
        """What a layout would take if it may not be tried; None: it may."""
        self.read()  # What is in force has told nothing yet where no agent asks for it.
        taken_bytes = self._taken_bytes(layout)
        if taken_bytes <= self._taken_bytes(self._given):
            return None
        limit_bytes, device_bytes = self._limits(self._groups_of(layout.configuration))
        unproven_bytes = max(taken_bytes - self._proven_bytes, 0)
        peak_bytes = self._rest_bytes + taken_bytes
        if taken_bytes - self._extra_bytes(layout) > 0:
            limit_bytes -= int(PREDICTION_ERROR * unproven_bytes)
            limit_bytes = min(limit_bytes, device_bytes - self._apart_bytes())
        if peak_bytes <= limit_bytes and peak_bytes + unproven_bytes <= device_bytes:
            return None
        return Footprint(peak_bytes, limit_bytes, device_bytes)

    @property
    def free_bytes(self) -> int:
        """What a layout may take beyond the default's."""
        limit_bytes, device_bytes = self._limits(self._groups)
        limit_bytes = min(limit_bytes, device_bytes - self._apart_bytes())
        return limit_bytes - self._rest_bytes - self._taken_bytes(self._given)

    def _apart_bytes(self) -> int:
        """What may be free only in pieces where blocks keep their activations: these lie in what
        larger tensors leave, so that there must be room for the largest once more, and for another
        where batches vary. All there is, if memory has run out by default."""
        blocks = self._recomputation
        if not blocks:
            return 0
        if self._is_short:
            return self._device.allowed_bytes()
        return self._largest_bytes * (1 + blocks.has_varied)

    def _limits(self, groups: int) -> tuple[int, int]:
        """What may be used beside so many process groups of ours, and what there is."""
        beside = max(groups - self._groups, 0) * COMMUNICATOR_BYTES
        reachable_bytes = max(self._device.reachable_bytes() - beside, 1)
        device_bytes = min(self._device.allowed_bytes(), reachable_bytes)
        return int(self.share * device_bytes), device_bytes
