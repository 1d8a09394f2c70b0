"""Weights that are not plain, or take no part in a step: shared, sparse, of two dtypes, in two
wrappers, unused, frozen, or of replicas that trained apart."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _reducer_allreduce_and_upcast_hook,
)
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.reducer.offer import refusal_of
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import caps_of
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    AS_VIEW,
    BY_NODE,
    FIND,
    LEARNING_RATE,
    STATIC,
    STEPS,
    UNFINISHED,
    WIDTH,
    Recuts,
    backward,
    difference,
    failure_of,
    gist,
    inputs,
    layers,
    passes,
    recut,
    sgd,
    side_by_side,
    switched_on,
    wrapped,
)
from tests.contracts.test_tunables import failing
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def _layers(*dtypes: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out_of.weight = self.into.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out_of(torch.tanh(self.into(values)))
        return result


def tied_weights(recuts: Recuts) -> str | None:
    return side_by_side(Tied(), passes, recuts)


class TwoDtypes(nn.Module):
    """Layers of float32 and of float64 in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(torch.float32, torch.float64, torch.float32, torch.float64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values.to(layer.weight.dtype)))
        return values


def two_dtypes(recuts: Recuts, *options: str) -> str | None:
    return side_by_side(TwoDtypes(), passes, recuts, **switched_on(options))


def complex_weights(recuts: Recuts) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randn(3, WIDTH, dtype=torch.complex64)).abs().square().mean().backward()

    return side_by_side(_layers(torch.complex64, torch.complex64), train, recuts)


class Words(nn.Module):
    """An embedding with sparse gradients before a layer with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.words(indices))
        return result


def sparse_gradients(recuts: Recuts, find: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randint(40, (3, 4))).square().mean().backward()

    def without_momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), LEARNING_RATE)

    return side_by_side(
        Words(), train, recuts, optimizer_of=without_momentum, find_unused_parameters=find
    )


def weights_whose_reduction_is_delayed(recuts: Recuts) -> str | None:
    """Some gradients travel with those of another weight, outside torch's reducer."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        delayed = [(f"1.{name}", value) for name, value in module[1].named_parameters()]
        return wrapper(
            module,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=module[0].weight,
        )

    def train(wrapper: Stock, step: int) -> None:
        works = []

        def kept(*args: Any, **kwargs: Any) -> dist.Work | None:
            works.append(all_reduce(*args, **kwargs))
            return works[-1]

        with mock.patch.object(dist, "all_reduce", kept):
            passes(wrapper, step)
        # Torch itself does not wait for what it sends so; on CUDA the stream does.
        for work in works:
            if work is not None:
                work.wait()

    all_reduce = dist.all_reduce
    return side_by_side(_layers(*[torch.float32] * 3), train, recuts, wrap=wrap)


def two_wrappers_of_one_module(recuts: Recuts, as_view: bool) -> str | None:
    """Both wrap the same module, and are used in turn."""
    module = _layers(*[torch.float32] * 3)
    stock, ours = wrapped(module, gradient_as_bucket_view=as_view)
    others = (
        Stock(stock.module, gradient_as_bucket_view=as_view),
        DistributedDataParallel(ours.module, gradient_as_bucket_view=as_view),
    )
    for step in range(STEPS):
        turn = (others, (stock, ours))[step % 3 == 0]
        if recuts and step % 2 == 0:
            recut(ours, recuts, step)
            recut(others[1], recuts, step + 2)
        for wrapper in turn:
            torch.manual_seed(1000 * step + dist.get_rank())
            wrapper.zero_grad()
            passes(wrapper, step)
        found = difference(stock, ours, f"step {step}")
        if found is not None:
            return found
    return None


def _recut_under_mixed_precision() -> tuple[str, bool]:
    """With the hook alone: only a GPU can train with it."""
    model = DistributedDataParallel(_layers(torch.float32))
    model.register_comm_hook(object(), _reducer_allreduce_and_upcast_hook)
    return refusal_of(model, caps_of(model)), model.reconfigure(Configuration(bucket_bytes=1024))


def test_mixed_precision_is_not_recut(pair_of_ranks: RankPool) -> None:
    for refusal, is_recut in pair_of_ranks.run(_recut_under_mixed_precision):
        assert "wrong in the first pass" in refusal
        assert not is_recut


# Parameters that take no part in a step: unused ones, frozen ones, ones that come and go.


SOON_SECONDS = 3.0
"""Ranks that wait in vain wait so long."""


class Branches(nn.Module):
    """The second layer takes no part where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor, skip: bool) -> torch.Tensor:
        values = self.first(values)
        if not skip:
            values = self.second(values)
        result: torch.Tensor = self.last(values)
        return result


def _backward(wrapper: Stock, skip: bool) -> None:
    backward(wrapper(inputs(), skip))


def unused(
    recuts: Recuts, on_ranks: tuple[int, ...], from_step: int, set_to_none: bool, *options: str
) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper, step >= from_step and dist.get_rank() in on_ranks)

    given = switched_on((FIND, *options))
    return side_by_side(Branches(), train, recuts, set_to_none=set_to_none, **given)


def never_used(recuts: Recuts, *options: str) -> str | None:
    given = switched_on(options)
    return side_by_side(Branches(), lambda wrapper, _: _backward(wrapper, True), recuts, **given)


def unused_unexpectedly(recuts: Recuts, from_step: int) -> str | None:
    """In a step that re-cuts, in the next one where torch cuts for good, and in any other."""

    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper, step >= from_step)

    return side_by_side(Branches(), train, recuts, error=UNFINISHED)


def frozen(recuts: Recuts) -> str | None:
    model = Branches()
    model.first.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return side_by_side(model, lambda wrapper, step: _backward(wrapper, False), recuts)


def frozen_for_a_while(recuts: Recuts, find: bool, from_step: int) -> str | None:
    """After wrapping, a layer is frozen and later trains again: torch's reducer knows it."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module, find_unused_parameters=find)
        made.module.second.requires_grad_(from_step > 0)
        return made

    def train(wrapper: Stock, step: int) -> None:
        wrapper.module.second.requires_grad_(not from_step <= step < 5)
        _backward(wrapper, False)

    return side_by_side(Branches(), train, recuts, wrap=wrap, error="" if find else UNFINISHED)


def thawed(recuts: Recuts, at_step: int) -> str | None:
    """Frozen when the model was wrapped: torch's reducer never knows it, and reduces the rest."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module)
        made.module.second.requires_grad_(at_step == 0)
        return made

    def train(wrapper: Stock, step: int) -> None:
        wrapper.module.second.requires_grad_(step >= at_step)
        _backward(wrapper, False)

    model = Branches()
    model.second.requires_grad_(False)
    return side_by_side(model, train, recuts, wrap=wrap)


def critic_that_is_frozen_in_turns(recuts: Recuts) -> str | None:
    """A critic is frozen while its generator trains through it, in every step."""

    def train(critic: Stock, step: int) -> None:
        made = torch.randn(3, WIDTH, requires_grad=True)
        critic.requires_grad_(False)
        critic(made, False).mean().backward()
        critic.requires_grad_(True)
        (critic(made.detach(), False).mean() - critic(made.detach() + 1, False).mean()).backward()

    return side_by_side(Branches(), train, recuts)


def _unused_on_one_rank(recuts: Recuts, is_ours: bool) -> list[str]:
    """Rank 1 leaves a layer out in step 3: the step that fails, and how."""
    stock, ours = wrapped(Branches())

    def train(wrapper: Stock, step: int) -> None:
        loss = wrapper(torch.randn(3, WIDTH), step == 3 and dist.get_rank() == 1).mean()
        if is_ours and recuts:
            # So that one is due where the next step fails.
            recut(ours, recuts, 2 * step)
        loss.backward()

    for step in range(STEPS):
        error = failure_of(train, ours if is_ours else stock, step)
        if error is not None:
            return [str(step), gist(error)]
    return ["no step", ""]


def test_the_error_for_unused_parameters_on_one_rank() -> None:
    """The others cannot go on either, and end with an error of the process group."""
    pool = RankPool([2, 2], collective_timeout_seconds=SOON_SECONDS)
    try:
        stock = pool.run(_unused_on_one_rank, (), False)
        ours = pool.run(_unused_on_one_rank, BY_NODE, True)
    finally:
        pool.close()
    assert stock[1][0] == "4"
    assert UNFINISHED in stock[1][1]
    for ranks in (stock, ours):
        assert ranks[1] == stock[1]
        for step, error in ranks:
            assert step in ("3", "4")
            assert error.startswith("RuntimeError")


# A re-cut that one rank has no memory for, of replicas that trained apart. That all go back and
# train on in any case is in every Tunable's contract.

FAILING_STEP = 4
DEFAULT = Configuration(first_bucket_bytes=1024 * 1024)


def _cut_fails_under_decentralized() -> tuple[list[float], Configuration]:
    """How far apart the replicas are after the last steps, and what is in force."""
    torch.manual_seed(0)
    # Torch cuts a static graph's buckets after two steps, so all ranks keep the first of them.
    model = DistributedDataParallel(layers(), static_graph=True)
    optimizer = sgd(model)
    apart = []
    for step in range(FAILING_STEP + 3):
        if step == FAILING_STEP - 1:
            assert model.reconfigure(Configuration(2048, algorithm="decentralized"))
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        fails = step == FAILING_STEP and dist.get_rank() == 1
        with failing(torchs, "rebuild", 1, is_done=True) if fails else nullcontext():
            passes(model)
        optimizer.step()
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


@table(
    ("by-node", tied_weights),
    ("flat", two_dtypes, AS_VIEW),
    ("by-node", two_dtypes),
    ("flat", complex_weights),
    ("flat", sparse_gradients, True),
    ("by-node", sparse_gradients, False),
    ("flat", weights_whose_reduction_is_delayed),
    ("flat", two_wrappers_of_one_module, True),
    ("by-node", two_wrappers_of_one_module, False),
    ("flat", unused, (1,), 0, False, AS_VIEW),
    ("by-node", unused, (1,), 3, True),
    ("flat", unused, (0, 1), 3, True, AS_VIEW),
    ("by-node", unused, (0, 1, 2, 3), 0, False, AS_VIEW),
    ("flat", never_used, STATIC),
    ("by-node", never_used, "skip_all_reduce_unused_params", FIND),
    ("flat", unused_unexpectedly, 2),
    ("by-node", unused_unexpectedly, 3),
    ("by-node", frozen),
    ("flat", frozen_for_a_while, True, 0),
    ("by-node", frozen_for_a_while, False, 2),
    ("by-node", frozen_for_a_while, True, 2),
    ("flat", thawed, 0),
    ("by-node", thawed, 3),
    ("flat", critic_that_is_frozen_in_turns),
)
def test_weights_are_treated_as_by_torch(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)
