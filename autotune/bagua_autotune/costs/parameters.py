"""The parameters of a network's costs, and the costs that follow from them.

Kinds differ by factors: each value of a knob changes latency and time per byte by its own factor,
independently of the other knobs.  So an untried kind is predicted from those that were tried, and a
factor without measurements keeps its usual value.  The effect of channels on the time per byte
follows a curve: one channel has a rate, the link has a rate, and k channels run at k times the
first rate, but no faster than the link.  So measurements of four channels also predict eight, but
each way to reduce has its own rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs.collectives import Kind
from bagua_autotune.costs.layouts import Floats
from bagua_autotune.model.knobs import KNOWN
from bagua_wire.configuration import Value
from bagua_wire.knobs import ALGORITHM_KNOB

# A message of so many bytes takes twice its latency; 64 KiB to 16 MiB are usual.
USUAL_HALF_BYTES = 2.0**20
HALF_BYTES_SPREAD = 1.5
# An inherited network may have become faster or slower as a whole.
SHIFT_SPREAD = 1.0
UNKNOWN_SPREAD = 0.4
# The rest of a hierarchical chain, as a share of the time for which it occupies the network.
USUAL_CHAIN_SHARE, CHAIN_SPREAD = 0.3, 0.7
# How much faster the link is than one channel, as a logarithm: usually it is not, but it may be
# several times as fast. How sharply the rate of many channels bends into the link's: as on GPUs
# over TCP, less so than where flows share a link without any loss.
USUAL_WIDTH, WIDTH_SPREAD = -0.4, 0.8
BEND = 4.0
# More channels than needed slow each other and the computing down a little.
CHANNEL_LOSS = 0.02
# The positions of these parameters in the vector.
CHAIN, WIDTH, EFFECTS = 4, 5, 6


class Effect(NamedTuple):
    """The effect of a knob's value on log(seconds per byte) and on log(half bytes)."""

    rate: float
    half: float
    rate_spread: float
    half_spread: float


def usual_effect(knob: str, value: Value) -> Effect:
    """The effect expected of a value before it is measured.

    Half the bytes take half the time. Latencies do not change. Channels have little effect beside
    filling the link (see widening).
    """
    if knob == "channels" and isinstance(value, int):
        loss = CHANNEL_LOSS * math.log2(value)
        return Effect(loss, -loss, 0.1, 0.4)
    if knob == "wire_precision" and value in ("bf16", "fp16"):
        return Effect(math.log(0.55), -math.log(0.55), 0.15, 0.4)
    if knob == ALGORITHM_KNOB and value in KNOWN:
        return COMPRESSED[KNOWN[value].compresses]
    return Effect(0.0, 0.0, UNKNOWN_SPREAD, 0.8)


COMPRESSED = {
    "": Effect(0.0, 0.0, 0.15, 0.4),
    "8 bits": Effect(math.log(0.35), math.log(2 / 0.35), 0.3, 0.5),
    "low rank": Effect(math.log(0.1), math.log(2 / 0.1), 0.8, 0.8),
}
"""A quarter of the bytes, or some hundredths of them, as the model has it; the processor's work on
them; and two latencies."""


class Rows(NamedTuple):
    """What the parameters do to the costs of some kinds: shape (kinds, parameters).

    Attributes:
        rate, half, width: coefficients of log(seconds per byte) and of log(half bytes) of one
            channel, and of the width.
        channels: shape (kinds,).
        is_chain: shape (kinds,).
    """

    rate: Floats
    half: Floats
    width: Floats
    channels: Floats
    is_chain: NDArray[np.bool_]

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Whether each parameter changes one of these costs; the base's count as such."""
        found: NDArray[np.bool_] = sum(np.abs(each).sum(axis=0) for each in self[:3]) > 0
        found[:EFFECTS] = True
        return found

    def only(self, seen: NDArray[np.bool_]) -> Rows:
        """Those of some of the parameters."""
        rate, half, width = (each[:, seen] for each in self[:3])
        return self._replace(rate=rate, half=half, width=width)

    def widths(self, x: Floats) -> Floats:
        return np.clip(self.width @ x, -10.0, 10.0)

    def widening(self, x: Floats) -> Floats:
        """The change of log(seconds per byte) with so many channels instead of one."""
        return _widening(self.widths(x), self.channels)

    def widening_slope(self, x: Floats) -> Floats:
        """Its derivative by the width."""
        link = np.exp(-BEND * self.widths(x))
        found: Floats = link / (1.0 + link) - link / (self.channels**-BEND + link)
        return found

    def logs(self, x: Floats) -> tuple[Floats, Floats]:
        """log(seconds per byte) and log(half bytes) of each kind; ``x`` may be a matrix of which
        every column is a vector of parameters."""
        channels = self.channels.reshape(-1, *[1] * (x.ndim - 1))
        wide = _widening(self.widths(x), channels)
        return self.rate @ x + wide, self.half @ x - wide


def _widening(width: Floats, channels: Floats) -> Floats:
    link = np.exp(-BEND * width)
    found: Floats = (np.log(channels**-BEND + link) - np.log(1.0 + link)) / BEND
    return found


@dataclass(frozen=True)
class Parameters:
    """The position of each parameter in the vector: base, shift, chain, width, then two for each
    effect, then what each way to reduce other than flat adds to the width."""

    levels: tuple[tuple[int, Value], ...]
    ways: tuple[Value, ...]

    @classmethod
    def of(cls, kinds: Sequence[Kind]) -> Parameters:
        usual = Kind()
        ways = {kind.hierarchical for kind in kinds} - {usual.hierarchical}
        found = {
            (place, value)
            for kind in kinds
            for place, value in enumerate(kind)
            if value != usual[place]
        }
        return cls(tuple(sorted(found, key=str)), tuple(sorted(ways, key=str)))

    @property
    def count(self) -> int:
        return EFFECTS + 2 * len(self.levels) + len(self.ways)

    @property
    def widens(self) -> NDArray[np.bool_]:
        """Whether each parameter is a part of some width."""
        found = np.zeros(self.count, bool)
        found[WIDTH] = found[EFFECTS + 2 * len(self.levels) :] = True
        return found

    def rows(self, kinds: Sequence[Kind], are_inherited: bool = False) -> Rows:
        """The coefficients of some kinds, of this round or of an earlier one."""
        rate, half, width = np.zeros((3, len(kinds), self.count))
        rate[:, 0] = half[:, 1] = width[:, WIDTH] = 1.0
        rate[:, 2] = half[:, 3] = are_inherited
        for index, (place, value) in enumerate(self.levels):
            has_level = [kind[place] == value for kind in kinds]
            rate[has_level, EFFECTS + 2 * index] = half[has_level, EFFECTS + 2 * index + 1] = 1.0
        for index, way in enumerate(self.ways):
            goes = [kind.hierarchical == way for kind in kinds]
            width[goes, EFFECTS + 2 * len(self.levels) + index] = 1.0
        channels = np.array([kind.channel_count for kind in kinds], float)
        is_chain = np.array([kind.is_chain for kind in kinds], bool)
        return Rows(rate, half, width, channels, is_chain)

    def prior(self, rate: float) -> tuple[Floats, Floats]:
        """Means and spreads; almost nothing is assumed of the base's rate."""
        base = [rate, math.log(USUAL_HALF_BYTES), 0.0, 0.0]
        means = [*base, math.log(USUAL_CHAIN_SHARE), USUAL_WIDTH]
        spreads = [10.0, HALF_BYTES_SPREAD, SHIFT_SPREAD, SHIFT_SPREAD, CHAIN_SPREAD, WIDTH_SPREAD]
        for place, value in self.levels:
            effect = usual_effect(Kind._fields[place], value)
            means += [effect.rate, effect.half]
            spreads += [effect.rate_spread, effect.half_spread]
        means += [0.0] * len(self.ways)
        spreads += [WIDTH_SPREAD] * len(self.ways)
        return np.array(means), np.array(spreads)
