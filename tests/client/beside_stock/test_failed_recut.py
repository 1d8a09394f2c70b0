"""A re-cut that one rank has no memory for, of replicas that trained apart. That all go back and
train on in any case is in every Tunable's contract."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.torch_private import reducer as torchs
from tests.client.beside_stock.side_by_side import LEARNING_RATE
from tests.contracts.test_tunables import failing
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH = 24
FAILING_STEP = 4
DEFAULT = Configuration(first_bucket_bytes=1024 * 1024)


def _cut_fails_under_decentralized() -> tuple[list[float], Configuration]:
    """How far apart the replicas are after the last steps, and what is in force."""
    torch.manual_seed(0)
    # Torch cuts a static graph's buckets after two steps, so all ranks keep the first of them.
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(layers, static_graph=True)
    sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.5)
    apart = []
    for step in range(FAILING_STEP + 3):
        if step == FAILING_STEP - 1:
            assert model.reconfigure(Configuration(2048, algorithm="decentralized"))
        torch.manual_seed(1000 * step + dist.get_rank())
        sgd.zero_grad()
        fails = step == FAILING_STEP and dist.get_rank() == 1
        with failing(torchs, "rebuild", 1, is_done=True) if fails else nullcontext():
            model(torch.randn(3, WIDTH)).square().mean().backward()
        sgd.step()
        low = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        high = low.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        apart.append(float((high - low).max()))
    return apart[FAILING_STEP - 1 :], model.configuration


def test_replicas_that_trained_apart_are_equal_where_all_go_back(two_ranks: RankPool) -> None:
    for apart, back_at in two_ranks.run(_cut_fails_under_decentralized):
        assert apart[0] > 0
        assert apart[1:] == [0.0] * 3
        assert back_at == DEFAULT
