"""A device's memory on paper, for a sharded model that is trained on a CPU."""

from __future__ import annotations

from bagua_client.layout import Layout
from bagua_client.sharded.memory import UnitsMemory, copied_bytes, extra_bytes
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.tunable.memory import Taken

OTHERS_BYTES = 2**40
"""Beside what torch may take: what process groups need is no matter here."""


class ScriptedMemory:
    """What a configuration takes of it is what is predicted, or a multiple.

    Args:
        tunable: of the model, whose memory this becomes.
        rest_bytes: that the default takes.
        allowed_bytes: that there are.

    Attributes:
        most_bytes: the most that was ever taken; above ``allowed_bytes`` a GPU would have ended the
            training.
        retries: as of torch's allocator; a test may raise it.
    """

    def __init__(self, tunable: TunableUnits, rest_bytes: int, allowed_bytes: int) -> None:
        self.rest_bytes, self.most_bytes, self.retries = rest_bytes, 0, 0
        self._tunable, self._allowed_bytes = tunable, allowed_bytes
        share = tunable.memory.share if tunable.memory is not None else UnitsMemory.share
        tunable._held.memory = UnitsMemory(
            tunable.units, self, tunable.layout, tunable.declared.new
        )
        tunable._held.memory.share = share
        tunable._held.memory.read()

    def peak_of(self, layout: Layout) -> int:
        """What a layout takes."""
        configuration, algorithm_of = layout.configuration, self._tunable.declared.new
        algorithm = algorithm_of(configuration)
        units, parts = self._tunable.units, layout.partition
        extra = extra_bytes(units, configuration, parts, algorithm)
        extra += max(sum(copied_bytes(units, configuration, part, algorithm)) for part in parts)
        return self.rest_bytes + extra

    def reset(self) -> None:
        pass

    def taken(self) -> Taken:
        peak_bytes = self.peak_of(self._tunable.layout)
        self.most_bytes = max(self.most_bytes, peak_bytes)
        return Taken(peak_bytes, self.retries)

    def now_bytes(self) -> int:
        return self.peak_of(self._tunable.layout)

    def allowed_bytes(self) -> int:
        return self._allowed_bytes

    def largest_bytes(self) -> int:
        return 0

    def reachable_bytes(self) -> int:
        return self._allowed_bytes + OTHERS_BYTES
