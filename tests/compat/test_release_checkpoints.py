"""Bagua's own checkpoint functions, unmodified, read what ours write, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_compat.torch_api import checkpoint
from bagua_compat.torch_api.model_parallel.moe import MoE
from tests.compat.release_module import release_module
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def _training(has_experts: bool, seed: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    layer = MoE(4, nn.Linear(4, 4), num_local_experts=2) if has_experts else nn.Linear(4, 4)
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "layer": layer})
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * seed, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1 * seed)


def _carried_over(folder: str, has_experts: bool, is_theirs_first: bool) -> None:
    """A training that one saves and the other loads is the same: of each rank its own experts, all
    else that of the first."""
    theirs = release_module("checkpoint/checkpointing.py")
    writer, reader = (theirs, checkpoint) if is_theirs_first else (checkpoint, theirs)
    rank = dist.get_rank() if has_experts else 0
    saved, loaded = _training(has_experts, seed=1 + rank), _training(has_experts, seed=5 + rank)
    writer.save_checkpoint(12, folder, *saved)
    assert reader.load_checkpoint(folder, *loaded) == 12
    states = [training[0].state_dict() for training in (saved, loaded)]
    compared = [key for key in states[0] if rank == 0 or "expert" in key]
    assert compared
    for key in compared:
        assert torch.equal(states[0][key], states[1][key]), key
    torch.testing.assert_close(loaded[1].state_dict(), saved[1].state_dict(), rtol=0, atol=0)
    assert rank > 0 or saved[2].state_dict() == loaded[2].state_dict()


@pytest.mark.parametrize("is_theirs_first", [True, False], ids=["Bagua's", "ours"])
@pytest.mark.parametrize("has_experts", [False, True], ids=["plain", "experts"])
def test_files_are_bagua_s(
    two_ranks: RankPool, tmp_path: Path, has_experts: bool, is_theirs_first: bool
) -> None:
    two_ranks.run(_carried_over, str(tmp_path), has_experts, is_theirs_first)
