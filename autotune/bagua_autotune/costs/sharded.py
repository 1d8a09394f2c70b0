"""The cost model of a sharded model's job: what its gathers and reductions take, and how much of
that a step shows.

A step's communication is the sum of its collectives, each with a latency and a time for each byte
(Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). Their durations are
those of the profiled steps. Which of them are left, and of what size, follows from a configuration:
what is kept is gathered once in a pass, units that communicate as one share a latency, fewer bits
take less time. How much of what is saved shows in the step is a slope, which is known roughly from
how busy the network was and better once several configurations are profiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from bagua_autotune.costs.layouts import Floats, Layouts
from bagua_autotune.model.algorithms import algorithm_of
from bagua_autotune.model.knobs import (
    ALGORITHM_KNOB,
    CHANNELS_KNOB,
    NODE_COPY_KNOB,
    PRECISION_KNOB,
    WAYS_KNOB,
    Configuration,
)
from bagua_autotune.model.profile import BucketTiming, GatherTiming, Profile

BYTES_OF_16_BITS, BYTES_OF_8_BITS = 2.0, 1 + 8 / 1024
"""Of an element; 1,024 numbers in 8 bits share two bounds of 4 bytes."""
SHORTEST_SECONDS = 1e-9
LATENCY_SECONDS = 50e-6
"""Of a collective, where the profiled ones do not tell: those of some GPUs and processors."""
SHOWN_ERROR = 0.3
"""Of the slope, before several configurations are profiled."""
GAIN_PER_DOUBLING = 0.7
"""Part of the time that is left with twice as many channels, where these were not profiled, up to
``USEFUL_CHANNELS``; with an error of ``DOUBLING_ERROR`` for each doubling, as a logarithm."""
USEFUL_CHANNELS = 4
DOUBLING_ERROR = 0.3
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

    def seconds(self, traffic: Traffic) -> float:
        """How long it travels, one collective after the other."""
        latency = LATENCY_SECONDS * traffic.collectives
        return (
            latency + self.gather * traffic.gathered_bytes + self.reduction * traffic.reduced_bytes
        )


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
        by_configuration: dict[Configuration, list[Profile]] = {}
        for configuration, profile in profiled:
            by_configuration.setdefault(configuration, []).append(profile)
        first = next(iter(by_configuration.items()))
        self._profiled = {_way(configuration) for configuration in by_configuration}
        self._gathers = _gathers_by_unit(layouts, *first)
        alike = {c: p for c, p in by_configuration.items() if _way(c) == _way(first[0])}
        self._rates = self._rates_of(alike)
        measured = [
            (self._communication(c), median(p.step_seconds for p in profiles), profiles)
            for c, profiles in by_configuration.items()
        ]
        busy = median(min(_busy_seconds(p) / p.step_seconds, 1.0) for p in first[1])
        self.slope, self._slope_error, self._rest = _line([(x, y) for x, y, _ in measured], busy)
        errors = [np.log(y / self._step(x)) for x, y, _ in measured]
        self.misfit = float(np.sqrt(np.mean(np.square(errors))))

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor."""
        return np.log([self._step(self._communication(c)) for c in configurations])

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor: that of the slope, and those of numbers of channels and of ways that were
        not profiled."""
        own = self.predict(configurations)
        least, most = self.slope - self._slope_error, self.slope + self._slope_error
        steeper = most if most <= 1 else least
        first = self._rest + self.slope * self._communication(configurations[0])
        rows = []
        communication = np.array([self._communication(c) for c in configurations])
        other = np.maximum(first + steeper * (communication - communication[0]), SHORTEST_SECONDS)
        rows.append(np.log(other) - own)
        errors = [self._errors(each) for each in configurations]
        for doubt in sorted({doubt for each in errors for doubt in each}):
            longer = np.exp([each.get(doubt, 0.0) for each in errors])
            rows.append(np.log([self._step(each) for each in communication * longer]) - own)
        return np.array(rows)

    def _errors(self, configuration: Configuration) -> dict[tuple[str, str], float]:
        """By what is not known: how far off, as a logarithm, its communication may be."""
        count, way = _channels(configuration), _way(configuration)
        found = {}
        if count not in self._rates:
            doublings = abs(float(np.log2(count / self._nearest(count))))
            found["channels", str(count)] = DOUBLING_ERROR * doublings
        if way not in self._profiled:
            found["way", way] = OTHER_WAY_ERROR
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
            collectives += count + 1
            for unit, size_bytes in zip(part, sizes_bytes, strict=True):
                elements = tensors[unit].elements
                gathered += count * min(gathered_in * elements, size_bytes)
                reduced += min(reduced_in * elements, tensors[unit].bytes)
        return Traffic(collectives, gathered, reduced)

    def _kept(self, configuration: Configuration) -> set[int]:
        """Units that are gathered over the network in the forward pass only. The first to become
        ready are the last of the model."""
        eligible = [unit for unit, (times, _) in enumerate(self._gathers) if times > 1]
        if configuration.get(NODE_COPY_KNOB, "off") == "on":
            return set(eligible)
        count = configuration.get("kept_units", 0)
        return set(eligible[: count if isinstance(count, int) else 0])

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

    def _communication(self, configuration: Configuration) -> float:
        count = _channels(configuration)
        nearest = self._nearest(count)
        doublings = np.log2(min(count, USEFUL_CHANNELS) / min(nearest, USEFUL_CHANNELS))
        seconds = self._rates[nearest].seconds(self.traffic(configuration))
        return float(seconds * GAIN_PER_DOUBLING**doublings)

    def _nearest(self, count: int) -> int:
        return min(self._rates, key=lambda known: (abs(np.log2(known / count)), known))

    def _step(self, communication_seconds: float) -> float:
        return max(self._rest + self.slope * communication_seconds, SHORTEST_SECONDS)


def is_sharded(profiled: Sequence[tuple[Configuration, Profile]]) -> bool:
    """Whether steps are those of a model whose parameters are gathered."""
    return any(profile.gathers for _, profile in profiled)


def _channels(configuration: Configuration) -> int:
    count = configuration.get(CHANNELS_KNOB, 1)
    return count if isinstance(count, int) else 1


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
    kept = configuration.get("kept_units", 0)
    count = kept if isinstance(kept, int) else 0
    return [(2 * times if at < count else times, size) for at, (times, size) in enumerate(found)]


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
