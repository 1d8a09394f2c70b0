"""The machines and the links between them, and a link's figures as people write them: ``25Gbit``,
``100us``."""

from __future__ import annotations

import math
import re
from contextlib import suppress
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
    def link(self) -> str:
        """The link between nodes in words, ``25 Gbit/s, 100 us``; empty of one node."""
        bandwidth = describe_bandwidth(self.bandwidth_bytes_per_second)
        return f"{bandwidth}, {describe_duration(self.latency_seconds)}" * (self.nodes > 1)

    @property
    def is_hierarchical(self) -> bool:
        """Whether something can be reduced inside a node before it is sent to others."""
        return self.nodes > 1 and self.ranks_per_node > 1


_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kKMGT]?)(bit|bps|B)(?:/s)?")
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(ns|us|µs|ms|s)")


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of ``25Gbit``, ``200Mbit/s``, ``100Gbps``, ``1GB`` or ``1GB/s``.

    Prefixes are powers of 1000, as usual in networking.

    Raises:
        ValueError: it says something else.
    """
    value, (prefix, unit) = _read(
        _BANDWIDTH, text, "bandwidth; write it like 25Gbit, 200Mbit or 1GB"
    )
    return value * _PREFIXES[prefix] / (1 if unit == "B" else 8)


def parse_duration(text: str) -> float:
    """Seconds of ``100us``, ``2ms`` or ``0.5s``.

    Raises:
        ValueError: it says something else.
    """
    value, (unit,) = _read(_DURATION, text, "latency; write it like 100us or 2ms")
    return value * _DURATIONS[unit]


def describe_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in words, such as ``25 Gbit/s``."""
    bits = bytes_per_second * 8
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"


def describe_duration(seconds: float) -> str:
    """Return a duration in words, such as ``100 us``."""
    for unit in ("s", "ms"):
        if seconds >= _DURATIONS[unit]:
            return f"{seconds / _DURATIONS[unit]:.3g} {unit}"
    return f"{seconds / _DURATIONS['us']:.3g} us"


def _read(pattern: re.Pattern[str], text: str, what: str) -> tuple[float, list[str]]:
    """The number, which is positive, and the pattern's other groups."""
    found = pattern.fullmatch(text.strip())
    with suppress(ValueError):
        if found and 0 < float(found[1]) < math.inf:
            return float(found[1]), list(found.groups()[1:])
    raise ValueError(f"{text!r} is no {what}")
