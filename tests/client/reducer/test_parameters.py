"""Parameters of unusual shapes and memory formats travel like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client import Configuration
from bagua_client.reducer.offer import refusal_of
from bagua_client.torch_private.reducer import caps_of
from tests.client.comparison import difference, pair
from tests.ranks import RankPool


class _Unusual(nn.Module):
    """A channels_last convolution, and parameters transposed, with gaps, empty and scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.gaps = nn.Parameter(torch.randn(5, 6)[:, ::2])
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = self.convolution(images).mean(dim=(2, 3)) @ self.transposed @ self.gaps
        return values * self.scalar * self.one.sum() + self.empty.sum()


def _train(hierarchical: str, set_to_none: bool) -> str | None:
    models = pair(_Unusual())
    _, ours = models
    torch.manual_seed(dist.get_rank())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    found = None
    for step, bucket_bytes in enumerate([1, 60, 1 << 20, 1, 1 << 20]):
        assert ours.reconfigure(Configuration(bucket_bytes, hierarchical))
        images = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(images).square().sum().backward()
        found = found or difference(*models, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    weight = ours.module.convolution.weight
    if not weight.grad.is_contiguous(memory_format=torch.channels_last):
        return "the gradient has other strides than its parameter"
    return found


@pytest.mark.parametrize(
    ("hierarchical", "set_to_none"), [("off", True), ("leaders", False), ("shards", True)]
)
def test_unusual_parameters_are_reduced_as_in_torch(
    four_ranks: RankPool, hierarchical: str, set_to_none: bool
) -> None:
    assert four_ranks.run(_train, hierarchical, set_to_none) == [None] * 4


def _frozen_before_tune(thaws_at: int) -> tuple[str | None, str]:
    """What differs from torch's wrapper, where a layer was frozen after that was made; and why it
    is not tuned."""
    models = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        wrapped: Any = Stock(
            nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), find_unused_parameters=True
        )
        wrapped.module[0].requires_grad_(False)
        models.append(bagua_client.tune(wrapped) if is_ours else wrapped)
    found = None
    for step in range(6):
        if step == thaws_at:
            for model in models:
                model.module[0].requires_grad_(True)
        if step == 2:
            assert models[1].reconfigure(Configuration(100))
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 6)
        for model in models:
            model.zero_grad()
            model(inputs).square().sum().backward()
        found = found or difference(*models, f"step {step}")
    return found, refusal_of(models[1], caps_of(models[1]))


@pytest.mark.parametrize("thaws_at", [1, 4])
def test_what_is_frozen_before_tune_is_reduced_once_it_is_trained(
    two_ranks: RankPool, thaws_at: int
) -> None:
    """Torch's reducer has it: it was trained when that was made."""
    assert two_ranks.run(_frozen_before_tune, thaws_at) == [(None, "")] * 2


def _thawed_before_tune() -> str:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    model[0].requires_grad_(False)
    wrapped: Any = Stock(model)
    model[0].requires_grad_(True)
    model[1].weight.requires_grad_(False)
    tuned = bagua_client.tune(wrapped)
    return refusal_of(tuned, caps_of(tuned))


def test_a_wrapper_that_others_are_trained_of_than_it_knows_is_not_tuned(
    two_ranks: RankPool,
) -> None:
    for refusal in two_ranks.run(_thawed_before_tune):
        assert refusal.startswith("other parameters are trained now")
