"""Parameters that take no part in a loss: announced, as in torch; not announced, an error."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from tests.client.comparison import difference, pair
from tests.ranks import RankPool


class _Branches(nn.Module):
    """The trunk is always used; the caller says which branches are."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, values: torch.Tensor, used: list[int]) -> list[torch.Tensor]:
        trunk = self.trunk(values)
        return [self.branches[index](trunk) for index in used] or [trunk]


# For each step and each rank the branches used. Branch 2 is used by nobody.
PLAN = [
    ([0], [1]),
    ([0, 1], [0]),
    ([], [1]),
    ([], []),
    ([1], []),
    ([0, 1], [0, 1]),
]


def _train(as_view: bool, micro_batches: int, set_to_none: bool, clear: bool) -> str | None:
    models = pair(_Branches(), gradient_as_bucket_view=as_view, find_unused_parameters=True)
    torch.manual_seed(dist.get_rank())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    found = None
    for step in range(3 * len(PLAN)):
        if step == len(PLAN):
            assert models[1].reconfigure(Configuration(50))
        if clear:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            used = PLAN[(step + micro_batch) % len(PLAN)][dist.get_rank()]
            inputs = torch.randn(3, 4)
            for model in models:
                with nullcontext() if last else model.no_sync():
                    outputs = model(inputs, used)
                    sum(output.square().mean() for output in outputs).backward()
        found = found or difference(*models, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    if set_to_none and models[1].module.branches[2].weight.grad is not None:
        return "what nobody uses must keep no gradient"
    return found


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("set_to_none", "clear"), [(True, True), (False, True), (True, False)])
def test_announced_they_are_treated_as_in_torch(
    two_ranks: RankPool, as_view: bool, micro_batches: int, set_to_none: bool, clear: bool
) -> None:
    results = two_ranks.run(_train, as_view, micro_batches, set_to_none, clear)
    assert results == [None, None]


def _unused_output() -> str | None:
    models = pair(_Branches(), find_unused_parameters=True)
    found = None
    for step in range(3):
        inputs = torch.full((2, 4), float(dist.get_rank() + step + 1))
        for model in models:
            model.zero_grad()
            outputs = model(inputs, [0, 1])
            outputs[step % 2].square().mean().backward()
        found = found or difference(*models, f"step {step}")
    return found


def test_an_output_that_is_not_in_the_loss(two_ranks: RankPool) -> None:
    assert two_ranks.run(_unused_output) == [None, None]


def _error_of_the_next_forward() -> str:
    ours = DistributedDataParallel(_Branches())
    assert ours.reconfigure(Configuration(50))
    ours(torch.ones(1, 4), [0])[0].sum().backward()
    assert ours.reconfigure(Configuration(500))
    with pytest.raises(RuntimeError) as caught:
        ours(torch.ones(1, 4), [0])
    return str(caught.value)


def test_unannounced_the_next_forward_says_so_although_a_re_cut_is_due(
    two_ranks: RankPool,
) -> None:
    for message in two_ranks.run(_error_of_the_next_forward):
        assert "Expected to have finished reduction in the prior iteration" in message
        assert "find_unused_parameters=True" in message
