"""Knobs, their domains and the algorithms: what may be tuned, which configurations that allows, and
what of them changes a step under which algorithm.

A knob is data (a name and a domain), so that a new one needs no new code here.  A domain
is one small frozen model; it is also its own form on the wire and in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from bagua_autotune.model.text import printable
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import (
    ALGORITHM_KNOB,
    BUCKET_KNOB,
    CHANNELS_KNOB,
    COUNT_KNOBS,
    LOSSLESS_KNOBS,
    PRECISION_KNOB,
    SHARDED_KNOBS,
    USUAL_ALGORITHM,
    WAYS_KNOB,
)

Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(printable)]
Number = Annotated[int, Field(ge=0, le=2**53)]
MOST_BUCKETS = 100_000
Counts = Annotated[tuple[Number, ...], Field(max_length=MOST_BUCKETS, fail_fast=True, strict=False)]
Given = Number | Name | Counts
"""A value that somebody sends. Of lists the first error is told: all of them may be millions."""
# Of so many the edges are a small part, and cutting them in every way takes long.
MANY_TENSORS = 5_000


class LogInteger(BaseModel):
    """Whole numbers from ``low`` to ``high``, where ratios matter and not differences."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["log_integer"] = "log_integer"
    low: int = Field(ge=1, le=2**53)
    high: int = Field(ge=1, le=2**53)

    @model_validator(mode="after")
    def _ordered(self) -> LogInteger:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self

    def contains(self, value: Value) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high

    @property
    def choices(self) -> int:
        """How many of its values are told apart at most: half-powers of two, and a default."""
        return 2 * (self.high.bit_length() - self.low.bit_length()) + 4

    def __str__(self) -> str:
        return f"an integer from {self.low} to {self.high}"


class Categorical(BaseModel):
    """One of a few named values; see ``is_ordered``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["categorical"] = "categorical"
    values: tuple[Name | Number, ...] = Field(
        min_length=1, max_length=16, fail_fast=True, strict=False
    )

    @model_validator(mode="after")
    def _distinct(self) -> Categorical:
        if len(set(self.values)) != len(self.values):
            raise ValueError("a value is named twice")
        return self

    def contains(self, value: Value) -> bool:
        return value in self.values

    @property
    def choices(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        return "one of " + ", ".join(str(value) for value in self.values)


class Partition(BaseModel):
    """An explicit list of buckets: the number of tensors of each, in gradient-ready order.

    The empty list leaves the cut to the sizes.  Which lists are worth trying is found by the
    search; by itself the domain offers none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["partition"] = "partition"

    def contains(self, value: Value) -> bool:
        return isinstance(value, tuple) and len(value) <= MOST_BUCKETS and min(value, default=1) > 0

    @property
    def choices(self) -> int:
        return 1

    def __str__(self) -> str:
        return "a list of tensor counts"


Domain = LogInteger | Categorical | Partition
Knob = Annotated[Domain, Field(discriminator="type")]
Space = Mapping[str, Domain]
SPACE: TypeAdapter[dict[str, Domain]] = TypeAdapter(dict[str, Knob])


def is_ordered(knob: str, domain: Domain) -> bool:
    """Whether a knob's values are numbers of which what one shows tells of the next."""
    least = 0 if knob in COUNT_KNOBS else 1
    return isinstance(domain, Categorical) and all(
        isinstance(value, int) and value >= least for value in domain.values
    )


def _as_object(_source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    values = handler.generate_schema(dict[str, Value])
    read = core_schema.no_info_after_validator_function(Configuration, values)
    is_one = core_schema.is_instance_schema(Configuration)
    return core_schema.json_or_python_schema(
        json_schema=read,
        python_schema=core_schema.union_schema([is_one, read]),
        serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=values),
    )


ConfigurationField = Annotated[Configuration, GetPydanticSchema(_as_object)]
"""A configuration in what pydantic reads or writes: an object on the wire."""


def numbers_changed(
    configuration: Configuration, baseline: Configuration
) -> frozenset[tuple[str, Value]]:
    """The knobs, with their values, by which a configuration changes the numbers that the default
    computes."""
    lossy = (item for item in configuration.items() if item[0] not in LOSSLESS_KNOBS)
    return frozenset((knob, value) for knob, value in lossy if value != baseline.get(knob))


def repeats_change(
    configuration: Configuration, other: Configuration, baseline: Configuration
) -> bool:
    """Whether the other configuration changes the numbers, and this one makes all its changes."""
    changed = numbers_changed(other, baseline)
    return bool(changed) and changed <= numbers_changed(configuration, baseline)


def check_configuration(configuration: Mapping[str, Value], space: Space) -> None:
    """Raise ValueError, naming the knob, unless each knob has a value of its domain."""
    for knob in configuration:
        if knob not in space:
            raise ValueError(f"unknown knob {knob!r}; the knobs are {', '.join(space)}")
    for knob, domain in space.items():
        if knob not in configuration:
            raise ValueError(f"no value for knob {knob!r}")
        if not domain.contains(configuration[knob]):
            raise ValueError(f"knob {knob!r} is {configuration[knob]!r} and not {domain}")


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
