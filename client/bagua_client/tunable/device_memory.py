"""What is known of the memory of a rank's device."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import torch

logger = logging.getLogger(__name__)

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
