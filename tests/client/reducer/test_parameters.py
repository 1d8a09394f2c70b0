"""Parameters of unusual shapes and memory formats travel like any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration
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


@pytest.mark.parametrize("hierarchical", ["off", "leaders", "shards"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unusual_parameters_are_reduced_as_in_torch(
    four_ranks: RankPool, hierarchical: str, set_to_none: bool
) -> None:
    assert four_ranks.run(_train, hierarchical, set_to_none) == [None] * 4
