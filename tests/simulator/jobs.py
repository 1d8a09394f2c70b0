"""Small workloads and clusters for the simulator's tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from bagua_simulator import Cluster, Simulator, Workload
from bagua_wire.configuration import Value
from bagua_wire.cutting import Tensor

MIB = 1024**2


def make_tensors(sizes: Sequence[int], groups: Sequence[str] = ("torch.float32",)) -> list[Tensor]:
    """Tensors of these many elements, of the groups in turn."""
    return [
        Tensor(
            name=f"t{index}",
            elements=elements,
            bytes=4 * elements,
            dtype=groups[index % len(groups)],
            group=groups[index % len(groups)] + "/cpu",
        )
        for index, elements in enumerate(sizes)
    ]


def make_workload(
    sizes: Sequence[int] = (MIB,) * 50, milliseconds: float = 2.0, forward_seconds: float = 0.05
) -> Workload:
    """Each tensor takes so long to compute."""
    ready = tuple(accumulate([milliseconds / 1e3] * len(sizes)))
    return Workload("small", tuple(make_tensors(sizes)), forward_seconds, ready)


def make_cluster(
    nodes: int = 4, ranks_per_node: int = 2, bandwidth: float = 1e9, latency_seconds: float = 5e-5
) -> Cluster:
    return Cluster(nodes, ranks_per_node, bandwidth, latency_seconds)


SIZES = st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=40)
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "bucket_bytes": st.integers(64 * 1024, 64 * MIB),
        "hierarchical": st.sampled_from(["off", "leaders", "shards"]),
        "channels": st.sampled_from([1, 2, 4]),
        "first_bucket_bytes": st.sampled_from([0, MIB, 4 * MIB]),
        "last_bucket_bytes": st.sampled_from([0, MIB, 4 * MIB]),
        "wire_precision": st.sampled_from(["as_is", "bf16", "fp16"]),
    }
)
Knobs = dict[str, Value]

# A job whose buckets matter, and what of it is measured.
SMALL = Simulator(
    make_workload([MIB // 8, MIB // 2] * 30, milliseconds=1.0), make_cluster(latency_seconds=1e-4)
)
SMALL_TRIALS: list[Knobs] = [
    {"bucket_bytes": 25 * MIB, "hierarchical": "off", "channels": 1},
    {"bucket_bytes": 4 * MIB, "hierarchical": "off", "channels": 1},
    {"bucket_bytes": MIB, "hierarchical": "leaders", "channels": 2},
]
