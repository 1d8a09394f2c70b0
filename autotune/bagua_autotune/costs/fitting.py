"""Fits the costs of all kinds of collectives to profiled steps, robustly.

Kinds differ by factors: each value of a knob changes latency and time per byte by its own factor,
independently of the other knobs.  So an untried kind is predicted from those that were tried, and a
factor without measurements keeps its usual value.  The effect of channels on the time per byte
follows a curve: one channel has a rate, the link has a rate, and k channels run at k times the
first rate, but no faster than the link.  So measurements of four channels also predict eight, but
each way to reduce has its own rate.  The fit also gives the uncertainty of the costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.layouts import Floats
from bagua_autotune.costs.queues import Point
from bagua_autotune.model.algorithms import KNOWN
from bagua_autotune.model.knobs import ALGORITHM_KNOB, Value

# A message of so many bytes takes twice its latency; 64 KiB to 16 MiB are usual.
USUAL_HALF_BYTES = 2.0**20
HALF_BYTES_SPREAD = 1.5
# How closely a measured duration follows the straight line, and an inherited cost this network.
DURATION_SPREAD = 0.1
INHERITED_SPREAD = 0.15
# An inherited network may have become faster or slower as a whole.
SHIFT_SPREAD = 1.0
UNKNOWN_SPREAD = 0.4
# The rest of a hierarchical chain, as a share of the time for which it occupies the network.
USUAL_CHAIN_SHARE, CHAIN_SPREAD = 0.3, 0.7
# How much faster the link is than one channel, as a logarithm: usually it is not, but it may be
# several times as fast. How sharply the rate of many channels bends into the link's.
USUAL_WIDTH, WIDTH_SPREAD = -0.4, 0.8
BEND = 4.0
# Costs whose logarithms differ by less count as equal.
SAME_COST = 0.01
# More channels than needed slow each other and the computing down a little.
CHANNEL_LOSS = 0.02
# The solution is the same on every processor: rounding differs from one to another, and with it
# the step at which a looser tolerance would end the fit.
EXACTLY = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12}
# Variances of parameters, in those of their priors, that differ by more are not told apart.
SMALLEST_VARIANCE = 1e-12
# The positions of these parameters in the vector.
CHAIN, WIDTH, EFFECTS = 4, 5, 6


class Effect(NamedTuple):
    """The effect of a knob's value on log(seconds per byte) and on log(half bytes)."""

    rate: float
    half: float
    rate_spread: float
    half_spread: float


class Fit(NamedTuple):
    """The fitted costs.

    ``alternatives`` are other likely costs, one for each parameter that is not known well, with
    what changes beside it: together they show how sure the costs are, and which of them are wrong
    together. ``misfit`` is
    the error of the costs for what was measured: a root mean square of logarithms.
    """

    costs: Costs
    alternatives: Sequence[Costs]
    misfit: float


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


def widening(width: Floats, channels: Floats) -> Floats:
    """The change of log(seconds per byte) with so many channels instead of one.

    Args:
        width: log of the link's rate over one channel's.
        channels: their number.
    """
    link = np.exp(-BEND * width)
    found: Floats = (np.log(channels**-BEND + link) - np.log(1.0 + link)) / BEND
    return found


def _widening_slope(width: Floats, channels: Floats) -> Floats:
    link = np.exp(-BEND * width)
    found: Floats = link / (1.0 + link) - link / (channels**-BEND + link)
    return found


@dataclass(frozen=True)
class _Parameters:
    """The position of each parameter in the vector: base, shift, chain, width, then two for each
    effect, then what each way to reduce other than flat adds to the width."""

    levels: tuple[tuple[int, Value], ...]
    ways: tuple[Value, ...]

    @classmethod
    def of(cls, kinds: Sequence[Kind]) -> _Parameters:
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

    def width_row(self, kind: Kind) -> Floats:
        """Coefficients of the width."""
        row = np.zeros(self.count)
        row[WIDTH] = 1.0
        if kind.hierarchical in self.ways:
            row[EFFECTS + 2 * len(self.levels) + self.ways.index(kind.hierarchical)] = 1.0
        return row

    @property
    def widens(self) -> NDArray[np.bool_]:
        """Whether each parameter is a part of some width."""
        found = np.zeros(self.count, bool)
        found[WIDTH] = found[EFFECTS + 2 * len(self.levels) :] = True
        return found

    def row(self, kind: Kind, is_inherited: bool = False) -> tuple[Floats, Floats]:
        """Coefficients of log(seconds per byte) and of log(half bytes)."""
        rate, half = np.zeros(self.count), np.zeros(self.count)
        rate[0] = half[1] = 1.0
        if is_inherited:
            rate[2] = half[3] = 1.0
        for index, (place, value) in enumerate(self.levels):
            if kind[place] == value:
                rate[EFFECTS + 2 * index] = half[EFFECTS + 2 * index + 1] = 1.0
        return rate, half

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


def fit_costs(
    kinds: Sequence[Kind],
    points: Sequence[Point],
    inherited: Mapping[Kind, Cost] | None = None,
) -> Fit | None:
    """The costs of ``kinds``, by soft-L1 least squares in log seconds with priors.

    Args:
        points: measured in this round.
        inherited: costs measured on this network earlier; all may have changed by one factor.

    Returns:
        None if nothing is known.
    """
    from scipy.optimize import least_squares  # here: takes long to import

    inherited = inherited or {}
    if not points and not inherited:
        return None
    parameters = _Parameters.of([*kinds, *(point.kind for point in points), *inherited])
    data = _Data(parameters, points, inherited)
    solution = least_squares(
        data.residuals,
        data.means,
        jac=data.jacobian,
        loss="soft_l1",
        x_scale=data.prior_spreads,
        **EXACTLY,
        max_nfev=60,
    )
    costs = _costs(parameters, solution.x, kinds)
    misfit = data.misfit(solution.x)
    steps = data.spreads(solution.jac, misfit)
    others = [_costs(parameters, solution.x + step, kinds) for step in steps]
    return Fit(costs, [other for other in others if _distance(costs, other) > SAME_COST], misfit)


def _costs(parameters: _Parameters, x: Floats, kinds: Sequence[Kind]) -> Costs:
    return {kind: _cost(parameters, x, kind) for kind in kinds}


def _distance(costs: Costs, other: Costs) -> float:
    """The largest difference of the logarithms of two costs."""
    return max(
        abs(mine - theirs)
        for kind, cost in costs.items()
        for mine, theirs in zip(_logs(cost), _logs(other[kind]), strict=True)
    )


class _Data:
    """The residuals of a fit: points, inherited costs, priors; each divided by its spread."""

    def __init__(
        self, parameters: _Parameters, points: Sequence[Point], inherited: Mapping[Kind, Cost]
    ) -> None:
        rows = [parameters.row(point.kind) for point in points]
        self._rate = np.array([row[0] for row in rows]).reshape(-1, parameters.count)
        self._half = np.array([row[1] for row in rows]).reshape(-1, parameters.count)
        queues = np.array([point.queue for point in points], float).reshape(-1, 4)
        self._latencies = np.log(queues[:, 0])
        self._bytes, self._tail_bytes = queues[:, 1], queues[:, 2]
        self._seconds = np.log(queues[:, 3])
        counts = np.array([point.weight for point in points], float)
        self._weights = np.sqrt(np.minimum(counts, 16.0)) / DURATION_SPREAD
        known = [(kind, _logs(cost)) for kind, cost in inherited.items()]
        linear = [row for kind, _ in known for row in parameters.row(kind, is_inherited=True)]
        rate = known[0][1][0] if known else 0.0
        if len(points):
            rate = float(np.median(self._seconds - np.log(self._bytes + USUAL_HALF_BYTES)))
        self.means, spreads = parameters.prior(rate)
        shares = [c.chain_seconds_per_byte / c.seconds_per_byte for c in inherited.values()]
        if any(shares):
            chain_share = float(np.median([share for share in shares if share > 0]))
            self.means[CHAIN], spreads[CHAIN] = math.log(chain_share), INHERITED_SPREAD
        self.prior_spreads = spreads
        self._widens = parameters.widens
        priors = np.eye(parameters.count) / spreads[:, None]
        self._linear = np.concatenate(
            [np.array(linear).reshape(-1, parameters.count) / INHERITED_SPREAD, priors]
        )
        targets = [log / INHERITED_SPREAD for _, logs in known for log in logs]
        self._targets = np.concatenate([np.array(targets), self.means / spreads])
        self._channels = np.array([point.kind.channel_count for point in points], float)
        widths = [parameters.width_row(point.kind) for point in points]
        self._widths = np.array(widths).reshape(-1, parameters.count)
        # More channels raise the rate, not the latencies; the priors do not contain it.
        signs = [sign / INHERITED_SPREAD for _ in known for sign in (1.0, -1.0)]
        self._signs = np.array(signs + [0.0] * parameters.count)
        channels = [kind.channel_count for kind, _ in known for _ in range(2)]
        self._linear_channels = np.array(channels + [1] * parameters.count, float)
        widths = [parameters.width_row(kind) for kind, _ in known for _ in range(2)]
        self._linear_widths = np.array([*widths, *np.zeros((parameters.count, parameters.count))])

    def residuals(self, x: Floats) -> Floats:
        wide = widening(_bounded(self._widths @ x), self._channels)
        predicted = self._rate @ x + wide + np.log(sum(self._terms(x, wide)))
        linear = self._linear @ x
        linear += self._signs * widening(_bounded(self._linear_widths @ x), self._linear_channels)
        return np.concatenate([(predicted - self._seconds) * self._weights, linear - self._targets])

    def jacobian(self, x: Floats) -> Floats:
        width = _bounded(self._widths @ x)
        half_bytes, tail_bytes, held_bytes = self._terms(x, widening(width, self._channels))
        total = half_bytes + tail_bytes + held_bytes
        measured = self._rate + self._half * (half_bytes / total)[:, None]
        measured[:, CHAIN] += tail_bytes / total
        slope = _widening_slope(width, self._channels) * (1.0 - half_bytes / total)
        measured += slope[:, None] * self._widths
        slope = self._signs * _widening_slope(
            _bounded(self._linear_widths @ x), self._linear_channels
        )
        linear = self._linear + slope[:, None] * self._linear_widths
        return np.concatenate([measured * self._weights[:, None], linear])

    def misfit(self, x: Floats) -> float:
        """See Fit; 0 if nothing was measured."""
        errors = self.residuals(x)[: len(self._weights)] / self._weights
        return float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0

    def spreads(self, jacobian: Floats, misfit: float) -> Floats:
        """Steps of one standard deviation from a solution, one in each row. The sum of their outer
        products is the covariance of the parameters (Gauss-Newton); each points to lower costs.

        They are the rows of the covariance's symmetric root, in units of the priors' spreads. There
        every parameter is known at least as well as a number of the size of 1, and there is one
        such root: directions of equal variance, and their signs, would be the rounding's choice.

        If the model explains the points badly they count for less: it is as wrong elsewhere.
        """
        scaled = jacobian * self.prior_spreads
        scaled[: len(self._weights)] /= max(1.0, misfit / DURATION_SPREAD)
        values, vectors = np.linalg.eigh(scaled.T @ scaled)
        values = np.maximum(values, SMALLEST_VARIANCE * values[-1])
        root = (vectors / np.sqrt(values)) @ vectors.T
        # A wider link costs less, of all else less does.
        steps: Floats = np.where(self._widens, 1.0, -1.0)[:, None] * root * self.prior_spreads
        return steps

    def _terms(self, x: Floats, wide: Floats) -> tuple[Floats, Floats, Floats]:
        """The time of each queue, in bytes: of its latencies, of its last chain's end, its own."""
        latencies_ = np.exp(np.clip(self._half @ x - wide + self._latencies, -60.0, 60.0))
        return latencies_, self._tail_bytes * np.exp(np.clip(x[CHAIN], -60.0, 60.0)), self._bytes


def _bounded(width: Floats) -> Floats:
    return np.clip(width, -10.0, 10.0)


def _logs(cost: Cost) -> tuple[float, float]:
    rate = math.log(cost.seconds_per_byte)
    return rate, math.log(cost.latency_seconds) - rate


def _cost(parameters: _Parameters, x: Floats, kind: Kind) -> Cost:
    rate, half = (float(row @ x) for row in parameters.row(kind))
    width = _bounded(np.array(parameters.width_row(kind) @ x))
    wide = float(widening(width, np.array(kind.channel_count, float)))
    rate, half = rate + wide, half - wide
    chain = math.exp(rate + float(x[CHAIN])) if kind.is_chain else 0.0
    return Cost(math.exp(rate + half), math.exp(rate), chain)
