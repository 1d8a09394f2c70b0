"""What a configuration needs of a rank's memory; what would not fit on one is not tried on any."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua_client
from bagua_client.algorithms import Algorithm, QuantizedAlgorithm, find
from bagua_client.configuration import Configuration
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.sharded.memory import UnitsMemory, copied_bytes, extra_bytes
from tests.client.listening import logged
from tests.client.scripted_memory import ScriptedMemory
from tests.client.sharded.models import Kind, sharded, train
from tests.client.tunable.test_measured_memory import GIB, Device
from tests.ranks import RankPool

# Four units of a GiB of parameters in bfloat16, whose gradients are reduced in float32.
UNITS: Any = [
    SimpleNamespace(
        elements=GIB // 2,
        dtypes=(torch.bfloat16, torch.float32),
        given=SimpleNamespace(copies=object()),
        is_gathered_twice=True,
        is_trained=True,
        ranks=(0, 1),
    )
    for _ in range(4)
]
SPECS = [TensorSpec(str(at), (GIB // 2,), 4, "torch.float32", "cuda#0", "") for at in range(4)]
DEFAULT = Configuration(2 * GIB)


def layout(**changes: Any) -> Layout:
    return plan(SPECS, range(4), replace(DEFAULT, **changes))


def memory_on(device: Device) -> UnitsMemory:
    memory = UnitsMemory(UNITS, device, layout(), _algorithm_of)
    memory.read()
    return memory


def extra(**changes: Any) -> float:
    found = layout(**changes)
    algorithm = _algorithm_of(found.configuration)
    held = extra_bytes(UNITS, found.configuration, found.partition, algorithm)
    copies = [copied_bytes(UNITS, found.configuration, p, algorithm) for p in found.partition]
    return (held + max(map(sum, copies))) / GIB


def _algorithm_of(configuration: Configuration) -> Algorithm:
    return find(configuration.algorithm or "gradient_allreduce")


def test_what_configurations_need_more_than_the_default() -> None:
    assert extra() == 0
    assert extra(kept_units=3) == 3
    assert (extra(prefetch=1), extra(prefetch=3)) == (0, 2)
    assert extra(scatter_buffers=2) == 2
    assert extra(channels=4) == 3
    assert extra(bucket_bytes=4 * GIB) == 2 * 3  # of 2 units each: one more of each kind, twice
    assert extra(kept_units=3, kept_over_micro_batches="on") == 3
    assert (extra(deferred_reduction="on"), extra(deferred_reduction="copies")) == (4 * 2, 4)
    assert extra(wire_precision="bf16") == 1
    assert extra(hierarchical="shards") == 3
    copies = layout(node_copy="on", kept_units=1)
    exact = find("gradient_allreduce")
    assert extra_bytes(UNITS, copies.configuration, copies.partition, exact, 2) == 2.5 * GIB
    assert extra(algorithm="quantized_weights") == 1
    assert extra(algorithm="quantized") == 2
    assert extra(algorithm="quantized", bucket_bytes=4 * GIB) == 2 * 3 + 2 * 2
    feeds_back = QuantizedAlgorithm(error_feedback=True)
    assert extra_bytes(UNITS, DEFAULT, layout().partition, feeds_back) / GIB == 4 * 2


def test_copies_where_little_else_is_there_cost_nothing() -> None:
    device = Device(taken_bytes=4 * GIB, allowed=12 * GIB)
    memory = memory_on(device)
    for unit in range(4):
        memory.travels(unit, is_gathered=True)  # Of a GiB, and of gradients of 2.
        memory.travels(unit, is_gathered=False)
    device.taken_bytes = 10 * GIB
    memory.read()
    assert memory.misfit(layout(channels=4)) is None
    assert memory.misfit(layout(channels=4, kept_units=1)) == memory.misfit(layout(kept_units=1))
    device.taken_bytes = int(8.5 * GIB)
    memory.travels(3, is_gathered=False)
    found = memory.misfit(layout(channels=4))
    assert found is None
    memory.travels(2, is_gathered=False)
    device.taken_bytes = 9 * GIB
    memory.travels(2, is_gathered=False)
    found = memory.misfit(layout(channels=4))
    assert found is not None
    assert found.peak_bytes == 11 * GIB


def test_process_groups_take_memory_once() -> None:
    memory = memory_on(Device(reachable=15 * GIB))
    found = memory.misfit(layout(channels=8, kept_units=1))
    assert found is not None
    assert found.device_bytes == 15 * GIB - 7 * 64 * 2**20
    memory.begin(layout(channels=8))
    found = memory.misfit(layout(channels=8, kept_units=1))
    assert found is not None
    assert found.device_bytes == 15 * GIB


def _reconfigured(rank: int) -> tuple[list[bool], list[int], str, list[str]]:
    """Keep more and more on ranks of which one has little memory."""
    kind = Kind()
    model: Any = bagua_client.tune(sharded(kind))
    train(model, kind, {}, 3)
    tunable = tunable_of(model)
    room = 800 if dist.get_rank() == rank else 10**6  # A block has 90 numbers of 4 bytes.
    ScriptedMemory(tunable, 10**4, int((10**4 + room) / 0.9))
    agreed, kept = [], []
    with logged() as lines:
        for count in (1, 2, 3, 4, 0):
            agreed.append(bool(model.reconfigure(replace(tunable.default, kept_units=count))))
            train(model, kind, {}, 1)
            kept.append(tunable.layout.configuration.kept_units)
    return agreed, kept, str(tunable.default.kept_units), lines


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_tries_what_does_not_fit_on_one(two_ranks: RankPool, rank: int) -> None:
    for own, (agreed, kept, default, lines) in enumerate(two_ranks.run(_reconfigured, rank)):
        assert agreed == [True, True, False, False, True]
        assert (kept, default) == ([1, 2, 0, 0, 0], "0")
        told = [line for line in lines if "does not try" in line]
        assert len(told) == (2 if own == 0 else 0)
        assert all(f"rank {rank} would need" in line for line in told)
