"""The machines and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Link = Literal["network", "inside"]
# The share of its rate that a link loses to congestion for each further flow.
SHARING_LOSS = 0.01


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal numbers of ranks, each with one full-duplex link to the others.

    The figures inside a node are by default those of 8 GPUs on NVLink as nccl-tests reports them
    for a DGX-1 (bus bandwidth of the order of 100 GB/s); a node with PCIe only has about 10 GB/s.

    Attributes:
        bandwidth_bytes_per_second: of a node's link, each way.
        latency_seconds: of one message between two nodes.
        flow_share: the largest share of a link that one collective alone fills.
        flow_bytes_per_second: the largest rate of one collective alone; infinite with RDMA, a few
            gigabytes over TCP, where processor cores copy.
        half_seconds: a message that the link carries in this time reaches half of ``flow_share``.
        start_seconds: until all ranks have begun a collective, whatever its size.
        shards_share: share of the bandwidth inside a node that reduce-scatter and all-gather reach,
            while reduce and broadcast reach all of it; less if the backend emulates them.
        together: how much more all flows together carry where a node's rank that sends is not the
            one that receives. 1 if ``bandwidth_bytes_per_second`` is the link's; more if it may be
            what the cores copy.
        is_nccl: whether NCCL sums, which may take a tree for a flat sum over two nodes; gloo has
            rings only.
    """

    nodes: int
    ranks_per_node: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    inside_bandwidth_bytes_per_second: float = 100e9
    inside_latency_seconds: float = 4e-6
    flow_share: float = 0.93
    flow_bytes_per_second: float = math.inf
    half_seconds: float = 40e-6
    start_seconds: float = 15e-6
    shards_share: float = 1.0
    together: float = 1.0
    is_nccl: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"a cluster of {self.nodes} nodes of {self.ranks_per_node} ranks has no rank"
            )
        for name in ("bandwidth_bytes_per_second", "inside_bandwidth_bytes_per_second"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(f"latency_seconds is {self.latency_seconds}; it must not be negative")
        for name in ("flow_share", "shards_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and at most 1"
                )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def capacity(self, link: Link, flows: int) -> float:
        """Return the bytes per second, in each direction, of so many flows together on a node's
        link.
        """
        full = {
            "network": self.bandwidth_bytes_per_second,
            "inside": self.inside_bandwidth_bytes_per_second,
        }
        return full[link] / (1 + SHARING_LOSS * (flows - 1))

    @property
    def is_hierarchical(self) -> bool:
        """Whether something can be reduced inside a node before it is sent to others."""
        return self.nodes > 1 and self.ranks_per_node > 1
