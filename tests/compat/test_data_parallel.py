"""Bagua's DistributedDataParallel: torch's arguments, and an algorithm that is never left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client.algorithms import ByteGradAlgorithm
from bagua_compat.torch_api.data_parallel import DistributedDataParallel, all_reduce
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def _wrapped(model: nn.Module, **options: Any) -> Any:
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    return DistributedDataParallel(model, **options)


def _gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def _accumulates() -> tuple[float, list[str]]:
    """By how much two passes, the first under no_sync, differ from torch's; the names it saves."""
    rank = dist.get_rank()
    stock = nn.parallel.DistributedDataParallel(small_model())
    # The arguments with which Bagua hands the model over to torch, without its algorithm.
    ours = _wrapped(
        small_model(), device_ids=[0], output_device=0, broadcast_buffers=False, bucket_cap_mb=1
    )
    for model in (stock, ours):
        with model.no_sync():
            loss_of(model, rank, 0).backward()
        loss_of(model, rank, 1).backward()
    difference = float((_gradients(stock) - _gradients(ours)).abs().max())
    return difference, list(ours.state_dict())


def test_no_sync_and_names_are_torchs(two_ranks: RankPool) -> None:
    for difference, names in two_ranks.run(_accumulates):
        assert difference < 1e-6
        assert names == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]


def _keeps_algorithm() -> str:
    ours = _wrapped(small_model(), device_ids=[0], algorithm=ByteGradAlgorithm())
    loss_of(ours, dist.get_rank(), 0).backward()
    name: str = ours.bagua_algorithm.name
    return name


def test_device_ids_do_not_cost_the_algorithm(two_ranks: RankPool) -> None:
    assert two_ranks.run(_keeps_algorithm) == ["bytegrad"] * 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def _used(looks: bool) -> list[list[str]]:
    """The names of what is communicated, before the first pass and after it."""
    ours = _wrapped(Branches(), find_unused_parameters=looks)
    found = [[name for name, _ in ours.inner.bagua_build_params()]]
    ours(torch.ones(2, 3)).sum().backward()
    return [*found, [name for name, _ in ours.inner.bagua_build_params()]]


@pytest.mark.parametrize("looks", [True, False])
def test_unused_parameters_are_told(two_ranks: RankPool, looks: bool) -> None:
    used = ["used.weight", "used.bias"]
    everything = [*used, "unused.weight", "unused.bias"]
    assert two_ranks.run(_used, looks) == [[everything, used if looks else everything]] * 2


def _through() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    x.requires_grad_()
    total = all_reduce(x)
    (total * (rank + 1)).sum().backward()
    assert x.grad is not None
    return total.tolist(), x.grad.tolist()


def test_gradients_flow_through_an_all_reduce(two_ranks: RankPool) -> None:
    # Each rank weighs the sum by its number: 1 + 2.
    assert two_ranks.run(_through) == [([3.0, 6.0], [3.0, 3.0])] * 2
