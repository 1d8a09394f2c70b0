"""Steps that a training writes in its own way: blocks called by themselves, optimizers inside the
backward pass, weights read and set block by block. All compute what they do without ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import bagua_client
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.sharded import settings
from tests.client.sharded.models import MERGES
from tests.ranks import RankPool

WIDTH = 8
Loop = Callable[[Any, torch.optim.Optimizer, int], list[Any]]
"""Makes a step of a model with this number, by an optimizer of all its parameters."""
ALL_KEPT = {"kept_units": 9}
ALL_AS_ONE = {"bucket_bytes": 10_000}
SOME_AS_ONE = {"bucket_bytes": 1200, "kept_units": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.inner(torch.tanh(self.outer(values)))


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.skipped = -1
        self.is_checkpointed = is_checkpointed
        if not is_checkpointed:
            self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            for place in (0, 2):
                pair = nn.Sequential(*self.blocks[place : place + 2])
                values = checkpoint(pair, values, use_reentrant=True)
            return values
        for place, block in enumerate(self.blocks):
            if place != self.skipped:
                values = block(values)
        return self.head(values.to(self.head.weight.dtype))

    def generate(self, values: torch.Tensor) -> torch.Tensor:
        return self.forward(self.forward(values))


def sharded(
    is_nested: bool = False, is_rough: bool = False, is_checkpointed: bool = False, **kept: Any
) -> Any:
    """Rough blocks compute with 16 bits, and the model that they are in with 32."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if is_rough else None
    model = Net(is_checkpointed)
    for block in model.blocks:
        if is_nested:
            fully_shard(block.inner)
        fully_shard(block, mp_policy=MixedPrecisionPolicy(dtype, output_dtype=dtype), **kept)
    return fully_shard(model)


def inputs(step: int, rows: int = 4) -> torch.Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, WIDTH)


def loss_of(model: Any, step: int, rows: int = 4) -> torch.Tensor:
    loss: torch.Tensor = model(inputs(step, rows)).square().mean()
    return loss


def stepped(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> list[Any]:
    """The loss, and the gradients' norms, after an optimizer's step."""
    loss.backward()  # type: ignore[no-untyped-call]
    norms = [None if p.grad is None else p.grad.full_tensor().norm() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), *(norm if norm is None else norm.item() for norm in norms)]


def steps_in_backward(model: Any, _: torch.optim.Optimizer, number: int) -> list[Any]:
    if not number:
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def update(parameter: torch.nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for each in optimizers:
            each.register_post_accumulate_grad_hook(update)
    loss = loss_of(model, number)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.item()]


def trains_a_block_alone(
    model: Any, optimizer: torch.optim.Optimizer, number: int, is_first: bool = False
) -> list[Any]:
    alone = loss_of(model.blocks[2], number, rows=3) if is_first and number else None
    loss = loss_of(model, number)
    if is_first:
        return stepped(model, optimizer, loss if alone is None else loss + alone)
    found = stepped(model, optimizer, loss)
    with torch.no_grad():
        model.blocks[1](inputs(number))
    return found + stepped(model, optimizer, loss_of(model.blocks[2], number, rows=3))


def validates_carelessly(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """Without no_grad. Then weights are clamped, frozen and listed block by block."""
    found = stepped(model, optimizer, loss_of(model, number))
    loss = loss_of(model, 99)
    weights = [each.full_tensor().norm().item() for each in model.blocks[3].parameters()]
    model.blocks[number % 3].requires_grad_(number % 2 == 0)
    with torch.no_grad():
        for each in model.blocks[0].parameters():
            each.clamp_(-0.1, 0.1)
    return [*found, loss.item(), *weights]


def freezes_before_backward(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """On one rank another optimizer steps meanwhile."""
    loss = loss_of(model, number)
    model.blocks[1].requires_grad_(number % 2 == 0)
    if dist.get_rank() == 0:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.SGD([weight], lr=0.1).step()
    return stepped(model, optimizer, loss)


def sets_weights(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """By hand, after a forward pass that no backward pass follows; gradients accumulate."""
    model.set_reshard_after_backward(False)
    loss_of(model, number + 50).backward()  # type: ignore[no-untyped-call]
    found = [loss_of(model, 99).item()]
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.01)
    found += [loss_of(model.blocks[1], 98).item(), loss_of(model, 99).item()]
    model.set_reshard_after_backward(True)
    return found + stepped(model, optimizer, loss_of(model, number))


def checkpoints_pairs(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    return stepped(model, optimizer, model(inputs(number).requires_grad_()).square().mean())


def generates(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    if not number:
        register_fsdp_forward_method(model, "generate")
    found = stepped(model, optimizer, loss_of(model, number))
    with torch.no_grad():
        found.append(model.generate(inputs(number)).sum().item())
        for block in model.blocks:
            for each in block.parameters():
                each.mul_(0.99)
        found.append(model.generate(inputs(number)).sum().item())
    return found


def gathers_ahead(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """Before the model's forward pass begins, in which a change takes hold."""
    for block in model.blocks:
        block.unshard(async_op=True)
    return stepped(model, optimizer, loss_of(model, number))


def drops_layers(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    model.skipped = number % 3 if number > 4 else -1
    return stepped(model, optimizer, loss_of(model, number))


def differs(loop: Loop, changes: dict[int, dict[str, Any]], **kind: Any) -> list[int]:
    """The steps that compute something else with ours, on this rank. Called on all ranks."""
    found: list[list[Any]] = []
    for is_ours in (False, True):
        model = bagua_client.tune(sharded(**kind)) if is_ours else sharded(**kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append([])
        for number in range(9):
            if is_ours and number == 1:
                tunable_of(model)  # It looks at the steps from here on.
            if is_ours and number in changes:
                _change(model, **changes[number])
            found[-1].append(loop(model, optimizer, number))
        state = model.state_dict()
        found[-1].append([state[name].full_tensor().tolist() for name in sorted(state)])
    return [number for number, pair in enumerate(zip(*found, strict=True)) if pair[0] != pair[1]]


def _change(model: Any, kept_units: int = 0, **others: Any) -> None:
    """As many kept as there may be."""
    tunable = tunable_of(model)
    kept = min(kept_units, sum(unit.given.mesh_kept is not None for unit in tunable.units))
    assert model.reconfigure(replace(tunable.default, kept_units=kept, **others))


@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        (steps_in_backward, {"is_nested": True}),
        (sets_weights, {}),
        pytest.param(validates_carelessly, {}, marks=pytest.mark.slow),
        pytest.param(trains_a_block_alone, {}, marks=pytest.mark.slow),
        pytest.param(generates, {}, marks=pytest.mark.slow),
        pytest.param(freezes_before_backward, {}, marks=pytest.mark.slow),
        pytest.param(checkpoints_pairs, {"is_checkpointed": True}, marks=pytest.mark.slow),
    ],
)
def test_with_kept_units(two_ranks: RankPool, loop: Loop, kind: dict[str, Any]) -> None:
    changes = {3: ALL_KEPT, 6: {}, 7: ALL_KEPT}
    assert two_ranks.run(partial(differs, loop, changes, **kind)) == [[], []]


trains_a_block_first = partial(trains_a_block_alone, is_first=True)
MERGED = {
    "alone": (trains_a_block_alone, SOME_AS_ONE),
    "first": (trains_a_block_first, {**ALL_AS_ONE, **ALL_KEPT}),
    "validates": (validates_carelessly, SOME_AS_ONE),
    "generates": (generates, {**ALL_AS_ONE, **ALL_KEPT}),
    "freezes": (freezes_before_backward, SOME_AS_ONE),
    "ahead": (gathers_ahead, SOME_AS_ONE),
}
QUICK = [("alone", True), ("first", True)]


@MERGES
@pytest.mark.parametrize(
    ("name", "is_all"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in product(MERGED, (True, False))
    ],
)
def test_with_merged_units(two_ranks: RankPool, name: str, is_all: bool) -> None:
    loop, change = MERGED[name]
    change = ALL_AS_ONE if is_all else change
    assert two_ranks.run(differs, loop, {4: change, 6: {}, 7: change}) == [[], []]


@MERGES
@pytest.mark.parametrize("change", [ALL_AS_ONE, {**ALL_AS_ONE, **ALL_KEPT}])
def test_checkpoints_over_merged_units(two_ranks: RankPool, change: dict[str, Any]) -> None:
    run = partial(differs, checkpoints_pairs, {4: change}, is_checkpointed=True)
    assert two_ranks.run(run) == [[], []]


@MERGES
def test_blocks_with_an_output_type_of_their_own_are_skipped_in_some_steps(
    two_ranks: RankPool,
) -> None:
    run = partial(differs, drops_layers, {4: ALL_AS_ONE}, is_rough=True)
    assert two_ranks.run(run) == [[], []]


def _unlike_others() -> tuple[bool, str]:
    """Whether all is known of a model whose weights cannot be looked at; why nothing is kept."""
    model: Any = bagua_client.tune(sharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(settings, "checksums", side_effect=NotImplementedError):
        for step in range(5):
            for _ in range(2):
                loss_of(model, step).backward()
            optimizer.step()
            tunable_of(model)
    found = tunable_of(model)
    return found.order_is_agreed, found.offer.table()["kept_over_micro_batches"].cannot("on")


def test_weights_that_cannot_be_looked_at_stop_no_training(two_ranks: RankPool) -> None:
    expected = True, "the weights are of a kind that cannot be looked at"
    assert two_ranks.run(_unlike_others) == [expected] * 2


def _known_in_backward() -> tuple[bool, list[Any]]:
    """Whether all is known of a model whose optimizers step in the backward pass, after few steps;
    and what may be kept over its micro-batches."""
    model: Any = bagua_client.tune(sharded(is_nested=True))
    for number in range(6):
        steps_in_backward(model, torch.optim.SGD(model.parameters()), number)
        tunable = tunable_of(model)
    offer = tunable.offer
    return tunable.order_is_agreed, [*offer.values().get("kept_over_micro_batches", ())]


def test_nothing_is_kept_over_micro_batches_if_optimizers_step_in_the_backward_pass(
    two_ranks: RankPool,
) -> None:
    assert two_ranks.run(_known_in_backward) == [(True, [])] * 2


def _ranks_after_a_validation() -> int:
    """Over how many ranks the tuner takes the model's parts to be spread, after one pass for
    training. Each rank comes from a validation, in which torch spread them over two."""
    model = bagua_client.tune(sharded(reshard_after_forward=2))
    with torch.no_grad():
        model(inputs(0))
    loss_of(model, 1).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model(inputs(0))
    return min(dist.get_world_size(unit.own_group) for unit in tunable_of(model).units)


def test_a_model_that_was_validated_first_is_spread_over_all_its_ranks(
    four_ranks: RankPool,
) -> None:
    assert four_ranks.run(_ranks_after_a_validation) == [4] * 4
