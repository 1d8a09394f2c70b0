"""Fits the simulator's network to a measured job.

Every way of reducing is simulated on the same links, so measurements of one way predict the others,
too. Recorded steps are simulated from the moments at which their buckets were handed over; the
durations of the buckets from then on are compared. Few steps are recorded, one of each
configuration on a GPU, and each may have been disturbed. So the fit then goes on with the lengths
of all measured steps, which are simulated whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_simulator.cluster import SPLIT, Cluster, Phase, Way, parts, reduction
from bagua_simulator.measured.computing import bounded, softened
from bagua_simulator.measured.recorded import Record, StepTimes, Traffic, way_and_channels
from bagua_simulator.simulator import Simulator
from bagua_simulator.step import Message, Step

Floats = NDArray[np.float64]


class Usual(NamedTuple):
    """A usual value, and the factor by which a value may differ from it, in logarithms."""

    value: float
    spread: float


# These priors decide what the traffic does not show: latency if all sizes are alike, and the links
# inside a node (as a multiple of its outside link) if nothing was reduced there.
USUAL_LINK = {
    "bandwidth_bytes_per_second": Usual(1.25e9, 3.0),
    "latency_seconds": Usual(50e-6, 5.0),
}
USUAL_LATE = {"late_seconds": Usual(0.5e-3, 2.0)}
# How many connections fill a link; up to 1: one does.
USUAL_FLOWS = {"flows": Usual(0.9, 1.5)}
USUAL_NODE = {
    "start_seconds": Usual(15e-6, 5.0),
    "inside_ratio": Usual(10.0, 2.0),
    "shards_share": Usual(0.9, 0.7),
}
# The search begins from the best few of all combinations of these: far from the truth it finds
# nothing. Long times may come from latency, from a late rank, or from starting an operation.
BEGINNINGS: dict[str, Sequence[float]] = {
    "bandwidth_bytes_per_second": (10.0 ** np.arange(6, 12, 0.5)).tolist(),
    "latency_seconds": (1e-5, 1e-3),
    "late_seconds": (5e-4, 5e-2),
    "start_seconds": (1e-5, 1e-3),
    "flows": (0.5, 4.0),
}
MOST_BEGINNINGS = 3
NEAR = (0.5, 0.7, 1.0, 1.4, 2.0)
# The spread of the model's errors for a bucket's duration and for a whole step's communication.
DURATION_SPREAD, WHOLE_SPREAD = 0.1, 0.03
# Shorter durations count as this long: clocks resolve no less.
SHORTEST_SECONDS = 1e-7
# Least squares stops if a step improves the fit, or changes the parameters, by no more than this
# share, or after so many evaluations of the parameters and their derivatives.
TOLERANCE, MOST_EVALUATIONS = 1e-4, 40
# The logarithms of parameters stay within these bounds, so that everything is finite.
FARTHEST = 50.0


def fit_cluster(
    nodes: int,
    ranks_per_node: int,
    traffic: Sequence[Traffic],
    is_nccl: bool = False,
    times: Sequence[StepTimes] = (),
    simulator: Simulator | None = None,
) -> Cluster:
    """The cluster on which the buckets take as long as in these steps.

    Fitted are the bandwidth and latency of the links between the nodes, the start of an operation,
    the bandwidth inside the nodes and the share of it that sharded reductions reach; for a single
    node its own links. If one way to reduce was measured with several numbers of channels, the rate
    of one connection is fitted as well; else one connection is taken to fill the link. The delay of
    the slowest rank behind the profiled one is fitted, too, and left out of the cluster; if every
    step has only one bucket, it cannot be told from latency and counts as latency. Everything else
    has its usual value. The fit is least squares of the logarithms, in which outlying trials count
    little.

    Args:
        times: of whole steps, which ``simulator`` simulates; its cluster does not matter.

    Raises:
        ValueError: there is no traffic, or only one rank.
    """
    measured = [each for each in traffic if each.is_measured]
    if not measured or nodes * ranks_per_node < 2:
        raise ValueError("no reduction was measured that shows the network")
    kinds = {(each.hierarchical, each.channels) for each in measured}
    usual = _usual(nodes, ranks_per_node, measured, kinds | _kinds(times))
    fit = _Fit(usual, partial(_cluster, nodes, ranks_per_node, is_nccl), measured, simulator)
    beginnings = sorted(fit.beginnings(), key=fit.squares)[:MOST_BEGINNINGS]
    best = min(map(fit.search, beginnings), key=fit.squares)
    if times:
        # Disturbed steps among the few may have led far from what all steps know.
        nearest = min(fit.near(best), key=lambda each: fit.squares(each, times))
        best = fit.search(nearest, times)
    return fit.cluster(best)


class _Fit:
    """A search for the parameters of a cluster, which are tried as logarithms in this order.

    Args:
        usual: the parameters by name.
        cluster_of: makes a cluster of their values.
        traffic: recorded steps.
        simulator: of whole steps.
    """

    def __init__(
        self,
        usual: Mapping[str, Usual],
        cluster_of: Callable[[Mapping[str, float]], Cluster],
        traffic: Sequence[Traffic],
        simulator: Simulator | None,
    ) -> None:
        self._usual, self._cluster_of = usual, cluster_of
        self._traffic, self._simulator = traffic, simulator
        self._logarithms = np.log([figure.value for figure in usual.values()])
        self._spreads = np.array([figure.spread for figure in usual.values()])
        self._is_late = self._places(*USUAL_LATE)

    def _places(self, *names: str) -> NDArray[np.bool_]:
        return np.array([each in names for each in self._usual])

    def _figures(self, tried: Floats) -> dict[str, float]:
        values = np.exp(np.clip(tried, -FARTHEST, FARTHEST)).tolist()
        return dict(zip(self._usual, values, strict=True))

    def cluster(self, tried: Floats) -> Cluster:
        return self._cluster_of(self._figures(tried))

    def beginnings(self) -> list[Floats]:
        """Far from each other."""
        values = [BEGINNINGS.get(name, (usual.value,)) for name, usual in self._usual.items()]
        return [np.log(each) for each in product(*values)]

    def near(self, found: Floats) -> list[Floats]:
        """Around what was found: other links, and other rates of one connection."""
        is_link = self._places("bandwidth_bytes_per_second")
        is_flow = self._places(*USUAL_FLOWS)
        return [
            found + np.log(link) * is_link + np.log(flow) * is_flow
            for link, flow in product(NEAR, NEAR if is_flow.any() else (1.0,))
        ]

    def differences(self, tried: Floats, times: Sequence[StepTimes] = ()) -> Floats:
        """Of all that is compared, and of the parameters from what is usual."""
        cluster = self.cluster(tried)
        late_seconds = self._figures(tried).get("late_seconds", 0.0)
        apart = [_differences(cluster, each, late_seconds) for each in self._traffic]
        if self._simulator:
            there = self._simulator.on(cluster)
            apart += [_step_difference(there, each) for each in times]
        unusual = (tried - self._logarithms) / self._spreads
        # Ranks that are not late at all are as usual as late ones.
        unusual[self._is_late] = np.maximum(unusual[self._is_late], 0.0)
        return np.concatenate([*apart, unusual])

    def squares(self, tried: Floats, times: Sequence[StepTimes] = ()) -> float:
        return float((self.differences(tried, times) ** 2).sum())

    def search(self, beginning: Floats, times: Sequence[StepTimes] = ()) -> Floats:
        """From there downhill."""
        from scipy.optimize import least_squares  # here: takes long to import

        most = np.where(self._places("shards_share"), 0.0, np.inf)
        found: Floats = least_squares(
            self.differences, beginning, bounds=(-np.inf, most), ftol=TOLERANCE, xtol=TOLERANCE,
            max_nfev=MOST_EVALUATIONS, args=(times,),
        ).x  # fmt: skip
        return found


def fit_record(record: Record) -> Simulator:
    """The recorded job, on the cluster that it ran on.

    Raises:
        ValueError: no measured reduction shows the network.
    """
    # Whatever the link: it is what is looked for.
    simulator = record.simulator(Cluster(*record.shape, 1e9, 1e-5, is_nccl=record.is_nccl))
    times = [each for each in record.step_times if _is_simulated(simulator, each)]
    cluster = fit_cluster(*record.shape, record.traffic, record.is_nccl, times, simulator)
    return simulator.on(cluster)


def _is_simulated(simulator: Simulator, times: StepTimes) -> bool:
    """False if its buckets are not of the job's tensors, as they are by now."""
    try:
        simulator.step_seconds(times.configuration)
    except ValueError:
        return False
    return True


def _kinds(times: Sequence[StepTimes]) -> set[tuple[Way, int]]:
    found = (way_and_channels(each.configuration) for each in times)
    return {kind for kind in found if kind}


def _usual(
    nodes: int, ranks_per_node: int, measured: Sequence[Traffic], kinds: set[tuple[Way, int]]
) -> dict[str, Usual]:
    """The fitted parameters, the link's first.

    Args:
        kinds: ways of reducing and numbers of channels that were measured.
    """
    found = dict(USUAL_LINK)
    if any(len(each.buckets) > 1 for each in measured):
        found |= USUAL_LATE
    if nodes > 1 and len(kinds) > len({hierarchical for hierarchical, _ in kinds}):
        found |= USUAL_FLOWS
    return found | (USUAL_NODE if nodes > 1 and ranks_per_node > 1 else {})


def _cluster(
    nodes: int, ranks_per_node: int, is_nccl: bool, figures: Mapping[str, float]
) -> Cluster:
    bandwidth, latency = figures["bandwidth_bytes_per_second"], figures["latency_seconds"]
    cluster = Cluster(nodes, ranks_per_node, bandwidth, latency, is_nccl=is_nccl)
    if "flows" in figures:
        flow = bandwidth / figures["flows"]
        cluster = replace(cluster, flow_bytes_per_second=flow, together=math.sqrt(SPLIT))
    if nodes == 1:
        return replace(
            cluster, inside_bandwidth_bytes_per_second=bandwidth, inside_latency_seconds=latency
        )
    if ranks_per_node == 1:
        return cluster
    return replace(
        cluster,
        start_seconds=figures["start_seconds"],
        inside_bandwidth_bytes_per_second=bandwidth * figures["inside_ratio"],
        shards_share=figures["shards_share"],
    )


def _differences(cluster: Cluster, traffic: Traffic, late_seconds: float) -> Floats:
    """The errors of each bucket's duration and of the whole step's, which weighs more than all
    buckets.

    No bucket begins before the slowest rank has its first one. Buckets without a known end are
    simulated but not compared.
    """
    buckets = traffic.buckets
    starts = np.array([bucket.started_seconds for bucket in buckets])
    measured = np.array([bucket.ended_seconds for bucket in buckets])
    begun = np.maximum(starts, starts[0] + late_seconds).tolist()
    messages = [
        Message(start, 0.0, _parts(cluster, traffic, bucket.bytes))
        for start, bucket in zip(begun, buckets, strict=True)
    ]
    step = Step(messages, begun[-1], traffic.channels, cluster, contention=0.0)
    ended = np.array(step.run().ended_seconds)
    known = measured > starts
    each = _logarithms((ended - starts)[known], (measured - starts)[known])
    whole = _logarithms(ended[known].max() - starts[0], measured[known].max() - starts[0])
    # Steps that differ among themselves count for less.
    certainty = 1 / max(1.0, traffic.spread / WHOLE_SPREAD)
    durations = softened(each / DURATION_SPREAD) / math.sqrt(len(each))
    whole /= WHOLE_SPREAD
    return np.append(bounded(certainty * durations), bounded(certainty * np.array([whole])))


def _step_difference(simulator: Simulator, times: StepTimes) -> Floats:
    """The error of a whole step; one that is not known well counts for less."""
    apart = math.log(simulator.step_seconds(times.configuration) / times.seconds)
    return bounded(np.array([apart / max(WHOLE_SPREAD, times.uncertainty)]))


def _parts(cluster: Cluster, traffic: Traffic, size_bytes: int) -> tuple[tuple[Phase, ...], ...]:
    count = parts(size_bytes, traffic.channels)
    return (reduction(cluster, traffic.hierarchical, size_bytes / count),) * count


def _logarithms(predicted: Floats, measured: Floats) -> Floats:
    shortest = SHORTEST_SECONDS
    found: Floats = np.log(np.maximum(predicted, shortest) / np.maximum(measured, shortest))
    return found
