"""Fits the costs of all kinds of collectives to what profiled steps show of the network, robustly,
and says how sure they are.

Kinds differ by factors: each value of a knob changes latency and time per byte by its own factor,
independently of the other knobs.  So an untried kind is predicted from those that were tried, and a
factor without measurements keeps its usual value.  The effect of channels on the time per byte
follows a curve: one channel has a rate, the link has a rate, and k channels run at k times the
first rate, but no faster than the link.  So measurements of four channels also predict eight, but
each way to reduce has its own rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.layouts import Floats, latencies
from bagua_autotune.model.knobs import KNOWN
from bagua_wire.configuration import Value
from bagua_wire.knobs import ALGORITHM_KNOB
from bagua_wire.profile import BucketTiming, Profile

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


SMALLEST_SECONDS = 1e-7


class Queue(NamedTuple):
    """Buckets sent without a pause; ``tail_bytes`` are those of the end of the last chain."""

    latencies: float
    bytes: float
    tail_bytes: float
    seconds: float


class Point(NamedTuple):
    """A typical queue under one kind, the median of ``weight`` queues."""

    kind: Kind
    queue: Queue
    weight: int


def points_of(kind: Kind, profiles: Sequence[Profile]) -> list[Point]:
    """The durations of one trial's buckets, reduced to a few sizes."""
    alike: dict[tuple[int, bool], list[Queue]] = {}
    for profile in profiles:
        for queue in _queues(profile, kind):
            place = round(2 * math.log2(queue.bytes)), queue.tail_bytes > 0
            alike.setdefault(place, []).append(queue)
    return [
        Point(kind, Queue(*np.median(np.array(members), axis=0).tolist()), len(members))
        for members in alike.values()
    ]


def _queues(profile: Profile, kind: Kind) -> list[Queue]:
    """The queues of one profiled step.

    On one channel each bucket is a queue by itself, which starts when the previous one has ended.
    Where buckets overlap, on several channels or in a chain, only a whole queue shows the rate of
    the network.
    """
    queues: list[Queue] = []
    waiting: list[BucketTiming] = []
    ended = 0.0
    for bucket in profile.buckets:
        if waiting and bucket.started_seconds >= ended:
            queues += _split(waiting, kind)
            waiting = []
        waiting.append(bucket)
        ended = max(ended, bucket.ended_seconds)
    return queues + _split(waiting, kind)


def _split(buckets: Sequence[BucketTiming], kind: Kind) -> list[Queue]:
    began = buckets[0].started_seconds
    if kind.is_chain or kind.channel_count > 1:
        ended = max(bucket.ended_seconds for bucket in buckets)
        sizes = [float(bucket.bytes) for bucket in buckets]
        tail_bytes = max(sizes) if kind.is_chain else 0.0
        count = latencies(sizes, kind.channel_count)
        return [_queue(count, sum(sizes), tail_bytes, ended - began)]
    queues = []
    for bucket in buckets:
        began = max(began, bucket.started_seconds)
        queues.append(_queue(1.0, bucket.bytes, 0, bucket.ended_seconds - began))
        began = bucket.ended_seconds
    return queues


def _queue(count: float, held: float, tail: float, seconds: float) -> Queue:
    return Queue(count, max(held, 1.0), tail, max(seconds, SMALLEST_SECONDS))


# How closely a measured duration follows the straight line, and an inherited cost this network.
DURATION_SPREAD = 0.1
INHERITED_SPREAD = 0.15
# Costs whose logarithms differ by less count as equal.
SAME_COST = 0.01
# The solution is the same on every processor: rounding differs from one to another, and with it
# the step at which a looser tolerance would end the fit.
EXACTLY = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12}
# Variances of parameters, in those of their priors, that differ by more are not told apart.
SMALLEST_VARIANCE = 1e-12


class Fit(NamedTuple):
    """The fitted costs.

    ``alternatives`` are other likely costs, one for each parameter that is not known well, with
    what changes beside it: together they show how sure the costs are, and which of them are wrong
    together; shape (alternatives, kinds, 3), kinds and parts as ``costs`` has them. ``misfit`` is
    the error of the costs for what was measured: a root mean square of logarithms.
    """

    costs: Costs
    alternatives: Floats
    misfit: float


def fit_costs(
    kinds: Sequence[Kind], points: Sequence[Point], inherited: Mapping[Kind, Cost] | None = None
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
    parameters = Parameters.of([*kinds, *(point.kind for point in points), *inherited])
    data = _Data(parameters, points, inherited)
    # Nothing tells what the other parameters are: they are as their priors have them.
    seen, x, steps = data.seen, data.prior_means.copy(), np.diag(data.prior_steps)
    solution = least_squares(
        data.residuals,
        data.prior_means[seen],
        jac=data.jacobian,
        loss="soft_l1",
        x_scale=data.spreads,
        **EXACTLY,
        max_nfev=60,
    )
    misfit = data.misfit(solution.x)
    x[seen], steps[np.ix_(seen, seen)] = solution.x, data.steps(solution.jac, misfit)
    tried = np.column_stack([x, (x + steps).T])
    rows = parameters.rows(kinds)
    rates, halves = rows.logs(tried)
    tails = np.where(rows.is_chain[:, None], np.exp(rates + tried[CHAIN]), 0.0)
    # By parameter vector, kind, and part of a cost.
    table = np.array([np.exp(rates + halves), np.exp(rates), tails]).T
    apart = [np.abs(logs - logs[:, :1]).max(axis=0) for logs in (rates, halves)]
    costs = {kind: Cost(*each) for kind, each in zip(kinds, table[0].tolist(), strict=True)}
    return Fit(costs, table[np.maximum(*apart) > SAME_COST], misfit)


class _Data:
    """The residuals of a fit: points, inherited costs, priors; each divided by its spread.

    Attributes:
        prior_means: of all parameters.
        prior_steps: their priors' spreads, towards lower costs.
        seen: whether each is in a point or in an inherited cost; only these are fitted.
        spreads: of these, their priors'.
    """

    def __init__(
        self, parameters: Parameters, points: Sequence[Point], inherited: Mapping[Kind, Cost]
    ) -> None:
        rows = parameters.rows([point.kind for point in points])
        known = parameters.rows([*inherited], are_inherited=True)
        self.seen = rows.seen | known.seen
        self._rows, self._inherited = rows.only(self.seen), known.only(self.seen)
        queues = np.array([point.queue for point in points], float).reshape(-1, 4)
        self._latencies = np.log(queues[:, 0])
        self._bytes, self._tail_bytes = queues[:, 1], queues[:, 2]
        self._seconds = np.log(queues[:, 3])
        counts = np.array([point.weight for point in points], float)
        self._weights = np.sqrt(np.minimum(counts, 16.0)) / DURATION_SPREAD
        latencies, rates, tails = (
            np.array([cost.parts for cost in inherited.values()]).reshape(-1, 3).T
        )
        self._known = np.log(rates), np.log(latencies) - np.log(rates)
        rate = float(self._known[0][0]) if inherited else 0.0
        if len(points):
            rate = float(np.median(self._seconds - np.log(self._bytes + USUAL_HALF_BYTES)))
        self.prior_means, spreads = parameters.prior(rate)
        shares = (tails / rates)[tails > 0]
        if len(shares):
            self.prior_means[CHAIN] = math.log(float(np.median(shares)))
            spreads[CHAIN] = INHERITED_SPREAD
        # A wider link costs less, of all else less does.
        self.prior_steps = np.where(parameters.widens, spreads, -spreads)
        self._means, self.spreads = self.prior_means[self.seen], spreads[self.seen]

    def residuals(self, x: Floats) -> Floats:
        wide = self._rows.widening(x)
        predicted = self._rows.rate @ x + wide + np.log(sum(self._terms(x, wide)))
        rates, halves = (
            (found - known) / INHERITED_SPREAD
            for found, known in zip(self._inherited.logs(x), self._known, strict=True)
        )
        apart = (x - self._means) / self.spreads
        measured = (predicted - self._seconds) * self._weights
        return np.concatenate([measured, rates, halves, apart])

    def jacobian(self, x: Floats) -> Floats:
        rows, known = self._rows, self._inherited
        half_bytes, tail_bytes, held_bytes = self._terms(x, rows.widening(x))
        total = half_bytes + tail_bytes + held_bytes
        measured = rows.rate + rows.half * (half_bytes / total)[:, None]
        measured[:, CHAIN] += tail_bytes / total
        measured += (rows.widening_slope(x) * (1.0 - half_bytes / total))[:, None] * rows.width
        # More channels raise the rate, not the latencies.
        widens = known.widening_slope(x)[:, None] * known.width
        inherited = np.concatenate([known.rate + widens, known.half - widens]) / INHERITED_SPREAD
        priors = np.diag(1 / self.spreads)
        return np.concatenate([measured * self._weights[:, None], inherited, priors])

    def misfit(self, x: Floats) -> float:
        """See Fit; 0 if nothing was measured."""
        errors = self.residuals(x)[: len(self._weights)] / self._weights
        return float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0

    def steps(self, jacobian: Floats, misfit: float) -> Floats:
        """Steps of one standard deviation from a solution, one in each row. The sum of their outer
        products is the covariance of the parameters (Gauss-Newton); each points to lower costs.

        They are the rows of the covariance's symmetric root, in units of the priors' spreads. There
        every parameter is known at least as well as a number of the size of 1, and there is one
        such root: directions of equal variance, and their signs, would be the rounding's choice.

        If the model explains the points badly they count for less: it is as wrong elsewhere.
        """
        scaled = jacobian * self.spreads
        scaled[: len(self._weights)] /= max(1.0, misfit / DURATION_SPREAD)
        values, vectors = np.linalg.eigh(scaled.T @ scaled)
        values = np.maximum(values, SMALLEST_VARIANCE * values[-1])
        root = (vectors / np.sqrt(values)) @ vectors.T
        signs = np.sign(self.prior_steps[self.seen])
        found: Floats = signs[:, None] * root * self.spreads
        return found

    def _terms(self, x: Floats, wide: Floats) -> tuple[Floats, Floats, Floats]:
        """The time of each queue, in bytes: of its latencies, of its last chain's end, its own."""
        latencies_ = np.exp(np.clip(self._rows.half @ x - wide + self._latencies, -60.0, 60.0))
        return latencies_, self._tail_bytes * np.exp(np.clip(x[CHAIN], -60.0, 60.0)), self._bytes
