"""The network of a measured job, as figures of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.simulation.cluster import Cluster
from bagua_autotune.simulation.collectives import reduction
from bagua_autotune.simulation.recorded import Collective

# Where the search for the figures begins: a fast and a slow network.
BEGINNINGS = ((1e10, 1e-5), (1e8, 1e-3))
# What sizes that are all alike leave open is taken from here, with so little weight.
TYPICAL_LATENCY_SECONDS, WEIGHT = 50e-6, 0.02


def fit_cluster(nodes: int, ranks_per_node: int, collectives: Sequence[Collective]) -> Cluster:
    """The cluster on which flat reductions of these sizes take these times.

    Bandwidth and latency are fitted, of the links between the nodes or, in a single node, of those
    inside it; the rest is as usual. Least squares of the logarithms, in which what is far off
    counts linearly only: a step in which a rank came late does not decide.

    Raises:
        ValueError: there are no collectives, or only one rank.
    """
    from scipy.optimize import least_squares  # here: takes long to import

    if not collectives or nodes * ranks_per_node < 2:
        raise ValueError("no flat reduction was measured from which the network could be told")
    measured = np.log([collective.seconds for collective in collectives])

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        cluster = _cluster(nodes, ranks_per_node, *np.exp(logarithms).tolist())
        predicted = np.log([_flat_seconds(cluster, each.bytes) for each in collectives])
        prior = WEIGHT * (logarithms[1] - np.log(TYPICAL_LATENCY_SECONDS))
        return np.append(predicted - measured, prior)

    fits = [
        least_squares(residuals, np.log(beginning), loss="soft_l1", f_scale=0.1)
        for beginning in BEGINNINGS
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    return _cluster(nodes, ranks_per_node, *np.exp(best.x).tolist())


def _cluster(nodes: int, ranks_per_node: int, bandwidth: float, latency: float) -> Cluster:
    cluster = Cluster(nodes, ranks_per_node, bandwidth, latency)
    if nodes > 1:
        return cluster
    return replace(
        cluster,
        inside_bandwidth_bytes_per_second=bandwidth,
        inside_latency_seconds=latency,
    )


def _flat_seconds(cluster: Cluster, size_bytes: int) -> float:
    return sum(phase.alone_seconds for phase in reduction(cluster, "off", size_bytes))
