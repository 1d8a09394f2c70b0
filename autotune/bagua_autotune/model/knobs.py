"""Knobs, their domains, and configurations: what may be tuned, and one choice of it.

A knob is data (a name and a domain), so that a new one needs no new code here.  A domain
is one small frozen model; it is also its own form on the wire and in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from bagua_autotune.model.characters import printable
from bagua_wire.knobs import KNOBS

Value = int | str | tuple[int, ...]
Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(printable)]
Number = Annotated[int, Field(ge=0, le=2**53)]
MOST_BUCKETS = 100_000
Counts = Annotated[tuple[Number, ...], Field(max_length=MOST_BUCKETS, fail_fast=True, strict=False)]
Given = Number | Name | Counts
"""A value that somebody sends. Of lists the first error is told: all of them may be millions."""
BUCKET_KNOB = "bucket_bytes"
WAYS_KNOB = "hierarchical"
CHANNELS_KNOB = "channels"
ALGORITHM_KNOB = "algorithm"
PRECISION_KNOB = "wire_precision"
USUAL_ALGORITHM = "gradient_allreduce"
PARTITION_KNOB = "buckets"
EDGE_KNOBS = ("first_bucket_bytes", "last_bucket_bytes")
SCATTER_GROUP_KNOB = "scatter_group"
NODE_COPY_KNOB = "node_copy"
SHARDED_KNOBS = tuple(name for name, knob in KNOBS.items() if knob.models == ("sharded",))
PREFETCH_BYTES_KNOB = "prefetch_bytes"
"""Of DeepSpeed's ZeRO, stage 3."""
COUNT_KNOBS = ("kept_units", "prefetch", PREFETCH_BYTES_KNOB)
"""Knobs whose 0 is one of the counts; of other numbers 0 means that the knob is not used."""
LOSSLESS_KNOBS = tuple(name for name, knob in KNOBS.items() if not knob.changes_numbers)
"""Knobs that do not change what the model learns, beyond the rounding of sums in another order."""
MEMORY_KNOBS = (
    BUCKET_KNOB,
    CHANNELS_KNOB,
    "kept_units",
    "prefetch",
    "scatter_buffers",
    PREFETCH_BYTES_KNOB,
)
"""Knobs of which more takes more memory, of a sharded model and of DeepSpeed's."""
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


class Configuration(Mapping[str, Value]):
    """A value for every knob; immutable and hashable.

    >>> Configuration(bucket_bytes=4 << 20, hierarchical="off")["bucket_bytes"]
    4194304
    """

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value] | None = None, /, **named: Value) -> None:
        given = {**(values or {}), **named}
        # JSON knows lists only; a configuration is hashable.
        self._values: dict[str, Value] = {
            knob: tuple(value) if isinstance(value, list) else value
            for knob, value in given.items()
        }
        self._hash: int | None = None

    def __getitem__(self, knob: str) -> Value:
        return self._values[knob]

    def number(self, knob: str) -> int:
        """The value of a knob that is a number."""
        value = self._values[knob]
        if not isinstance(value, int):
            raise TypeError(f"knob {knob!r} is {value!r} and not a number")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        # Once: searches look hundreds of them up in every decision.
        if self._hash is None:
            self._hash = hash(frozenset(self._values.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Configuration):
            return self._values == other._values
        return Mapping.__eq__(self, other)

    def __repr__(self) -> str:
        return f"Configuration({self._values})"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Let pydantic read and write it: an object on the wire."""
        values = handler.generate_schema(dict[str, Value])
        read = core_schema.no_info_after_validator_function(cls, values)
        return core_schema.json_or_python_schema(
            json_schema=read,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), read]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                dict, return_schema=values
            ),
        )


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
