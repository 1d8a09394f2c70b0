"""Configurations with explicit buckets, drawn before the model is there that they must fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.torch_private import reducer as torchs


@dataclass(frozen=True)
class Setting:
    """A configuration for a model that is not known yet.

    ``ends`` says, over and over, whether an explicit bucket ends at a tensor; None: the buckets
    are cut by bytes.
    """

    configuration: Configuration
    ends: tuple[bool, ...] | None

    def of(self, model: DistributedDataParallel) -> Configuration:
        """With explicit buckets that fit ``model``, once its order is known; without what torch
        cannot cut for it."""
        tunable = tunable_of(model)
        if not torchs.HAS_BUCKET_CAPS:
            return replace(self.configuration, first_bucket_bytes=0, last_bucket_bytes=0)
        if not tunable.offer.has_explicit_buckets:
            return replace(self.configuration, last_bucket_bytes=0)
        if self.ends is None or not tunable.order_is_agreed:
            return self.configuration
        counts = [1]
        for place in range(len(tunable.order) - 1):
            if self.ends[place % len(self.ends)]:
                counts.append(1)
            else:
                counts[-1] += 1
        return replace(self.configuration, buckets=tuple(counts))
