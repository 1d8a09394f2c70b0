"""Which settings of an engine of DeepSpeed can be changed, and to what.

DeepSpeed counts elements, a configuration bytes: those of an element of a gradient as it travels,
also for the parameters that are gathered ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagua_client.configuration import Configuration
from bagua_client.tunable.offer import Limit, Offer, only
from bagua_client.zero.buckets import Buckets, Sizes
from bagua_wire.knobs import BUCKET_SIZES

AHEAD = (1 / 16, 1 / 4, 4, 16)
"""What is tried as gathered ahead, beside none, in terms of what the training has set."""
PARTS_AHEAD = (1 / 16, 1 / 4)
"""The same where it has set none, as parts of the model."""


@dataclass(frozen=True, kw_only=True)
class EngineOffer(Offer):
    """Which settings of one engine can be changed.

    Attributes:
        given: that of :func:`default_of`.
        buckets: its sizes.
    """

    kind = "zero"
    given: Configuration
    buckets: Buckets

    @property
    def carried_by(self) -> Mapping[str, str]:
        return {"engine": self.buckets.engine, "element_bytes": str(self.buckets.element_bytes)}

    def limits(self) -> dict[str, Limit]:
        """More than all gradients would only take memory; the one buffer of stage 3 stays as large
        as it was made, and only stage 3 gathers ahead."""
        own, ahead = self.default.bucket_bytes, self.default.prefetch_bytes
        low, largest = min(BUCKET_SIZES.low_bytes, own), _all_bytes(self.buckets)
        theirs = Limit(
            left_alone="channels and ways to reduce: DeepSpeed carries its buckets itself"
        )
        if not self.buckets.is_sharded:
            high = max(min(largest, BUCKET_SIZES.high_bytes), own)
            return {
                "channels": theirs,
                "bucket_bytes": Limit((low, high)),
                "prefetch_bytes": Limit(
                    left_alone="allgather_bucket_size: DeepSpeed does not use it with this torch",
                    cannot=only(0, "only ZeRO's stage 3 gathers parameters ahead"),
                ),
            }
        shares = [ahead * share for share in AHEAD] if ahead else [largest * p for p in PARTS_AHEAD]
        tried = dict.fromkeys([0, *(min(round(size), largest) for size in shares)])
        buffer = "ZeRO's stage 3 keeps the buffer that it began with"
        return {
            "channels": theirs,
            "bucket_bytes": Limit(
                (low, self.given.bucket_bytes),
                "larger buckets: stage 3 keeps the buffer that it began with",
                lambda size: buffer if size > self.given.bucket_bytes else "",
            ),
            "prefetch_bytes": Limit(self.first("prefetch_bytes", list(tried)), fewest=1),
        }


def default_of(buckets: Buckets) -> Configuration:
    """What the training has set, as far as it makes a difference: no bucket holds more than all
    gradients."""
    return Configuration(
        bucket_bytes=min(buckets.given.bucket * buckets.element_bytes, _all_bytes(buckets)),
        prefetch_bytes=min(buckets.given.prefetch * buckets.element_bytes, _all_bytes(buckets)),
    )


def sizes_of(configuration: Configuration, given: Configuration, buckets: Buckets) -> Sizes:
    """What a configuration sets.

    Args:
        given: that of :func:`default_of`, which stands for what the training has set.
    """
    bucket = max(configuration.bucket_bytes // buckets.element_bytes, 1)
    prefetch = configuration.prefetch_bytes // buckets.element_bytes
    if configuration.bucket_bytes == given.bucket_bytes:
        bucket = buckets.given.bucket
    if configuration.prefetch_bytes == given.prefetch_bytes:
        prefetch = buckets.given.prefetch
    return Sizes(bucket, prefetch)


def _all_bytes(buckets: Buckets) -> int:
    return buckets.element_bytes * sum(spec.elements for spec in buckets.tensors)
