"""A sharded model tuned end to end where one rank has too little memory to keep everything: what
fits is tried, and nothing larger is ever in force. The memory is on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua_client
from bagua_client.integrations.sharded_model import tunable_of
from tests.client.scripted_memory import ScriptedMemory
from tests.client.sharded.models import WIDTH, Kind, sharded
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MOST_STEPS = 6000
REST_BYTES = 10**5
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def _train(room_bytes: int) -> tuple[str, int, bool, dict[str, Any]]:
    """How the tuning ended, the most units that were kept, whether memory would have run out."""
    model: Any = bagua_client.tune(sharded(Kind(blocks=8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory, most = None, 0
    for step in range(MOST_STEPS):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if memory is None:
            own = room_bytes if dist.get_rank() == 1 else 10**6
            allowed_bytes = int((REST_BYTES + own) / 0.9)
            memory = ScriptedMemory(tunable_of(model), REST_BYTES, allowed_bytes)
        most = max(most, tunable_of(model).layout.configuration.kept_units)
        if model.tuning.state == "finished":
            break
    assert memory is not None
    return model.tuning.state, most, memory.most_bytes > allowed_bytes, model.tuning.to_json()


def test_what_does_not_fit_on_one_rank_is_never_in_force(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    (state, most, has_run_out, tuning), other = tuned_ranks(service.url, (2,)).run(
        _train, 5 * BLOCK_BYTES, timeout_seconds=280
    )
    assert (state, has_run_out) == ("finished", False)
    assert other[:3] == (state, most, has_run_out)
    assert most <= 5
    trials = service.trials()
    infeasible = [trial for trial in trials if trial["state"] == "infeasible"]
    assert {trial["state"] for trial in trials} == {"measured", "infeasible"}
    assert all(trial["failure"].startswith("rank 1 would need") for trial in infeasible)
    configurations = [str(trial["configuration"]) for trial in infeasible]
    assert len(set(configurations)) == len(configurations)
    result = service.job()["result"]
    assert result["default_peak_bytes"] == tuning["default_peak_bytes"] == REST_BYTES
    assert result["peak_bytes"] == tuning["peak_bytes"] <= REST_BYTES + 5 * BLOCK_BYTES
