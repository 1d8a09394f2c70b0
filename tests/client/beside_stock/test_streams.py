"""Towers whose backward passes run on CUDA streams of their own."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import RUN_SECONDS
from tests.client.beside_stock.side_by_side import FLAT, Recuts, side_by_side
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

WIDTH = 512
TOWERS = 3


class Towers(nn.Module):
    """Each tower computes on a stream of its own, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(TOWERS)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        results = []
        for place, tower in enumerate(self.towers):
            stream = _streams()[place]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # Work that is long enough for a bucket to be read too early.
                torch.cuda._sleep(2_000_000 * (place + 1))
                results.append(_Slow.apply(tower(values)))
        for place in range(TOWERS):
            current.wait_stream(_streams()[place])
            results[place].record_stream(current)
        return torch.stack(results).sum(0)


_made: list[torch.cuda.Stream] = []


def _streams() -> list[torch.cuda.Stream]:
    if not _made:
        _made.extend(torch.cuda.Stream() for _ in range(TOWERS))
    return _made


class _Slow(torch.autograd.Function):
    """Its backward pass, on the stream of its forward pass, takes a while."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        return gradient.clone()


def _towers(recuts: Recuts, backend: str, as_view: bool) -> str | None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.new_group(backend=backend)

    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randn(8, WIDTH, device=device)).square().mean().backward()

    return side_by_side(
        Towers().to(device),
        train,
        recuts,
        device_ids=[device.index],
        process_group=group,
        gradient_as_bucket_view=as_view,
    )


@pytest.mark.parametrize(
    ("recuts", "backend", "as_view"),
    [((), "gloo", True), ((), "nccl", False), (FLAT, "gloo", False), (FLAT, "nccl", True)],
    ids=["off-gloo", "off-nccl", "recut-gloo", "recut-nccl"],
)
def test_towers_on_streams_of_their_own(
    pair_of_ranks: RankPool, recuts: Recuts, backend: str, as_view: bool
) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("nccl needs a device for each rank")
    found = pair_of_ranks.run(_towers, recuts, backend, as_view, timeout_seconds=2 * RUN_SECONDS)
    assert found == [None, None]
