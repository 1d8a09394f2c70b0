"""The fitted model of one job: predicts the logarithm of a step's seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.fitting import fit_costs, points_of
from bagua_autotune.costs.layouts import (
    Floats,
    Integers,
    Layouts,
    LayoutTable,
    Paths,
    Queues,
    find_paths,
    parts,
)
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from bagua_wire.profile import Profile

# The best explicit list of buckets under a cost model, by dynamic programming.
#
# With one channel, and if launching takes no time, a list is best if each of its beginnings is: the
# time at which tensors 0..j have arrived depends on earlier buckets only through the time at which
# those have arrived.  So
# end(j) = min over i < j of max(ready(j), end(i)) + latency + bytes(i..j) x seconds per byte,
# the optimal merging that MG-WFBP (Shi, Chu and Li, INFOCOM 2019) finds greedily.  Launches delay
# what follows; they are added along the best beginnings, which is nearly optimal.

# Longer lists are cut only at every few tensors, which loses almost nothing.
MOST_PLACES = 600
# Times that differ by a smaller part are equal but for the rounding, which differs from one
# processor to another.
ROUNDING = 1e-9


def best_partition(
    tensors: Sequence[Tensor], ready_seconds: Floats, cost: Cost, launch_seconds: float = 0.0
) -> tuple[int, ...] | None:
    """Tensor counts of the buckets; None where one contiguous list cannot hold all tensors.

    Args:
        tensors: in gradient-ready order.
        ready_seconds: per tensor, not decreasing.
        cost: of the collectives, one after the other.
        launch_seconds: the delay of all tensors behind a bucket.
    """
    if len({tensor.group for tensor in tensors}) > 1:
        return None
    count = len(tensors)
    stride = -(-count // MOST_PLACES)
    places = np.unique(np.append(np.arange(0, count, stride), count))
    held = np.concatenate([[0], np.cumsum([tensor.bytes for tensor in tensors])])[places]
    sent = held * cost.seconds_per_byte
    arrived = np.zeros(len(places))
    launched = np.full(len(places), launch_seconds)
    best_start = np.zeros(len(places), np.int64)
    for place, ready in enumerate(ready_seconds[places[1:] - 1].tolist(), 1):
        if place == len(places) - 1:
            sent += held * cost.chain_seconds_per_byte
        left = np.maximum(launched[:place] + ready, arrived[:place]) - sent[:place]
        more = cost.latency_seconds + sent[place]
        least = left[left.argmin()]
        # Of equally good starts the latest: fewer bytes wait for the last tensor.
        most = least + (least + more) * ROUNDING
        start = place - 1 - (left[::-1] <= most).argmax()
        best_start[place] = start
        arrived[place] = left[start] + more
        launched[place] = launched[start] + launch_seconds
    counts = []
    place = len(places) - 1
    while place > 0:
        counts.append(int(places[place] - places[best_start[place]]))
        place = int(best_start[place])
    return tuple(reversed(counts))


# When gradients are ready, without the time for launching buckets.
#
# The computing thread launches the buckets, which delays everything behind: with many small buckets
# this is most of their cost.

# Prior of the time to launch one operation, and about its uncertainty.
USUAL_LAUNCH_SECONDS = 20e-6
# How much the computing time differs from step to step.
COMPUTING_SPREAD = 0.03


class Computing(NamedTuple):
    """``ready_seconds`` per tensor in gradient-ready order, not decreasing, without launches."""

    ready_seconds: Floats
    launch_seconds: float


def fit_computing(profiled: Sequence[tuple[Kind, Profile]]) -> Computing | None:
    """Estimate it from some steps; None if there are none.

    The launch cost is the slope of the last ready time over the number of operations, by least
    squares with a normal prior.
    """
    if not profiled:
        return None
    last = np.array([max(profile.ready_seconds) for _, profile in profiled])
    operations = np.array([sum(_launches(kind, profile)) for kind, profile in profiled])
    spread = COMPUTING_SPREAD * max(float(np.median(last)), 1e-9)
    centred = operations - operations.mean()
    precision = float(centred @ centred) / spread**2 + 1 / USUAL_LAUNCH_SECONDS**2
    slope = (centred @ last / spread**2 + 1 / USUAL_LAUNCH_SECONDS) / precision
    launch_seconds = max(float(slope), 0.0)
    alone = [_without_launches(kind, profile, launch_seconds) for kind, profile in profiled]
    ready = np.maximum.accumulate(np.maximum(np.median(alone, axis=0), 0.0))
    return Computing(ready, launch_seconds)


def _without_launches(kind: Kind, profile: Profile, launch_seconds: float) -> Floats:
    ready = np.asarray(profile.ready_seconds, float)
    started = np.array([bucket.started_seconds for bucket in profile.buckets])
    order = np.argsort(started)
    launches = np.concatenate([[0.0], np.cumsum(_launches(kind, profile)[order])])
    before = np.searchsorted(started[order], ready, side="left")
    found: Floats = ready - launch_seconds * launches[before]
    return found


def _launches(kind: Kind, profile: Profile) -> Floats:
    """Count the operations of each bucket; 0 if weights travel instead."""
    if kind.sends.when != "ready":
        return np.zeros(len(profile.buckets))
    sizes_bytes = np.array([bucket.bytes for bucket in profile.buckets], float)
    return kind.operations * parts(sizes_bytes, kind.channel_count)


SHORTEST_STEP_SECONDS = 1e-9


class Predictor(Protocol):
    """Predicts the cost of untried configurations; only differences count.

    Attributes:
        misfit: its error for the profiled steps, as a logarithm; other errors are expected to be
            like it, unless measured costs say otherwise.
    """

    misfit: float

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """Log seconds of a step, one per configuration."""

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        """The errors of these: differences of one standard deviation, each row of another cause;
        shape (any number, configurations)."""


class CostModel:
    """When a model's gradients are ready, and what a network's collectives cost.

    Attributes:
        ready_seconds: per tensor in gradient-ready order, since the beginning of the step, if no
            bucket were launched.
        costs: by kind.
        launch_seconds: of one operation; it delays all that follows.
        alternatives: other likely costs; see Fit.
        misfit: see Predictor.
    """

    def __init__(
        self,
        layouts: Layouts,
        ready_seconds: Sequence[float],
        costs: Costs,
        launch_seconds: float = USUAL_LAUNCH_SECONDS,
        alternatives: Floats | None = None,
        misfit: float = 0.0,
    ) -> None:
        self._layouts = layouts
        self.ready_seconds = np.maximum.accumulate(np.asarray(ready_seconds, float))
        self.costs = costs
        self.launch_seconds = launch_seconds
        self.alternatives = np.zeros((0, len(costs), 3)) if alternatives is None else alternatives
        self.misfit = misfit
        self._latest: tuple[Sequence[Configuration], Floats] | None = None

    def computing(self, share: float) -> CostModel:
        """This model where computing takes so much of its time."""
        other = copy(self)
        other.ready_seconds, other._latest = self.ready_seconds * share, None
        return other

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor. Raises KeyError for a kind that has no costs."""
        found: Floats = self._log_seconds(configurations)[0]
        return found

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor."""
        every = self._log_seconds(configurations)
        found: Floats = every[1:] - every[0]
        return found

    def _log_seconds(self, configurations: Sequence[Configuration]) -> Floats:
        """Of a step, with the costs and with each alternative to them: shape (1 + alternatives,
        configurations)."""
        if self._latest is not None and self._latest[0] is configurations:
            return self._latest[1]
        table = self._layouts.table(configurations)
        places = {kind: place for place, kind in enumerate(self.costs)}
        kind_of_each = np.array([places[kind] for kind in table.kinds])[table.kind_of]
        # Many configurations may be of one kind and one layout.
        count = len(table.last)
        pairs, pair_of = np.unique(kind_of_each * count + table.row_of, return_inverse=True)
        kinds, rows = np.divmod(pairs, count)
        usual = [cost.parts for cost in self.costs.values()]
        costs = np.concatenate([[usual], self.alternatives])
        travels = np.array([kind.sends.when != "apart" for kind in self.costs])[kinds]
        ends = np.zeros((len(costs), len(pairs)))
        if travels.any():
            paths = self._paths(table, kinds, rows, np.flatnonzero(travels), costs.T)
            begins = np.searchsorted(kinds[paths.layout], np.arange(len(self.costs) + 1))
            for kind, (begin, end) in enumerate(pairwise(begins.tolist())):
                if begin < end:
                    own = paths.take(slice(begin, end))
                    seconds = costs[:, kind] @ own.terms + own.start_seconds
                    ends[:, kinds == kind] = own.longest(seconds)
        ends = np.maximum(ends, max(self.ready_seconds[-1], SHORTEST_STEP_SECONDS))
        found: Floats = np.log(ends)[:, pair_of]
        self._latest = configurations, found
        return found

    def _paths(
        self, table: LayoutTable, kinds: Integers, rows: Integers, pairs: Integers, costs: Floats
    ) -> Paths:
        """The paths of some pairs of a kind and a layout, in their order."""
        fastest, slowest = costs.min(axis=2), costs.max(axis=2)
        widths = np.frexp(table.is_bucket.sum(axis=1))[1][rows[pairs]]
        found = []
        for width in np.unique(widths):
            # Layouts of about as many buckets: some have one, others hundreds.
            own = pairs[widths == width]
            queues = self._queues(table, kinds[own], rows[own])
            paths = find_paths(queues, fastest[:, kinds[own]], slowest[:, kinds[own]])
            found.append(paths._replace(layout=own[paths.layout]))
        layout, start_seconds, terms = zip(*found, strict=True)
        every = Paths(
            np.concatenate(layout), np.concatenate(start_seconds), np.concatenate(terms, axis=1)
        )
        return every.take(np.argsort(every.layout, kind="stable"))

    def _queues(self, table: LayoutTable, places: Integers, rows: Integers) -> Queues:
        """The queues of some layouts, each under the kind at its place."""
        width = int(table.is_bucket[rows].sum(axis=1).max())
        bytes_, is_bucket = table.sizes_bytes[:, :width][rows], table.is_bucket[:, :width][rows]
        last = table.last[:, :width][rows]
        channels = np.array([kind.channel_count for kind in self.costs], float)[places]
        operations = np.array([kind.operations for kind in self.costs], float)[places, None]
        launches = np.cumsum(parts(bytes_, channels[:, None]), axis=1) * operations
        # Weights travel when the step begins, or when all gradients are there.
        moments = {"ready": np.nan, "begin": 0.0, "end": self.ready_seconds[-1]}
        fixed = np.array([moments.get(kind.sends.when, 0.0) for kind in self.costs])[places, None]
        full = np.where(np.isnan(fixed), self.ready_seconds[last], fixed)
        return Queues(full + self.launch_seconds * launches, bytes_, is_bucket, channels)

    def best_partition(self, kind: Kind) -> tuple[int, ...] | None:
        """Tensor counts of the buckets that would be best under a kind; see best_partition."""
        launch_seconds = self.launch_seconds * kind.operations
        return best_partition(
            self._layouts.tensors, self.ready_seconds, self.costs[kind], launch_seconds
        )


def fit_model(
    layouts: Layouts,
    kinds: Sequence[Kind],
    profiled: Sequence[tuple[Configuration, Profile]],
    known_ready_seconds: Sequence[float] | None = None,
    known_costs: Mapping[Kind, Cost] | None = None,
) -> CostModel | None:
    """Fit a job's profiles.

    Args:
        layouts: of the job's tensors.
        kinds: to be predicted.
        profiled: steps of this round, each with its configuration.
        known_ready_seconds: of the same model, from an earlier job or round.
        known_costs: of the same network, from an earlier job or round.

    Returns:
        None if too little is known.
    """
    by_configuration: dict[Configuration, list[Profile]] = {}
    for configuration, profile in profiled:
        by_configuration.setdefault(configuration, []).append(profile)
    points = [
        point
        for configuration, profiles in by_configuration.items()
        # Buckets show nothing of weights that travel.
        if Kind.of(configuration).sends.when == "ready"
        for point in points_of(Kind.of(configuration), profiles)
    ]
    fitted = fit_costs(kinds, points, known_costs)
    computing = fit_computing([(Kind.of(c), profile) for c, profile in profiled])
    if computing is None and known_ready_seconds is not None:
        computing = Computing(np.asarray(known_ready_seconds, float), USUAL_LAUNCH_SECONDS)
    if fitted is None or computing is None:
        return None
    if len(computing.ready_seconds) != len(layouts.tensors):
        return None
    return CostModel(
        layouts,
        computing.ready_seconds.tolist(),
        fitted.costs,
        computing.launch_seconds,
        fitted.alternatives,
        fitted.misfit,
    )
