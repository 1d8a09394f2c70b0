"""The order in which gradients become ready, learned from the buckets of the first steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_client.torch_private.reducer import GradBucket


class ReadyOrder:
    """The order, learned once. When torch cuts the buckets, it sends rank 0's order to all ranks.

    Attributes:
        indices: parameter indices in that order; until it is known, the last parameter first.
        is_agreed: whether the order was seen and is the same on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.indices: tuple[int, ...] = tuple(reversed(range(len(parameters))))
        self.is_agreed = False
        self._seen: list[int] = []

    def saw(self, bucket: GradBucket) -> None:
        """Record the parameters of a bucket that is full."""
        if not self.is_agreed:
            index_of = {id(parameter): i for i, parameter in enumerate(self._parameters)}
            self._seen += [index_of[id(parameter)] for parameter in bucket.parameters()]

    def step_ends(self, is_cut: bool, is_kept: bool) -> bool:
        """All buckets of a step were seen.

        Args:
            is_cut: whether they were torch's final buckets, which it cuts after the first steps.
            is_kept: whether torch cuts in the order in which the model lists its parameters,
                whatever it has seen.

        Returns:
            Whether ``indices`` has changed.
        """
        if self.is_agreed:
            return False
        seen, self._seen = tuple(self._seen), []
        self.is_agreed = is_cut
        if is_cut and not is_kept:
            self.indices = seen
        return is_cut and not is_kept
