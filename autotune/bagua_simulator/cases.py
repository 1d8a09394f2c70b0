"""Named cases, for benchmarks: a model on a cluster each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bagua_simulator.cluster import Cluster, parse_bandwidth
from bagua_simulator.simulator import Simulator
from bagua_simulator.workloads import load

# A fixed set: what was measured on these cases stays comparable when the catalog grows.
MODELS = ("vgg16", "resnet50", "bert-large", "gpt2-medium")
RANKS_PER_NODE = 8
# Ethernet with TCP: latencies of its sockets, and the rate at which a few cores copy.
TCP_LATENCY_SECONDS, TCP_FLOW_BYTES_PER_SECOND = 100e-6, 8e9
# Latency of InfiniBand or RoCE between two nodes of one cluster.
RDMA_LATENCY_SECONDS = 5e-6
# GPUs behind a PCIe switch, without NVLink.
PCIE_BYTES_PER_SECOND, PCIE_LATENCY_SECONDS = 10e9, 8e-6


@dataclass(frozen=True)
class Case:
    """A simulated job to be tuned."""

    name: str
    simulator: Simulator


def cases() -> list[Case]:
    """Four models on 6 clusters of 8 GPUs a node.

    10 to 100 Gbit/s, 4 and 16 nodes, TCP and RDMA, with NVLink inside the nodes and without.
    """
    clusters = {
        "10Gbit-4": _cluster(4, "10Gbit"),
        "25Gbit-16": _cluster(16, "25Gbit"),
        "40Gbit-4-pcie": _cluster(4, "40Gbit", has_nvlink=False),
        "100Gbit-16": _cluster(16, "100Gbit"),
        "100Gbit-16-rdma": _cluster(16, "100Gbit", is_rdma=True),
        "100Gbit-4-rdma-pcie": _cluster(4, "100Gbit", has_nvlink=False, is_rdma=True),
    }
    return [
        Case(f"{model}-{name}", Simulator(load(model), cluster))
        for model in MODELS
        for name, cluster in clusters.items()
    ]


def _cluster(nodes: int, bandwidth: str, has_nvlink: bool = True, is_rdma: bool = False) -> Cluster:
    cluster = Cluster(
        nodes=nodes,
        ranks_per_node=RANKS_PER_NODE,
        bandwidth_bytes_per_second=parse_bandwidth(bandwidth),
        latency_seconds=RDMA_LATENCY_SECONDS if is_rdma else TCP_LATENCY_SECONDS,
    )
    if not is_rdma:
        cluster = replace(cluster, flow_bytes_per_second=TCP_FLOW_BYTES_PER_SECOND)
    if has_nvlink:
        return cluster
    return replace(
        cluster,
        inside_bandwidth_bytes_per_second=PCIE_BYTES_PER_SECOND,
        inside_latency_seconds=PCIE_LATENCY_SECONDS,
    )
