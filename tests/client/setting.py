"""Configurations with explicit buckets, drawn before the model is there that they must fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from bagua_client import Configuration, DistributedDataParallel


@dataclass(frozen=True)
class Setting:
    """A configuration for a model that is not known yet.

    ``ends`` says, over and over, whether an explicit bucket ends at a tensor; None: the buckets
    are cut by bytes.
    """

    configuration: Configuration
    ends: tuple[bool, ...] | None

    def of(self, model: DistributedDataParallel) -> Configuration:
        """With explicit buckets that fit ``model``, once its order is known."""
        reducer = model._reducer
        if self.ends is None or not reducer.order_is_agreed:
            return self.configuration
        counts = [1]
        for place, (before, index) in enumerate(pairwise(reducer.order)):
            alike = reducer.tensors[before].group == reducer.tensors[index].group
            if alike and not self.ends[place % len(self.ends)]:
                counts[-1] += 1
            else:
                counts.append(1)
        return replace(self.configuration, buckets=tuple(counts))
