"""A check of a training of one process: what it recomputes, and what it could keep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bagua_client
from bagua_client.checking import check

STEPS = 25


class Model(torch.nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
        if recomputes:
            blocks = [checkpoint_wrapper(block) for block in blocks]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def trained(path: Path | None, recomputes: bool = True) -> list[float]:
    """The losses; where a path is given the training is checked."""
    torch.manual_seed(0)
    model, losses = Model(recomputes), []
    variables = {} if path is None else {"BAGUA_AUTOTUNE_CHECK": str(path)}
    with mock.patch.object(check, "_checks", []), mock.patch.dict(os.environ, variables):
        bagua_client.tune(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for each in check._checks:
            each.close()
    return losses


def test_it_is_measured_and_the_training_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert trained(path) == trained(None)
    found = json.loads(path.read_text())
    assert (found["ranks"], found["nodes"], found["backend"]) == (1, 1, "")
    assert len(found["steps"]) == 15
    assert all(computing == seconds for seconds, computing, _ in found["steps"])
    recomputing = found["recomputing"]
    assert recomputing["blocks"] == 3
    typical = sorted(seconds for seconds, *_ in found["steps"])[7]
    assert 0 < recomputing["seconds"] < 10 * typical
    assert recomputing["left_alone"] == ""
    assert "peak_bytes" not in recomputing, "nobody knows it on a CPU"


def test_where_nothing_is_recomputed_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    trained(path, recomputes=False)
    recomputing = json.loads(path.read_text())["recomputing"]
    assert (recomputing["blocks"], recomputing["seconds"]) == (0, None)
