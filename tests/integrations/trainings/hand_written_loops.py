"""Training loops as PyTorch's documentation writes them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.integrations.arms import Run, Trained
from tests.integrations.trainings import regression
from tests.integrations.trainings.recuts import Recuts


def checkpoints(run: Run) -> Trained:
    """Saved while it trains, and loaded into a model of its own that must compute the same."""
    recuts = Recuts(run)
    model = nn.parallel.DistributedDataParallel(regression.model())
    keys, made = list(model.state_dict()), id(model)
    recuts.wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = regression.data(64).dataset
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    losses = []
    for epoch in range(3 * run.times):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(dataset, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            recuts.stepped()
        _check(model, keys, made)
        losses.append(_of_a_checkpoint(model, Path(run.folder, f"{epoch}-{dist.get_rank()}.pt")))
    return recuts.trained(model.module, losses)


def _check(model: nn.Module, keys: list[str], made: int) -> None:
    assert id(model) == made
    assert list(model.state_dict()) == keys
    assert type(model).__name__ == "DistributedDataParallel"
    assert isinstance(model, DistributedDataParallel)
    assert type(copy.deepcopy(model.module)) is nn.Sequential


def _of_a_checkpoint(model: nn.Module, file: Path) -> float:
    torch.save(model.state_dict(), file)
    loaded = regression.model().eval()
    state = torch.load(file, weights_only=True)
    loaded.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    with torch.no_grad():
        return float(loaded(torch.ones(1, regression.WIDTH)).sum())
