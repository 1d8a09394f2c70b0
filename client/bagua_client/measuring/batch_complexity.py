"""The complexity of one rank's batches, as the training reports it."""

from __future__ import annotations

import logging
import math
from numbers import Real

import torch

logger = logging.getLogger(__name__)

LARGEST = 1e18


class BatchComplexity:
    """The complexity of this rank's batches since the end of the last step's communication. Several
    add up, as those do whose gradients are accumulated."""

    def __init__(self) -> None:
        self._sum: float | None = None
        self._has_warned = False

    def tell(self, complexity: float | torch.Tensor) -> None:
        """Add that of one batch. A negative or infinite number, or NaN, makes the step's unknown.

        Raises:
            TypeError: neither a number nor a tensor of one on the CPU.
        """
        if isinstance(complexity, torch.Tensor):
            if complexity.device.type != "cpu" or complexity.numel() != 1:
                raise TypeError(
                    "a complexity must be a number, or a tensor of one number on the CPU; on a GPU "
                    f"the training would wait for it. This is a tensor of {complexity.numel()} "
                    f"on {complexity.device}"
                )
            complexity = complexity.item()
        if not isinstance(complexity, Real):
            raise TypeError(f"a complexity must be a number, not {type(complexity).__name__}")
        told = float(complexity)
        if not 0 <= told <= LARGEST and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "autotune: a batch's complexity of %g is left out: it must be from 0 to %g",
                *(told, LARGEST),
            )
        # NaN stays in the sum.
        self._sum = (self._sum or 0.0) + (told if 0 <= told <= LARGEST else math.nan)

    def take(self) -> float | None:
        """The complexity of the step that ends now; None: it is not known."""
        told, self._sum = self._sum, None
        return told if told is not None and told <= LARGEST else None
