"""What a checked training's blocks recompute in a step, and what memory there is to keep their
activations instead."""

from __future__ import annotations

from typing import Any

import torch

from bagua_client.measuring.clock import clock_for
from bagua_client.torch_private.compiled import is_compiled
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.wrapper import called_untraced
from bagua_client.tunable.memory import LARGEST_SHARE, memory_of
from bagua_client.tunable.tunable import Tunable


class Recomputing:
    """Times the forward passes of the blocks: recomputing is one more. Those of compiled blocks are
    left alone, as the compiler would follow what times them.

    Args:
        tunable: of the model.
    """

    def __init__(self, tunable: Tunable) -> None:
        self._tunable = tunable
        self._clock = clock_for(tunable.communicator.device)
        self._begun: dict[torch.nn.Module, Any] = {}
        self._passes: list[tuple[Any, Any]] = []
        self._seconds: float | None = None
        self._device_memory = memory_of(tunable.communicator.device)
        blocks = tunable.recomputation.modules
        # Of some blocks alone nobody knows what all of them take.
        timed = [] if any(map(is_compiled, blocks)) else blocks
        observe = tunable.observers.call
        begins = called_untraced(lambda *given: observe(self._begins, *given))
        ends = called_untraced(lambda *given: observe(self._ends, *given))
        self._handles = [
            handle
            for block in timed
            for handle in (
                block.register_forward_pre_hook(begins),
                block.register_forward_hook(ends),
            )
        ]

    def close(self) -> None:
        """Time no longer."""
        while self._handles:
            self._handles.pop().remove()
        self._begun.clear()

    def read(self, steps: int) -> None:
        """So many steps were made since this was called last, and the device has ended them."""
        passes, self._passes = self._passes, []
        if passes and steps:
            total = sum(self._clock.seconds(begin, end) for begin, end in passes)
            self._seconds = total / steps

    def facts(self) -> dict[str, Any]:
        """As the file of a check has it; what is not known is None."""
        recomputation, device = self._tunable.recomputation, self._device_memory
        found: dict[str, Any] = {
            "blocks": len(recomputation),
            "seconds": self._seconds,
            "kept_bytes": recomputation.kept_bytes(0) if recomputation.is_known else None,
            "left_alone": self._tunable.offer.recomputed.left_alone,
        }
        if device is not None:
            found["peak_bytes"] = device.taken().peak_bytes
            found["device_bytes"] = min(device.allowed_bytes(), device.reachable_bytes())
            found["limit_bytes"] = int(LARGEST_SHARE * found["device_bytes"])
        return found

    def _begins(self, block: torch.nn.Module, _: Any) -> None:
        if block.training and not is_in_backward():
            self._begun[block] = self._clock.mark()

    def _ends(self, block: torch.nn.Module, _: Any, __: Any) -> None:
        if (begun := self._begun.pop(block, None)) is not None:
            self._passes.append((begun, self._clock.mark()))
