"""A configuration as the ranks carry it out: a value for every knob that the client knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

MIB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * MIB
HIERARCHICAL_VALUES = ("off", "leaders", "shards")
CHANNELS_VALUES = (1, 2, 4, 8, 16)
WIRE_PRECISIONS = ("as_is", "bf16", "fp16")


@dataclass(frozen=True)
class Configuration:
    """What all ranks run in a step.

    Attributes:
        bucket_bytes: a bucket is closed as soon as it holds at least this many bytes.
        hierarchical: ``off``: one flat all-reduce over all ranks. ``leaders``: reduce to one
            rank of each node, all-reduce between those, broadcast inside the node.
            ``shards``: reduce-scatter inside the node, all-reduce each shard across the
            nodes, all-gather inside the node (needs the same number of ranks on every node).
        channels: number of process groups that buckets use in turn. A bucket that is large enough
            is split into up to this many parts, which travel at once, each on its own group.
        first_bucket_bytes: the first bucket (of each dtype and device) is closed as soon as
            it holds this many bytes, if that is less than ``bucket_bytes``; 0: like the others.
        last_bucket_bytes: the last bucket holds the fewest tensors that amount to this many
            bytes, if that is less than ``bucket_bytes``; 0: it holds the tensors left over.
        wire_precision: how gradients wider than 16 bits travel: ``as_is``, ``bf16``, ``fp16``.
        buckets: the number of tensors of each bucket, in the order in which gradients become
            ready; the sizes in bytes above are then not used. Empty: buckets are cut by bytes.
        algorithm: the algorithm's name; it runs with its default arguments. Empty: the algorithm
            that the model was wrapped with.

    Raises:
        ValueError: a value is outside its domain.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    hierarchical: str = "off"
    channels: int = 1
    first_bucket_bytes: int = 0
    last_bucket_bytes: int = 0
    buckets: tuple[int, ...] = ()
    wire_precision: str = "as_is"
    algorithm: str = ""

    def __post_init__(self) -> None:
        _check_number("bucket_bytes", self.bucket_bytes, at_least=1)
        _check_choice("hierarchical", self.hierarchical, HIERARCHICAL_VALUES)
        _check_choice("channels", self.channels, CHANNELS_VALUES)
        _check_number("first_bucket_bytes", self.first_bucket_bytes, at_least=0)
        _check_number("last_bucket_bytes", self.last_bucket_bytes, at_least=0)
        _check_choice("wire_precision", self.wire_precision, WIRE_PRECISIONS)
        if not isinstance(self.algorithm, str):
            raise ValueError(f"algorithm must be a name, not {self.algorithm!r}")
        if not isinstance(self.buckets, list | tuple):
            raise ValueError(f"buckets must be a list of tensor counts, not {self.buckets!r}")
        for count in self.buckets:
            _check_number("a bucket's number of tensors", count, at_least=1)
        # JSON gives a list; a configuration must be hashable.
        object.__setattr__(self, "buckets", tuple(self.buckets))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Configuration:
        """Read a configuration that the service sent. A missing knob has its default.

        Raises:
            ValueError: this client does not know a knob, or a value is outside its domain. If an
                unknown knob were ignored, it would be measured as if it were in force.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(
                f"this client does not know the knob {', '.join(unknown)}; update bagua-autotune"
            )
        return cls(**values)

    @property
    def is_torchs_way(self) -> bool:
        """Whether buckets travel as with stock torch, however they are cut."""
        way = self.hierarchical, self.channels, self.wire_precision, self.algorithm
        return way == ("off", 1, "as_is", "")

    @property
    def changes_numbers(self) -> bool:
        """Whether it changes what the model learns by more than the rounding order of the sums."""
        return self.wire_precision != "as_is" or bool(self.algorithm)

    def to_json(self) -> dict[str, Any]:
        """The configuration as the service reads it."""
        return {**asdict(self), "buckets": list(self.buckets)}

    def __str__(self) -> str:
        """In words: how the buckets are cut, then the knobs that are not at their defaults."""
        if self.buckets:
            words = [f"{len(self.buckets)} explicit bucket{'s' * (len(self.buckets) > 1)}"]
        else:
            words = [f"bucket {_in_words(self.bucket_bytes)}"]
            if self.first_bucket_bytes:
                words.append(f"first bucket {_in_words(self.first_bucket_bytes)}")
            if self.last_bucket_bytes:
                words.append(f"last bucket {_in_words(self.last_bucket_bytes)}")
        if self.hierarchical != "off":
            words.append(f"hierarchical {self.hierarchical}")
        if self.channels != 1:
            words.append(f"{self.channels} channels")
        if self.wire_precision != "as_is":
            words.append(f"{self.wire_precision} on the wire (changes the numbers)")
        if self.algorithm:
            words.append(f"algorithm {self.algorithm} (changes the numbers)")
        return ", ".join(words)


def _check_number(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")


def _check_choice(name: str, value: object, choices: tuple[int | str, ...]) -> None:
    # Compare the types too, because True == 1.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


_UNITS = ((1024**3, "GiB"), (MIB, "MiB"), (1024, "KiB"), (1, "B"))


def _in_words(size_bytes: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if size_bytes >= unit)
    return f"{size_bytes / unit:.4g} {name}"
