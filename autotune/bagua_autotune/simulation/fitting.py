"""The network of a measured job, as figures of the simulator.

Every way of reducing is simulated on the same links, so what one way shows tells of the others
too. Steps are simulated from the moments at which their buckets were handed over; what is compared
is how long each bucket took from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.profile import BucketTiming
from bagua_autotune.simulation.cluster import Cluster
from bagua_autotune.simulation.collectives import reduction
from bagua_autotune.simulation.recorded import Record, Traffic
from bagua_autotune.simulation.simulator import Simulator
from bagua_autotune.simulation.step import Message, Step

Floats = NDArray[np.float64]
# The search begins at the best of these bandwidths with each of these latencies.
BANDWIDTHS, LATENCIES = 10.0 ** np.arange(6, 12), (1e-5, 1e-3)
# Usual figures, and how many times more or less is unusual, in logarithms. They decide what the
# traffic leaves open: latency where all sizes are alike, the links inside a node where nothing was
# reduced there.
USUAL_LATENCY = (50e-6, 5.0)
USUAL_LATE = (0.5e-3, 2.0)
USUAL_START = (15e-6, 3.0)
USUAL_INSIDE = (1e10, 3.0)
USUAL_SHARDS_SHARE = (1.0, 0.7)
# The model foretells a bucket's duration, and a whole step's communication, that well.
DURATION_SPREAD, WHOLE_SPREAD = 0.1, 0.03
SHORTEST = 1e-7
MOST_EVALUATIONS = 40
FARTHEST = 50.0


def fit_cluster(nodes: int, ranks_per_node: int, traffic: Sequence[Traffic]) -> Cluster:
    """The cluster on which buckets take the times of these steps.

    Fitted are bandwidth and latency of the links between the nodes, the start of an operation and
    the bandwidth inside the nodes; in a single node its own links. The rest is as usual. Least
    squares of the logarithms, in which what is far off counts linearly only: a step in which a rank
    came late does not decide.

    Raises:
        ValueError: there is no traffic, or only one rank.
    """
    from scipy.optimize import least_squares  # here: takes long to import

    typical = _typical(traffic)
    if not typical or nodes * ranks_per_node < 2:
        raise ValueError("no reduction was measured from which the network could be told")
    usual, spreads = np.array(_usual(nodes, ranks_per_node)).T
    logarithms = np.log(usual)

    def differences(tried: Floats) -> Floats:
        figures = _figures(tried)
        cluster = _cluster(nodes, ranks_per_node, figures)
        found = [_differences(cluster, each, count, figures[2]) for each, count in typical]
        return np.concatenate([*found, (tried - logarithms) / spreads])

    beginnings = [
        np.concatenate([np.log(pair), logarithms[2:]]) for pair in product(BANDWIDTHS, LATENCIES)
    ]
    beginning = min(beginnings, key=lambda each: float(np.log1p(differences(each) ** 2).sum()))
    found = least_squares(differences, beginning, loss="soft_l1", max_nfev=MOST_EVALUATIONS)
    return _cluster(nodes, ranks_per_node, _figures(found.x))


def fit_record(record: Record) -> Simulator:
    """The recorded job, on the cluster that it ran on.

    Raises:
        ValueError: nothing was measured from which the network could be told.
    """
    nodes, ranks_per_node = len(record.ranks_per_node), max(record.ranks_per_node)
    cluster = fit_cluster(nodes, ranks_per_node, record.traffic)
    return Simulator(record.workload, cluster, record.contention, record.launch_seconds)


def _figures(logarithms: Floats) -> list[float]:
    """Finite also where the traffic tells nothing of a figure, and the search runs away with it."""
    figures: list[float] = np.exp(np.clip(logarithms, -FARTHEST, FARTHEST)).tolist()
    return figures


def _usual(nodes: int, ranks_per_node: int) -> list[tuple[float, float]]:
    """Of the figures that are fitted: bandwidth and latency, by how much the slowest rank is later
    than the one that was profiled; start and bandwidth inside."""
    usual = [(1.0, np.inf), USUAL_LATENCY, USUAL_LATE]
    if nodes == 1 or ranks_per_node == 1:
        return usual
    return [*usual, USUAL_START, USUAL_INSIDE, USUAL_SHARDS_SHARE]


def _cluster(nodes: int, ranks_per_node: int, figures: Sequence[float]) -> Cluster:
    bandwidth, latency, _, *others = figures
    cluster = Cluster(nodes, ranks_per_node, bandwidth, latency)
    if nodes == 1:
        return replace(
            cluster,
            inside_bandwidth_bytes_per_second=bandwidth,
            inside_latency_seconds=latency,
        )
    if not others:
        return cluster
    start_seconds, inside, shards_share = others
    return replace(
        cluster,
        start_seconds=start_seconds,
        inside_bandwidth_bytes_per_second=inside,
        shards_share=shards_share,
    )


def _typical(traffic: Sequence[Traffic]) -> list[tuple[Traffic, int]]:
    """Medians of the steps that ran alike, and how many they were."""
    alike: dict[tuple[str, int, tuple[int, ...]], list[Traffic]] = {}
    for step in traffic:
        sizes = tuple(bucket.bytes for bucket in step.buckets)
        if any(sizes):
            alike.setdefault((step.hierarchical, step.channels, sizes), []).append(step)
    return [(_median(steps), len(steps)) for steps in alike.values()]


def _median(steps: Sequence[Traffic]) -> Traffic:
    starts = np.median([[b.started_seconds for b in step.buckets] for step in steps], axis=0)
    ends = np.median([[b.ended_seconds for b in step.buckets] for step in steps], axis=0)
    buckets = tuple(
        BucketTiming(bytes=bucket.bytes, started_seconds=start, ended_seconds=end)
        for bucket, start, end in zip(steps[0].buckets, starts.tolist(), ends.tolist(), strict=True)
    )
    return steps[0].model_copy(update={"buckets": buckets})


def _differences(cluster: Cluster, traffic: Traffic, count: int, late_seconds: float) -> Floats:
    """Of each bucket's duration and of the whole step's, which weighs more than all buckets.

    No bucket begins before the slowest rank has its first one.
    """
    buckets = traffic.buckets
    starts = np.array([bucket.started_seconds for bucket in buckets])
    measured = np.array([bucket.ended_seconds for bucket in buckets])
    begun = np.maximum(starts, starts[0] + late_seconds).tolist()
    messages = [
        Message(start, 0.0, reduction(cluster, traffic.hierarchical, bucket.bytes))
        for start, bucket in zip(begun, buckets, strict=True)
    ]
    step = Step(messages, begun[-1], traffic.channels, cluster, contention=0.0)
    ended = np.array(step.run().ended_seconds)
    each = _logarithms(ended - starts, measured - starts)
    whole = _logarithms(ended.max() - starts[0], measured.max() - starts[0])
    weighed = np.append(each / math.sqrt(len(each)) / DURATION_SPREAD, whole / WHOLE_SPREAD)
    return math.sqrt(count) * weighed


def _logarithms(predicted: Floats, measured: Floats) -> Floats:
    found: Floats = np.log(np.maximum(predicted, SHORTEST) / np.maximum(measured, SHORTEST))
    return found
