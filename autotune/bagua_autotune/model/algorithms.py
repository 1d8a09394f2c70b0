"""The algorithms as far as their speed goes: what a step sends under each, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bagua_autotune.model.knobs import Categorical, Space
from bagua_wire.configuration import Value
from bagua_wire.knobs import (
    ALGORITHM_KNOB,
    BUCKET_KNOB,
    CHANNELS_KNOB,
    PRECISION_KNOB,
    SHARDED_KNOBS,
    USUAL_ALGORITHM,
    WAYS_KNOB,
)

Moment = Literal["ready", "begin", "end", "apart"]
Compression = Literal["", "8 bits", "low rank"]


@dataclass(frozen=True)
class Algorithm:
    """A way of keeping a model's replicas together.

    Attributes:
        when: what travels may leave. ``ready``: a bucket of gradients when it is full. ``begin``:
            weights, when the step begins. ``end``: weights, when all gradients are there.
            ``apart``: nothing that a step waits for.
        compresses: to what, in one exchange more; empty: it does not.
        ways: to reduce, of those that it works with; None: all.
        eight_bits: of a sharded model: what travels in eight bits, ``gathered`` parameters,
            ``reduced`` gradients, or both.
    """

    when: Moment = "ready"
    compresses: Compression = ""
    ways: tuple[str, ...] | None = None
    eight_bits: tuple[str, ...] = ()

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knobs that change its cost, beside where a bucket begins and ends."""
        if self.eight_bits:
            narrow = () if "reduced" in self.eight_bits else (PRECISION_KNOB,)
            return (BUCKET_KNOB, WAYS_KNOB, CHANNELS_KNOB, *SHARDED_KNOBS, *narrow)
        if self.when == "apart":
            return ()
        sizes = () if self.when == "begin" else (BUCKET_KNOB,)
        return (*sizes, WAYS_KNOB, CHANNELS_KNOB)


KNOWN: Mapping[Value, Algorithm] = {
    USUAL_ALGORITHM: Algorithm(),
    "bytegrad": Algorithm(compresses="8 bits"),
    "powersgd": Algorithm(compresses="low rank", ways=("off", "leaders")),
    "qadam": Algorithm(compresses="8 bits"),
    "decentralized": Algorithm("begin"),
    "low_precision_decentralized": Algorithm("end", "8 bits", ways=("off", "leaders")),
    "async": Algorithm("apart"),
    "quantized": Algorithm(eight_bits=("gathered", "reduced")),
    "quantized_weights": Algorithm(eight_bits=("gathered",)),
    "quantized_gradients": Algorithm(eight_bits=("reduced",)),
}
OTHER = Algorithm()
"""An algorithm that somebody else has written."""


def algorithm_of(values: Mapping[str, Value]) -> Algorithm:
    """The algorithm of a configuration; the usual one where it has no such knob."""
    return KNOWN.get(values.get(ALGORITHM_KNOB, USUAL_ALGORITHM), OTHER)


def choices(space: Space, baseline: Mapping[str, Value]) -> list[Mapping[str, Value]]:
    """Return for each algorithm to choose from the values that stay as they are under it, its name
    among them.

    Under the job's own nothing does. Under another one the knobs that it does not know stay at
    the default's, as do refinements of the buckets and the precision on the wire.
    """
    domain = space.get(ALGORITHM_KNOB)
    if not isinstance(domain, Categorical):
        return [{}]
    found: list[Mapping[str, Value]] = []
    for name in domain.values:
        knobs = algorithm_of({ALGORITHM_KNOB: name}).knobs
        own: dict[str, Value] = {ALGORITHM_KNOB: name}
        stays = {knob: value for knob, value in baseline.items() if knob not in knobs} | own
        is_own = name == baseline.get(ALGORITHM_KNOB) and knobs == OTHER.knobs
        found.append(own if is_own else stays)
    return found
