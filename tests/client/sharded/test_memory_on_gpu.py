"""Two ranks share one GPU whose memory they limited: what does not fit is not tried, what fits is,
and no memory runs out. Skipped without a GPU."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import bagua_client
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.tunable.memory import CudaMemory
from tests.client.agent.scripted_service import ScriptedService
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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
