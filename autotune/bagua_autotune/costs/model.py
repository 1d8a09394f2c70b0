"""The fitted model of one job: predicts the logarithm of a step's seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.computing import USUAL_LAUNCH_SECONDS, Computing, fit_computing
from bagua_autotune.costs.fitting import fit_costs
from bagua_autotune.costs.layouts import Floats, Layouts
from bagua_autotune.costs.partition import best_partition
from bagua_autotune.costs.queues import points_of
from bagua_autotune.costs.timeline import ends, parts
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


class _Queues(NamedTuple):
    """The layouts of the configurations of one kind: arrays of shape (layouts, buckets)."""

    kind: Kind
    members: list[int]
    row_of: NDArray[np.int64]
    departure_seconds: Floats
    sizes_bytes: Floats
    is_bucket: Floats


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
        alternatives: Sequence[Costs] = (),
        misfit: float = 0.0,
    ) -> None:
        self._layouts = layouts
        self.ready_seconds = np.maximum.accumulate(np.asarray(ready_seconds, float))
        self.costs = costs
        self.launch_seconds = launch_seconds
        self.alternatives = alternatives
        self.misfit = misfit

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor. Raises KeyError for a kind that has no costs."""
        return self._predict(self._queues(configurations), self.costs)

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor."""
        queues = self._queues(configurations)
        own = self._predict(queues, self.costs)
        found = [self._predict(queues, costs) - own for costs in self.alternatives]
        return np.array(found).reshape(-1, len(configurations))

    def _queues(self, configurations: Sequence[Configuration]) -> list[_Queues]:
        """The buckets of each kind, which do not depend on the costs."""
        table = self._layouts.table(configurations)
        ready = np.where(table.is_bucket, self.ready_seconds[table.last], 0.0)
        places: dict[Kind, list[int]] = {}
        for place, configuration in enumerate(configurations):
            places.setdefault(Kind.of(configuration), []).append(place)
        found = []
        for kind, members in places.items():
            rows, row_of = np.unique(table.row_of[members], return_inverse=True)
            sizes_bytes = table.sizes_bytes[rows]
            is_bucket = table.is_bucket[rows]
            launches = np.cumsum(parts(sizes_bytes, kind.channel_count), axis=1)
            launched = self.launch_seconds * kind.operations * launches
            departures = self._departures(kind, ready[rows]) + np.where(is_bucket, launched, 0.0)
            queues = _Queues(
                kind, members, row_of, departures, sizes_bytes, is_bucket.astype(float)
            )
            found.append(queues)
        return found

    def _predict(self, queues: Sequence[_Queues], costs: Costs) -> Floats:
        seconds = np.empty(sum(len(each.members) for each in queues))
        for kind, members, row_of, departures, sizes_bytes, is_bucket in queues:
            found = np.zeros(len(sizes_bytes))
            if kind.sends.when != "apart":
                found = ends(departures, sizes_bytes, is_bucket, costs[kind], kind.channel_count)
            seconds[members] = np.maximum(found, self.ready_seconds[-1])[row_of]
        return np.log(np.maximum(seconds, SHORTEST_STEP_SECONDS))

    def _departures(self, kind: Kind, ready_seconds: Floats) -> Floats:
        """When each bucket can start, given when its gradients are ready."""
        if kind.sends.when == "ready":
            return ready_seconds
        is_begin = kind.sends.when == "begin"
        return np.full_like(ready_seconds, 0.0 if is_begin else self.ready_seconds[-1])

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
