"""The fitted model of one job: predicts the logarithm of a step's seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.computing import USUAL_LAUNCH_SECONDS, Computing, fit_computing
from bagua_autotune.costs.fitting import fit_costs
from bagua_autotune.costs.layouts import Floats, Integers, Layouts, LayoutTable
from bagua_autotune.costs.partition import best_partition
from bagua_autotune.costs.queues import points_of
from bagua_autotune.costs.timeline import Paths, Queues, find_paths, parts
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.profile import Profile

SHORTEST_STEP_SECONDS = 1e-9


class Predictor(Protocol):
    """Predicts the cost of untried configurations; only differences count.

    Attributes:
        misfit: its error for the profiled steps, as a logarithm; other errors are taken to be like.
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
