"""Which settings of an engine of DeepSpeed can be changed, and to what.

DeepSpeed counts elements, a configuration bytes: those of an element of a gradient as it travels,
also for the parameters that are gathered ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.zero.buckets import Buckets, Sizes
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import BUCKET_SIZES

AHEAD = (1 / 16, 1 / 4, 4, 16)
"""What is tried as gathered ahead, beside none, in terms of what the training has set."""
PARTS_AHEAD = (1 / 16, 1 / 4)
"""The same where it has set none, as parts of the model."""


@dataclass(frozen=True)
class Offer:
    """Which settings of one engine can be changed.

    Attributes:
        default: the configuration that the job begins with.
        given: that of :func:`default_of`.
        buckets: its sizes.
        algorithms: see :class:`bagua_client.tunable.tunable.Offer`.
    """

    default: Configuration
    given: Configuration
    buckets: Buckets
    algorithms: Callable[[Collection[str]], Sequence[Algorithm]]
    has_explicit_buckets = False
    kind = "zero"

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """The smallest and the largest bucket that is tried. More than all gradients would only
        take memory; the one buffer of stage 3 stays as large as it was made."""
        default = self.default.bucket_bytes
        low = min(BUCKET_SIZES.low_bytes, default)
        if self.buckets.is_sharded:
            return low, self.given.bucket_bytes
        largest = min(_all_bytes(self.buckets), BUCKET_SIZES.high_bytes)
        return low, max(largest, default)

    @property
    def carried_by(self) -> Mapping[str, str]:
        """See :class:`bagua_client.tunable.tunable.Offer`."""
        return {"engine": self.buckets.engine, "element_bytes": str(self.buckets.element_bytes)}

    def at_first(self, configuration: Configuration) -> Configuration:
        """All of it can be put in force before the first step."""
        return configuration

    def reasons(self, communicator: Communicator) -> list[str]:
        """The reasons why some settings cannot be changed, a sentence each."""
        found = ["channels and ways to reduce: DeepSpeed carries its buckets itself"]
        if self.buckets.is_sharded:
            found.append("larger buckets: stage 3 keeps the buffer that it began with")
        else:
            found.append("allgather_bucket_size: DeepSpeed does not use it with this torch")
        return found

    def values(
        self, communicator: Communicator, allowed: Collection[str] = ()
    ) -> dict[str, Sequence[Value]]:
        """What is tried as gathered ahead, the default first; only stage 3 gathers."""
        if not self.buckets.is_sharded:
            return {}
        default, most = self.default.prefetch_bytes, _all_bytes(self.buckets)
        if default:
            tried = [round(default * share) for share in AHEAD]
        else:
            tried = [round(most * share) for share in PARTS_AHEAD]
        sizes = dict.fromkeys([default, 0, *(min(size, most) for size in tried)])
        return {"prefetch_bytes": list(sizes)}

    def check(self, configuration: Configuration) -> None:
        """Check that the engine can have the configuration.

        Raises:
            ValueError: it cannot.
        """
        configuration.check_model(self.kind)
        if configuration.prefetch_bytes and not self.buckets.is_sharded:
            raise ValueError("only ZeRO's stage 3 gathers parameters ahead")
        if self.buckets.is_sharded and configuration.bucket_bytes > self.given.bucket_bytes:
            raise ValueError("ZeRO's stage 3 keeps the buffer that it began with")


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
