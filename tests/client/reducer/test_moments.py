"""When a change is called for does not matter: after any step, before or after a forward pass, once
or several times, the gradients are stock's to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration
from bagua_client.integrations.distributed_data_parallel import tunable_of
from tests.client.comparison import pair
from tests.ranks import RankPool

WIDTH = 16
STEPS_AFTER = 4
SMALL, LARGE = Configuration(WIDTH * WIDTH * 4), Configuration(3 * WIDTH * WIDTH * 4)
AS_IT_IS = None
"""The configuration in force: torch's reducer can stay, and gets our hook."""


def _train(changes: list[Configuration | None], after: int, in_step: bool, compiled: bool) -> bool:
    """Make the changes after so many steps, one right after the other: before the next step or,
    ``in_step``, between its forward and its backward pass. Return whether all gradients were
    stock's."""
    stock, ours = models = pair(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))))
    if compiled:
        torch._dynamo.reset()
        for model in models:
            model.module.compile(backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    same = True
    for step in range(after + STEPS_AFTER):
        inputs = torch.randn(3, WIDTH)
        if step == after and not in_step:
            _change(ours, changes)
        losses = [model(inputs).square().mean() for model in models]
        if step == after and in_step:
            _change(ours, changes)
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        same &= all(map(_is_same, stock.parameters(), ours.parameters()))
    return same and tunable_of(ours).order_is_agreed and not tunable_of(ours).observers.has_failed


def _change(ours: nn.Module, changes: list[Configuration | None]) -> None:
    for configuration in changes:
        assert ours.reconfigure(configuration or ours.configuration)
        tunable_of(ours).attach()


def _is_same(expected: nn.Parameter, actual: nn.Parameter) -> bool:
    assert expected.grad is not None
    return actual.grad is not None and torch.equal(expected.grad, actual.grad)


@pytest.mark.parametrize(
    ("changes", "in_step", "after"),
    [
        ([AS_IT_IS], False, 0),
        ([AS_IT_IS], True, 1),
        ([SMALL, LARGE], True, 0),
        ([SMALL, LARGE], False, 1),
        ([SMALL, LARGE], True, 3),
        ([AS_IT_IS, SMALL], False, 1),
        ([AS_IT_IS, SMALL], True, 3),
    ],
)
def test_changes_without_a_step_between_them(
    two_ranks: RankPool, changes: list[Configuration | None], in_step: bool, after: int
) -> None:
    assert two_ranks.run(_train, changes, after, in_step, False) == [True] * 2


def test_a_compiled_model_changed_after_its_first_step(two_ranks: RankPool) -> None:
    assert two_ranks.run(_train, [AS_IT_IS], 1, False, True) == [True] * 2
