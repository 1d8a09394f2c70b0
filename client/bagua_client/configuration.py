"""A configuration as the ranks carry it out: one value for every knob the client knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

MIB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * MIB
HIERARCHICAL_VALUES = ("off", "leaders", "shards")


@dataclass(frozen=True)
class Configuration:
    """What all ranks run in a step.

    Attributes:
        bucket_bytes: a bucket is closed as soon as it holds at least this many bytes.
        hierarchical: ``off``: one flat all-reduce over all ranks. ``leaders``: reduce to one
            rank of each node, all-reduce between those, broadcast inside the node.
            ``shards``: reduce-scatter inside the node, all-reduce each shard across the
            nodes, all-gather inside the node (needs as many ranks on every node).

    Raises:
        ValueError: a value outside its domain.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    hierarchical: str = "off"

    def __post_init__(self) -> None:
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int):
            raise ValueError(f"bucket_bytes must be a whole number, not {self.bucket_bytes!r}")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, not {self.bucket_bytes}")
        if self.hierarchical not in HIERARCHICAL_VALUES:
            raise ValueError(
                f"hierarchical must be one of {', '.join(HIERARCHICAL_VALUES)}, "
                f"not {self.hierarchical!r}"
            )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Configuration:
        """Read a configuration that the service sent.

        Raises:
            ValueError: a knob this client does not know, or a value outside its domain. A knob
                that is passed over silently would be measured as if it were in force.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(
                f"this client does not know the knob {', '.join(unknown)}; update bagua-autotune"
            )
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The configuration as the service reads it."""
        return asdict(self)

    def __str__(self) -> str:
        unit, name = next(
            (unit, name) for unit, name in _UNITS if self.bucket_bytes >= unit or unit == 1
        )
        return f"bucket {self.bucket_bytes / unit:.4g} {name}, hierarchical {self.hierarchical}"


_UNITS = ((1024**3, "GiB"), (MIB, "MiB"), (1024, "KiB"), (1, "B"))
