"""Real ranks give up what was kept once the loss turns back, all in the same step."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bagua_client
from bagua_client import DistributedDataParallel
from bagua_client.reporter.drift import DriftWatch
from tests.client.agent.scripted_service import ScriptedService
from tests.ranks import RankPool

KEPT = {"bucket_bytes": 2**20, "wire_precision": "bf16"}
TRIED = [{"bucket_bytes": 2**21}, KEPT]
MOST_STEPS = 3000
STEPS_AFTER = 800


def _model(is_sharded: bool) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    if not is_sharded:
        return DistributedDataParallel(net)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return bagua_client.tune(net)


def _trained(
    url: str, by_hand: bool = False, is_sharded: bool = False
) -> tuple[list[str], list[str]]:
    """The precision in force in each step after the tuning, and how its rounds ended. On rank 1
    the loss rises then.

    Args:
        by_hand: the training sets the same precision itself, after the tuning.
    """
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url, "BAGUA_AUTOTUNE_ALLOW": "bf16"}
    with mock.patch.dict(os.environ, variables):
        model = _model(is_sharded)
        model(torch.ones(2, 16)).square().mean().backward()  # Its tuning may begin only here.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen: list[str] = []
    summaries: list[str] = []
    for step in range(MOST_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        rise = 1e-3 * len(seen) if dist.get_rank() == 1 else 0.0
        model.report_loss(1.0 + 0.01 * (step % 3) + rise)
        if model.is_tuning:
            continue
        seen.append(model.configuration.wire_precision)
        if by_hand and len(seen) == 50:
            assert model.reconfigure(replace(model.configuration, bucket_bytes=2**22))
        if model.tuning.summary not in summaries:
            summaries.append(model.tuning.summary)
        if len(seen) == STEPS_AFTER:
            break
    return seen, summaries


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_ranks_return_to_the_default_in_the_same_step(
    two_ranks: RankPool, is_sharded: bool
) -> None:
    with ScriptedService([TRIED], steps=30) as service:
        (first, _), (second, _) = two_ranks.run(_trained, service.url, False, is_sharded)
        (event,) = service.bodies("diverged")
        assert service.bodies("disagreement") == []
    assert first == second
    back = first.index("as_is", first.index("bf16"))
    assert set(first[back:]) == {"as_is"}
    assert event["trial"] is None
    assert "was to be expected, as a training by default does not turn back" in event["message"]


def _without_reporter(url: str) -> list[str]:
    """The same, where the thread that talks to the service fails after the tuning."""
    with mock.patch.object(DriftWatch, "add", side_effect=RuntimeError("on purpose")):
        return _trained(url)[0]


def test_the_guard_needs_no_service(two_ranks: RankPool) -> None:
    with ScriptedService([TRIED], steps=30) as service:
        first, second = two_ranks.run(_without_reporter, service.url)
        assert service.bodies("diverged") == []
    assert first == second
    back = first.index("as_is", first.index("bf16"))
    assert set(first[back:]) == {"as_is"}


def test_what_the_training_sets_by_hand_is_not_judged(two_ranks: RankPool) -> None:
    with ScriptedService([TRIED], steps=30) as service:
        (first, _), (second, _) = two_ranks.run(_trained, service.url, True)
        assert service.bodies("diverged") == []
    assert first == second
    assert first[-1] == "bf16"
