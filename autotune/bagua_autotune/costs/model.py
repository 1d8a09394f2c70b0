"""The fitted model of one job: predicts the logarithm of a step's seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.fitting import fit_costs, points_of
from bagua_autotune.costs.layouts import Floats, Layouts
from bagua_autotune.costs.partition import best_partition
from bagua_autotune.costs.timeline import ends
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.profile import Profile

SHORTEST_STEP_SECONDS = 1e-9


class Predictor(Protocol):
    """Says what configurations would cost before they are tried; only differences count."""

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """Log seconds of a step, one per configuration."""


class CostModel:
    """Ready times of a model's gradients and costs of a network's collectives.

    Attributes:
        ready_seconds: per tensor in gradient-ready order, since the step began.
        costs: by kind.
    """

    def __init__(self, layouts: Layouts, ready_seconds: Sequence[float], costs: Costs) -> None:
        self._layouts = layouts
        self.ready_seconds = np.maximum.accumulate(np.asarray(ready_seconds, float))
        self.costs = costs

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor. Raises KeyError for a kind that has no costs."""
        table = self._layouts.table(configurations)
        ready = np.where(table.is_bucket, self.ready_seconds[table.last], 0.0)
        places: dict[Kind, list[int]] = {}
        for place, configuration in enumerate(configurations):
            places.setdefault(Kind.of(configuration), []).append(place)
        seconds = np.empty(len(configurations))
        for kind, members in places.items():
            rows, row_of = np.unique(table.row_of[members], return_inverse=True)
            cost = self.costs[kind]
            carried = cost.seconds_per_byte * table.sizes_bytes[rows]
            durations: Floats = np.where(
                table.is_bucket[rows], cost.latency_seconds + carried, 0.0
            ).astype(np.float64)
            seconds[members] = ends(ready[rows], durations, kind.channel_count)[row_of]
        return np.log(np.maximum(seconds, SHORTEST_STEP_SECONDS))

    def best_partition(self, kind: Kind) -> tuple[int, ...] | None:
        """Tensor counts of the buckets that would be best under a kind; see best_partition."""
        return best_partition(self._layouts.tensors, self.ready_seconds, self.costs[kind])


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
        profiled: steps of this round, each with what was run in it.
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
        for point in points_of(Kind.of(configuration), profiles)
    ]
    costs = fit_costs(kinds, points, known_costs)
    ready = ready_seconds(profile for _, profile in profiled) or known_ready_seconds
    if costs is None or ready is None or len(ready) != len(layouts.tensors):
        return None
    return CostModel(layouts, ready, costs)


def ready_seconds(profiles: Iterable[Profile]) -> list[float] | None:
    """The median over some profiles, per tensor; None if there are none."""
    times = [profile.ready_seconds for profile in profiles]
    if not times:
        return None
    return [float(seconds) for seconds in np.median(np.array(times), axis=0)]
