"""What a configuration needs of a rank's memory; what would not fit on one is not tried on any."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import bagua_client
from bagua_client.algorithms import Algorithm, QuantizedAlgorithm, find
from bagua_client.configuration import Configuration
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.sharded.memory import UnitsMemory, copied_bytes, extra_bytes
from bagua_client.tunable.memory import CudaMemory
from tests.client.agent.scripted_service import ScriptedService
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


# Two ranks share one GPU whose memory they limited: what does not fit is not tried, what fits is,
# and no memory runs out. Skipped without a GPU.


BLOCKS, WIDTH, SAMPLES = 32, 2048, 8192
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
ROOM_BYTES = 20 * BLOCK_BYTES + BLOCK_BYTES // 2
"""Beside what the default takes: half of the blocks fit, and not all."""
MOST_STEPS = 500
# Ranks on one GPU: to NCCL each is a host of its own.
VARIABLES = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def _device() -> torch.device:
    os.environ.update(VARIABLES, NCCL_HOSTID=f"host{dist.get_rank()}")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _model(mesh: DeviceMesh, device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        model = nn.Sequential(*blocks, nn.Linear(WIDTH, 8))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    optimizer.zero_grad()
    model(torch.randn(SAMPLES, WIDTH, device=device)).square().mean().backward()
    optimizer.step()


def _default(mesh: DeviceMesh, device: torch.device) -> tuple[dict[str, Any], int]:
    """The default configuration, and what it takes."""
    model = bagua_client.tune(_model(mesh, device))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        _step(model, optimizer, device)
    peak_bytes = torch.cuda.max_memory_allocated(device)  # Ours begins to count anew.
    return tunable_of(model).default.to_json(), peak_bytes


def _tune(url: str) -> dict[str, Any]:
    device = _device()
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
    _, default_bytes = _default(mesh, device)
    gc.collect()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    allowed_bytes = (default_bytes + ROOM_BYTES) / 0.9
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes, device)
    try:
        model = bagua_client.tune(_model(mesh, device))
        optimizer = torch.optim.AdamW(model.parameters())
        os.environ.update(BAGUA_AUTOTUNE="1", BAGUA_AUTOTUNE_URL=url)
        _step(model, optimizer, device)
        del os.environ["BAGUA_AUTOTUNE"]
        kept = set()
        for _ in range(MOST_STEPS):
            if not model.is_tuning:
                break
            _step(model, optimizer, device)
            kept.add(tunable_of(model).layout.configuration.kept_units)
        for _ in range(3):
            _step(model, optimizer, device)
        return {
            "state": model.tuning.state,
            "kept": kept,
            "now": tunable_of(model).layout.configuration.kept_units,
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "allowed_bytes": CudaMemory(device).allowed_bytes(),
            "wanted_bytes": allowed_bytes,
        }
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _describe() -> dict[str, Any]:
    device = _device()
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
    return _default(mesh, device)[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_keeping_everything_does_not_fit_and_half_of_it_does() -> None:
    ranks = RankPool([2])
    try:
        default = ranks.run(_describe, timeout_seconds=120)[0]
        tried = [{**default, "kept_units": count} for count in (0, BLOCKS, BLOCKS // 2)]
        with ScriptedService([tried]) as service:
            found = ranks.run(_tune, service.url, timeout_seconds=200)
            refused = service.bodies("infeasible")
            peaks = {b["trial"]: b["memory"]["peak_bytes"] for b in service.bodies("observations")}
    finally:
        ranks.close()
    assert [event["trial"] for event in refused] == [1]
    assert refused[0]["memory"]["is_predicted"]
    assert set(peaks) == {0, 2}
    assert peaks[0] < peaks[2] <= peaks[0] + ROOM_BYTES
    for rank in found:
        assert (rank["state"], rank["now"]) == ("finished", BLOCKS // 2)
        assert rank["kept"] == {0, BLOCKS // 2}
        assert rank["peak_bytes"] <= 0.9 * rank["allowed_bytes"]
        assert rank["allowed_bytes"] == pytest.approx(rank["wanted_bytes"], rel=1e-3)
