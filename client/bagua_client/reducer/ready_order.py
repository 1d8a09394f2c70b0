"""The order in which gradients become ready, learned from the buckets of the first steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_client.torch_private.reducer import GradBucket


class ReadyOrder:
    """Learned once. Torch tells rank 0's order to all ranks when it cuts the buckets.

    Attributes:
        indices: of the parameters; the last one first until it is known.
        is_agreed: it was seen, and is the same on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.indices: tuple[int, ...] = tuple(reversed(range(len(parameters))))
        self.is_agreed = False
        self._seen: list[int] = []

    def saw(self, bucket: GradBucket) -> None:
        """It is full."""
        if not self.is_agreed:
            index_of = {id(parameter): i for i, parameter in enumerate(self._parameters)}
            self._seen += [index_of[id(parameter)] for parameter in bucket.parameters()]

    def step_ends(self, is_cut: bool, is_kept: bool) -> bool:
        """A step's buckets were all seen.

        Args:
            is_cut: they were those that torch cuts by what it saw.
            is_kept: torch cuts in the order in which the model lists its parameters, all the same.

        Returns:
            Whether another order is known than before.
        """
        if self.is_agreed:
            return False
        seen, self._seen = tuple(self._seen), []
        self.is_agreed = is_cut
        if is_cut and not is_kept:
            self.indices = seen
        return is_cut and not is_kept
