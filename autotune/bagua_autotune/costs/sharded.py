"""The cost model of a sharded model's job: what its gathers and reductions take, and how much of
that a step shows.

A step's communication is the sum of its collectives, each with a latency and a time for each byte
(Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). Their durations are
those of the profiled steps. Which of them are left, and of what size, follows from a configuration:
what is kept is gathered once in a pass, or in a step, units that communicate as one share a
latency, fewer bits take less time. How much of what is saved shows in the step is a slope, which is
known roughly from how busy the network was and better once several configurations are profiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs.fitting import BEND
from bagua_autotune.costs.layouts import Floats, Layouts
from bagua_autotune.model.knobs import algorithm_of
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Cutting
from bagua_wire.knobs import (
    ALGORITHM_KNOB,
    CHANNELS_KNOB,
    DEFERRED_KNOB,
    KEPT_OVER_KNOB,
    NODE_COPY_KNOB,
    PRECISION_KNOB,
    WAYS_KNOB,
)
from bagua_wire.profile import BucketTiming, GatherTiming, Profile

# What more channels gain a sharded model, from the numbers of them that were profiled.

GAIN_PER_DOUBLING = 0.7
"""Part of the time that is left with twice as many channels, where one number of them is profiled,
up to ``USEFUL_CHANNELS``; with an error of ``DOUBLING_ERROR`` for each doubling, as a logarithm."""
USEFUL_CHANNELS = 4
STRIPE_LOSS = 0.3
"""Of the rate that another channel adds, for each one that there is already."""
DOUBLING_ERROR, SMALLEST_DOUBT = 0.3, 0.05


class Stripes:
    """Channels gain what is usual, and less where the link is nearly full: so two numbers of them
    tell the link's rate from one channel's.

    Args:
        seconds: that the same traffic takes, by the number of channels; at least one.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._known = sorted(seconds)
        few, many = self._known[0], self._known[-1]
        # What the link adds to the time, to the power of BEND, where one channel alone takes 1.
        self._link: float | None = None
        if few != many:
            left = min(seconds[many] / seconds[few], 1 - 1e-3) ** BEND
            link = (_useful(many) ** -BEND - left * _useful(few) ** -BEND) / (left - 1)
            self._link = max(link, 0.0)

    def nearest(self, count: int) -> int:
        """The known number that is nearest."""
        return min(self._known, key=lambda known: (abs(math.log2(known / count)), known))

    def gain(self, count: int) -> tuple[float, float]:
        """The part of the nearest number's time that is left with so many channels, and how far
        off that may be, as a logarithm."""
        nearest = self.nearest(count)
        doubt = DOUBLING_ERROR * abs(math.log2(count / nearest))
        if self._link is None:
            useful = min(count, USEFUL_CHANNELS) / min(nearest, USEFUL_CHANNELS)
            return GAIN_PER_DOUBLING ** math.log2(useful), doubt
        slow, fast = (_useful(each) ** -BEND + self._link for each in (nearest, count))
        left = (fast / slow) ** (1 / BEND)
        # Where the link is full already, more channels change little.
        return left, min(doubt, abs(math.log(left)) + SMALLEST_DOUBT)


def _useful(count: int) -> float:
    """To how many channels that do not slow each other so many amount."""
    return (1 - (1 - STRIPE_LOSS) ** min(count, USEFUL_CHANNELS)) / STRIPE_LOSS


BYTES_OF_16_BITS, BYTES_OF_8_BITS = 2.0, 1 + 8 / 1024
"""Of an element; 1,024 numbers in 8 bits share two bounds of 4 bytes."""
SHORTEST_SECONDS = 1e-9
MOST_REMEMBERED = 2**14
"""Configurations of which it is remembered what they send: those of a job or two."""
LATENCY_SECONDS = 50e-6
"""Of a collective, where the profiled ones do not tell: those of some GPUs and processors."""
SHOWN_ERROR = 0.3
"""Of the slope, before several configurations are profiled."""
OTHER_WAY_ERROR = 0.3
"""As a logarithm, of the time that another algorithm or way takes, before it is profiled: what the
processors do for it, and what it has other links carry."""


class Traffic(NamedTuple):
    """What travels in a step.

    Attributes:
        collectives: how many gathers and reductions.
        gathered_bytes, reduced_bytes: on every rank.
    """

    collectives: float
    gathered_bytes: float
    reduced_bytes: float


class Rate(NamedTuple):
    """Seconds for each byte of a gather and of a reduction."""

    gather: float
    reduction: float

    def seconds(self, traffic: Floats) -> Floats:
        """How long it travels, one collective after the other; see Traffic, whose numbers are along
        the first axis."""
        collectives, gathered_bytes, reduced_bytes = traffic
        latency = LATENCY_SECONDS * collectives
        found: Floats = latency + self.gather * gathered_bytes + self.reduction * reduced_bytes
        return found


class ShardedModel:
    """See Predictor; of profiled steps whose gathers are known.

    Args:
        layouts: of the units.
        profiled: steps of this round, each with its configuration; at least one.

    Attributes:
        slope: the part of the communication by which a step becomes longer.
        misfit: see Predictor.
    """

    def __init__(self, layouts: Layouts, profiled: Sequence[tuple[Configuration, Profile]]) -> None:
        self._layouts = layouts
        # What was asked last, and the answer, for all that :meth:`computing` makes of this one.
        self._latest: list[Any] = []
        by_configuration: dict[Configuration, list[Profile]] = {}
        for configuration, profile in profiled:
            by_configuration.setdefault(configuration, []).append(profile)
        first = next(iter(by_configuration.items()))
        self._profiled = {_way(configuration) for configuration in by_configuration}
        self._gathers = _gathers_by_unit(layouts, *first)
        self._reductions = _reductions(layouts, *first)
        self._passes = _passes([times for times, _ in self._gathers], self._reductions)
        if first[0].get(DEFERRED_KNOB) == "on":
            self._reductions = self._passes
        alike = {c: p for c, p in by_configuration.items() if _way(c) == _way(first[0])}
        self._rates = self._rates_of(alike)
        usual = np.array(self.traffic(first[0]))
        self._stripes = Stripes({n: float(r.seconds(usual)) for n, r in self._rates.items()})
        measured = [
            (float(x), median(p.step_seconds for p in profiles))
            for x, profiles in zip(
                self._communications([*by_configuration]), by_configuration.values(), strict=True
            )
        ]
        busy = median(min(_busy_seconds(p) / p.step_seconds, 1.0) for p in first[1])
        self.slope, self._slope_error, self._rest = _line(measured, busy)
        communication, steps = np.array(measured).T
        self._first_seconds = float(self._rest + self.slope * communication[0])
        errors = np.log(steps) - self._log_steps(communication)
        self.misfit = float(np.sqrt(np.mean(np.square(errors))))

    def computing(self, share: float) -> ShardedModel:
        """This model where computing, nearly all of the first step, takes so much of its time."""
        other = copy(self)
        other._rest = self._rest - (1 - share) * self._first_seconds
        return other

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor."""
        return self._log_steps(self._communications(configurations))

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor: that of the slope, and those of numbers of channels and of ways that were
        not profiled."""
        communication = self._communications(configurations)
        own = self._log_steps(communication)
        least, most = self.slope - self._slope_error, self.slope + self._slope_error
        steeper = most if most <= 1 else least
        first = self._rest + self.slope * communication[0]
        other = np.maximum(first + steeper * (communication - communication[0]), SHORTEST_SECONDS)
        rows = [np.log(other) - own]
        for is_doubted, error in self._doubts(configurations):
            longer = np.where(is_doubted, np.exp(error), 1.0)
            rows.append(self._log_steps(communication * longer) - own)
        return np.array(rows)

    def _doubts(
        self, configurations: Sequence[Configuration]
    ) -> list[tuple[NDArray[np.bool_], float]]:
        """What is not known: whose communication it concerns, and how far off, as a logarithm,
        that may be."""
        counts = np.array(list(map(_channels, configurations)))
        unknown = sorted(set(counts.tolist()) - self._rates.keys(), key=str)
        found = [(counts == count, self._stripes.gain(count)[1]) for count in unknown]
        ways = list(map(_way, configurations))
        for way in sorted(set(ways) - self._profiled):
            found.append((np.array([each == way for each in ways]), OTHER_WAY_ERROR))
        return found

    def traffic(self, configuration: Configuration) -> Traffic:
        """What a step under a configuration sends."""
        kept = self._kept(configuration)
        tensors = self._layouts.tensors
        narrows = configuration.get(PRECISION_KNOB, "as_is") != "as_is"
        eight_bits = algorithm_of(configuration).eight_bits
        reduced_in = BYTES_OF_16_BITS if narrows else np.inf
        if "reduced" in eight_bits:
            reduced_in = BYTES_OF_8_BITS
        gathered_in = BYTES_OF_8_BITS if "gathered" in eight_bits else np.inf
        collectives, gathered, reduced = 0.0, 0.0, 0.0
        for part in _parts(self._layouts, configuration):
            times, sizes_bytes = zip(*(self._gathers[unit] for unit in part), strict=True)
            is_kept = all(unit in kept for unit in part)
            count = max(times) / 2 if is_kept else max(times)
            if configuration.get(KEPT_OVER_KNOB) == "on" and count <= self._passes:
                count = 1
            reductions = 1 if configuration.get(DEFERRED_KNOB) == "on" else self._reductions
            collectives += count + reductions
            for unit, size_bytes in zip(part, sizes_bytes, strict=True):
                elements = tensors[unit].elements
                gathered += count * min(gathered_in * elements, size_bytes)
                reduced += reductions * min(reduced_in * elements, tensors[unit].bytes)
        return Traffic(collectives, gathered, reduced)

    def _kept(self, configuration: Configuration) -> set[int]:
        """Units that are gathered over the network in the forward pass only. The first to become
        ready are the last of the model."""
        eligible = [u for u, (times, _) in enumerate(self._gathers) if times > self._passes]
        if configuration.get(NODE_COPY_KNOB, "off") == "on":
            return set(eligible)
        return set(eligible[: _number(configuration, "kept_units", 0)])

    def _rates_of(self, profiled: Mapping[Configuration, Sequence[Profile]]) -> dict[int, Rate]:
        """By the number of channels: medians over the profiled steps."""
        found: dict[int, list[Rate]] = {}
        for configuration, profiles in profiled.items():
            gathered_bytes, reduced_bytes = self.traffic(configuration)[1:]
            for profile in profiles:
                gathers, buckets = profile.gathers, profile.buckets
                gathering, reducing = _seconds(gathers), _seconds(buckets)
                # Some wait for others, and some share the link with others.
                together = _busy_seconds(profile) / max(gathering + reducing, SHORTEST_SECONDS)
                rate = Rate(
                    _per_byte(gathering * together, len(gathers), gathered_bytes),
                    _per_byte(reducing * together, len(buckets), reduced_bytes),
                )
                found.setdefault(_channels(configuration), []).append(rate)
        return {
            count: Rate(median(r.gather for r in rates), median(r.reduction for r in rates))
            for count, rates in found.items()
        }

    def _communications(self, configurations: Sequence[Configuration]) -> Floats:
        """The seconds for which each of them would communicate, one collective after the other."""
        if not self._latest or self._latest[0] is not configurations:
            self._latest[:] = configurations, self._found_communications(configurations)
        found: Floats = self._latest[1]
        return found

    def _found_communications(self, configurations: Sequence[Configuration]) -> Floats:
        sent = list(map(_sent, configurations))
        # Of thousands of configurations a few hundred differ in what they send.
        different = dict(zip(sent, configurations, strict=True))
        place_of = {key: place for place, key in enumerate(different)}
        traffic = np.array([self.traffic(c) for c in different.values()])
        places = [place_of[key] for key in sent]
        counts = list(map(_channels, configurations))
        gains = {count: self._stripes.gain(count)[0] for count in set(counts)}
        rates = {count: self._rates[self._stripes.nearest(count)] for count in gains}
        seconds = {count: rates[count].seconds(traffic.T) * gain for count, gain in gains.items()}
        return np.array([seconds[c][place] for c, place in zip(counts, places, strict=True)])

    def _log_steps(self, communication_seconds: Floats) -> Floats:
        steps = self._rest + self.slope * communication_seconds
        found: Floats = np.log(np.maximum(steps, SHORTEST_SECONDS))
        return found


def is_sharded(profiled: Sequence[tuple[Configuration, Profile]]) -> bool:
    """Whether steps are those of a model whose parameters are gathered."""
    return any(profile.gathers for _, profile in profiled)


@lru_cache(maxsize=MOST_REMEMBERED)
def _sent(configuration: Configuration) -> tuple[object, ...]:
    """All that decides what it sends."""
    knobs = (
        "kept_units",
        KEPT_OVER_KNOB,
        DEFERRED_KNOB,
        NODE_COPY_KNOB,
        PRECISION_KNOB,
        ALGORITHM_KNOB,
    )
    return (Cutting.of(configuration), *map(configuration.get, knobs))


def _number(configuration: Configuration, knob: str, usual: int) -> int:
    count = configuration.get(knob, usual)
    return count if isinstance(count, int) else usual


def _channels(configuration: Configuration) -> int:
    return _number(configuration, CHANNELS_KNOB, 1)


@lru_cache(maxsize=MOST_REMEMBERED)
def _way(configuration: Configuration) -> str:
    """What decides a rate beside the channels."""
    return " ".join(str(configuration.get(k)) for k in (ALGORITHM_KNOB, WAYS_KNOB, NODE_COPY_KNOB))


def _gathers_by_unit(
    layouts: Layouts, configuration: Configuration, profiles: Sequence[Profile]
) -> list[tuple[float, float]]:
    """How often each unit is gathered in a step in which none is kept, and its bytes.

    Args:
        configuration: of the profiles; whatever it keeps is gathered once more without it.
    """
    found: list[tuple[float, float]] = []
    for part in _parts(layouts, configuration):
        own = [[g.bytes for g in profile.gathers if g.tensor in part] for profile in profiles]
        times = float(median(map(len, own)))
        size_bytes = max((size for sizes in own for size in sizes), default=0)
        elements = [layouts.tensors[unit].elements for unit in part]
        found += [(times, size_bytes * each / max(sum(elements), 1)) for each in elements]
    count, passes = _number(configuration, "kept_units", 0), 1.0
    if configuration.get(KEPT_OVER_KNOB) == "on":
        passes = _passes(
            [times for times, _ in found], _reductions(layouts, configuration, profiles)
        )
    return [
        (
            2 * max(times, passes) if at < count else times if times > 1 else passes * times,
            size_bytes,
        )
        for at, (times, size_bytes) in enumerate(found)
    ]


def _reductions(
    layouts: Layouts, configuration: Configuration, profiles: Sequence[Profile]
) -> float:
    """How often the gradients of each unit are reduced in a step."""
    parts = len(_parts(layouts, configuration))
    return max(1.0, round(median(len(profile.buckets) for profile in profiles) / parts))


def _passes(times: Sequence[float], reductions: float) -> float:
    """How many passes a step has, if its units are gathered so often in it, and reduced."""
    return max(reductions, max(times) / 2, 1.0)


def _parts(layouts: Layouts, configuration: Configuration) -> list[range]:
    """The units that communicate as one; those of a part are neighbours."""
    ends = [last + 1 for last in layouts.cut(configuration).last.tolist()]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _seconds(timings: Sequence[GatherTiming | BucketTiming]) -> float:
    """Of all together, one by one."""
    return sum(t.ended_seconds - t.started_seconds for t in timings)


def _per_byte(seconds: float, collectives: int, sizes_bytes: float) -> float:
    """Of what they take beyond their latencies."""
    beyond = max(seconds - LATENCY_SECONDS * collectives, 0.1 * seconds)
    return beyond / max(sizes_bytes, 1.0)


def _busy_seconds(profile: Profile) -> float:
    """How long something travelled."""
    busy, until = 0.0, 0.0
    both: list[GatherTiming | BucketTiming] = [*profile.gathers, *profile.buckets]
    for timing in sorted(both, key=lambda t: t.started_seconds):
        busy += max(timing.ended_seconds - max(timing.started_seconds, until), 0.0)
        until = max(until, timing.ended_seconds)
    return busy


def _line(points: Sequence[tuple[float, float]], usual_slope: float) -> tuple[float, float, float]:
    """Slope, its error, and level of step seconds over communication's, by least squares with a
    normal prior of the slope; within 0 to 1."""
    x, y = np.array(points, float).T
    centred = x - x.mean()
    spread = max(0.03 * float(np.median(y)), SHORTEST_SECONDS)
    precision = float(centred @ centred) / spread**2 + 1 / SHOWN_ERROR**2
    slope = (float(centred @ y) / spread**2 + usual_slope / SHOWN_ERROR**2) / precision
    slope = float(np.clip(slope, 0.05, 1.0))
    return slope, precision**-0.5, float(np.median(y - slope * x))
