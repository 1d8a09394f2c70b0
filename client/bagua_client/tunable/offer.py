"""What a tuning is offered of one training: a table of its limits, and what walks it.

Each kind of training gives a row for each of its knobs: the values worth trying, why others are
left alone, and what it cannot have. From the same rows come what the service is told, what the log
says, and what is refused where somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import ALL_BLOCKS, KNOBS, RECOMPUTED_KNOB


def only(value: Any, why: str) -> Callable[[Any], str]:
    """For :attr:`Limit.cannot`: no other value is possible, for this reason; empty: all are."""
    return lambda asked: "" if asked == value else why


class Limit(NamedTuple):
    """What one knob can be in one training.

    Attributes:
        values: worth trying, in this order; of ``bucket_bytes`` the smallest and the largest. Those
            of ``algorithm`` are :attr:`Offer.algorithms`.
        left_alone: why others are not tried, a sentence; empty: that is nothing to tell.
        cannot: answers why the training cannot have a value; empty: it can.
        fewest: of a knob with fewer values the service is not told.
        changes: by what other values than the default change this training's numbers, so that they
            are only tried if the user allows the knob; empty: by what the knob says.
    """

    values: Sequence[Value] = ()
    left_alone: str = ""
    cannot: Callable[[Any], str] = only(None, "")
    fewest: int = 2
    changes: str = ""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Which settings of one training can be changed, and why the others cannot.

    Attributes:
        kind: of the model: ``replicated``, ``sharded``, ``zero`` or ``single``.
        default: the configuration that the job begins with.
        communicator: of the ranks that train together.
        algorithms: given the allowed names, the algorithms that may be tried, the model's own
            first.
        recomputed: the row of ``recomputed_blocks``.
    """

    kind: ClassVar[str]
    default: Configuration
    communicator: Communicator
    algorithms: Callable[[Collection[str]], Sequence[Algorithm]] = lambda allowed: ()
    recomputed: Limit = field(default_factory=Limit)

    def limits(self) -> dict[str, Limit]:
        """The rows, by knob. A knob without one has no limit, and is tried from its default on."""
        return {}

    @property
    def carried_by(self) -> Mapping[str, str]:
        """What carries the gradients if that is not DistributedDataParallel, as the service is
        told; it is a part of the job's fingerprint."""
        return {}

    def at_first(self, configuration: Configuration) -> Configuration:
        """What of ``configuration`` can be put in force before the first steps have shown the order
        in which the model is used, and what its blocks would keep."""
        return replace(configuration, recomputed_blocks=ALL_BLOCKS)

    def first(self, knob: str, tried: Sequence[Value]) -> list[Value]:
        """The default value, then the others of ``tried``."""
        default = getattr(self.default, knob)
        return [default, *(value for value in tried if value != default)]

    @property
    def is_alone(self) -> bool:
        """Whether a single rank trains the model: of what nothing is sent by, nothing is tried."""
        return self.communicator.world_size == 1

    def table(self) -> dict[str, Limit]:
        """A row for each knob that such models have."""
        rows = {**self.limits(), RECOMPUTED_KNOB: self.recomputed}
        for name, knob in KNOBS.items():
            if self.kind in knob.models and name not in rows:
                rows[name] = Limit(self.first(name, knob.kind.tried))
            if self.is_alone and name in rows and not knob.computes:
                rows[name] = rows[name]._replace(values=(), left_alone="")
        return rows

    def reasons(self) -> list[str]:
        """Why some settings are left alone, a sentence each."""
        return [row.left_alone for row in self.table().values() if row.left_alone]

    @property
    def bucket_bytes(self) -> tuple[int, int] | None:
        """The smallest and the largest size of a bucket that is tried; None: there are none."""
        row = self.table().get("bucket_bytes")
        return None if row is None or not row.values else (int(row.values[0]), int(row.values[-1]))

    @property
    def has_explicit_buckets(self) -> bool:
        """Whether an explicit list of buckets can be cut."""
        row = self.table().get("buckets")
        return row is not None and self.bucket_bytes is not None and not row.cannot((1,))

    def values(self, allowed: Collection[str] = ()) -> dict[str, Sequence[Value]]:
        """The values worth trying of each knob that has few, by knob.

        Args:
            allowed: the values that the user allows although they change the numbers.
        """
        found: dict[str, Sequence[Value]] = {}
        for name, row in self.table().items():
            tried, fewest = [value for value in row.values if not row.cannot(value)], row.fewest
            if name == "algorithm":
                listed = () if self.is_alone else allowed
                choices = [each for each in self.algorithms(listed) if not row.cannot(each.name)]
                tried = [each.name for each in choices]
                # Buckets do not matter to an algorithm that communicates weights. The service must
                # be told its name to know that, even when there is no other choice.
                fewest = 1 if any(each.moves_weights for each in choices) else fewest
            elif row.changes and name not in allowed:
                continue
            elif KNOBS[name].changes_numbers:
                default = getattr(self.default, name)
                tried = [value for value in tried if value == default or str(value) in allowed]
            if name != "bucket_bytes" and len(tried) >= fewest:
                found[name] = tried
        return found

    def has_choice(self, allowed: Collection[str] = ()) -> bool:
        """Whether there is anything to try.

        Args:
            allowed: see :meth:`values`.
        """
        low, high = self.bucket_bytes or (0, 0)
        return low < high or any(len(tried) > 1 for tried in self.values(allowed).values())

    def check(self, configuration: Configuration) -> None:
        """Check that the training can have it.

        Raises:
            ValueError: it cannot.
        """
        configuration.check_model(self.kind)
        for name, row in self.table().items():
            if why := row.cannot(getattr(configuration, name)):
                raise ValueError(why)
