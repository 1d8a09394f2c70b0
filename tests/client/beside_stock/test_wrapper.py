"""The class itself: its signature, ``tune`` of classes of somebody else, hooks of the training's
own, copies and checkpoints. (What its constructor refuses is in PyTorch's own tests, which ``make
upstream-ddp`` runs.)"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel, tune
from bagua_client.torch_private.wrapper import signature_of_wrapper
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    STEPS,
    WIDTH,
    Recuts,
    difference,
    layers,
    normed,
    passes,
    recut,
    sgd,
    side_by_side,
    sizes_only,
    wrapped,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def test_the_signature_is_torchs_with_two_keywords_more() -> None:
    theirs = list(inspect.signature(Stock).parameters.values())
    ours = list(inspect.signature(DistributedDataParallel).parameters.values())
    assert ours[: len(theirs)] == theirs
    added = ours[len(theirs) :]
    assert {parameter.name for parameter in added} == {"optimizers", "algorithm"}
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in added)


def positional_arguments(recuts: Recuts) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        group = dist.group.WORLD
        return wrapper(module, None, None, 0, True, True, group, 1, False, False, True)

    return side_by_side(layers(), passes, recuts, wrap=wrap)


def keyword(recuts: Recuts, name: str, value: Any) -> str | None:
    """Where this torch has it."""
    has_it = name in signature_of_wrapper().parameters
    return side_by_side(layers(), passes, recuts, **({name: value} if has_it else {}))


def device_mesh(recuts: Recuts) -> str | None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return side_by_side(layers(), passes, recuts, device_mesh=mesh)


def own_buffers(recuts: Recuts, name: str) -> str | None:
    """They stay each rank's own."""
    if name not in inspect.signature(Stock).parameters:
        return None  # forward_sync_buffers came after torch 2.11
    model = normed()
    model[1].running_mean.fill_(dist.get_rank())
    return side_by_side(model, passes, recuts, **{name: False})


def graph_called_static_after_wrapping(recuts: Recuts) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module)
        made._set_static_graph()
        return made

    return side_by_side(layers(), passes, recuts, wrap=wrap)


class Theirs(Stock):
    """A subclass of somebody's, with a forward of its own."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*inputs, **kwargs)


def tuned_in_the_middle(recuts: Recuts, made_of: type[Stock], steps: int) -> str | None:
    """After steps of torch's own, and with gradients that are there."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = made_of(module)
        for _ in range(steps):
            torch.manual_seed(dist.get_rank())
            passes(made)
        return made if wrapper is Stock else tune(made)

    return side_by_side(layers(), passes, recuts, wrap=wrap)


def _attributes() -> None:
    stock, ours = wrapped(
        layers(), bucket_cap_mb=3, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    assert isinstance(ours, Stock)
    ours_has, stock_has = vars(ours), vars(stock)
    assert set(ours_has) == set(stock_has)
    for name, value in stock_has.items():
        if isinstance(value, bool | int | float | str | None):
            assert ours_has[name] == value, name


def test_without_tuning_it_has_torchs_attributes_and_no_other(pair_of_ranks: RankPool) -> None:
    pair_of_ranks.run(_attributes)


def _identity_of_a_tuned_wrapper() -> None:
    model = Theirs(layers())
    tuned = tune(model)
    assert tuned is model
    assert tune(tuned) is model
    assert type(tuned).__name__ == "Theirs"
    assert isinstance(tuned, Theirs)
    assert isinstance(tuned, DistributedDataParallel)
    passes(tuned)
    file = io.BytesIO()
    torch.save(tuned, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(tuned),
        pickle.loads(pickle.dumps(tuned)),
        torch.load(file, weights_only=False),
    ):
        assert isinstance(twin, Theirs)
        values = torch.ones(1, WIDTH)
        with torch.no_grad():
            assert torch.equal(twin(values), tuned(values))
        passes(tune(twin))


def test_a_tuned_wrapper_is_still_of_its_class(pair_of_ranks: RankPool) -> None:
    pair_of_ranks.run(_identity_of_a_tuned_wrapper)


def _takes_nothing_else() -> None:
    others: tuple[Any, ...] = (nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)), None, 3)
    for other in others:
        with pytest.raises(TypeError, match="DistributedDataParallel"):
            tune(other)


def test_tune_takes_nothing_else_of_several_ranks(pair_of_ranks: RankPool) -> None:
    """What one process trains by itself may be any module."""
    pair_of_ranks.run(_takes_nothing_else)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        tune(None)  # type: ignore[type-var]


# Communication hooks of the training's own, registered before it and in the middle of it.


MIDDLE = 3
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def tripled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Three times the mean, so that nobody takes another's sum for it."""
    flat = bucket.buffer().mul_(3 / dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# Torch compares the annotations of a hook with types, not with their names.
tripled.__annotations__ = get_type_hints(tripled)


def python_hook(recuts: Recuts, hook: Hook, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            wrapper.register_comm_hook(None, hook)
        passes(wrapper)

    return side_by_side(layers(), train, sizes_only(recuts), rounding=torch.float16)


def refused_hook(recuts: Recuts, at_step: int) -> str | None:
    """Training goes on as it was after a hook that torch refuses for its annotation."""

    def strange(state: object, bucket: str) -> None:
        raise AssertionError("nobody calls it")

    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            with pytest.raises(ValueError, match="bucket annotation"):
                wrapper.register_comm_hook(None, strange)
        passes(wrapper)

    return side_by_side(layers(), train, recuts)


def two_hooks(recuts: Recuts) -> str | None:
    """Torch takes one only; the first one stays in force."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 0:
            wrapper.register_comm_hook(None, tripled)
        if step == 1:
            with pytest.raises(RuntimeError, match="can only be called once"):
                wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
        passes(wrapper)

    return side_by_side(layers(), train, sizes_only(recuts))


def hook_while_a_recut_is_due(recuts: Recuts) -> str | None:
    """The hook comes while buckets travel by a way of ours, or just before they would."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 2:
            wrapper.register_comm_hook(None, tripled)
        passes(wrapper)

    found = []
    for first in range(len(recuts)):
        pair = wrapped(layers())
        for step in range(5):
            if step in (0, 2):
                recut(pair[1], recuts, 2 * first + step)
            for wrapper in pair:
                torch.manual_seed(1000 * step + dist.get_rank())
                wrapper.zero_grad()
                train(wrapper, step)
            found.append(difference(*pair, f"from {recuts[first]}, step {step}"))
    return next((text for text in found if text), None)


def hook_in_cpp(recuts: Recuts, name: str, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            wrapper._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        passes(wrapper)

    return side_by_side(layers(), train, sizes_only(recuts), rounding=torch.float16)


def power_sgd(recuts: Recuts, at_step: int) -> str | None:
    """What it remembers is cut like the buckets, which therefore stay as they are."""
    stock, ours = wrapped(layers())

    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
            wrapper.register_comm_hook(state, powerSGD_hook)
        passes(wrapper)

    found = None
    for step in range(10):
        if step > at_step and step % 3 == 0:
            for configuration in sizes_only(recuts)[:1]:
                with suppress(RuntimeError):
                    if ours.reconfigure(configuration):
                        found = found or f"step {step}: the buckets would be re-cut"
        for wrapper in (stock, ours):
            torch.manual_seed(1000 * step + dist.get_rank())
            wrapper.zero_grad()
            train(wrapper, step)
        found = found or difference(stock, ours, f"step {step}")
    return found


# Copies and checkpoints of the wrapper, which other libraries make by torch's own means.


def _step(wrapper: Stock, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    passes(wrapper)
    optimizer.step()


def _train(
    stock: Stock, ours: DistributedDataParallel, recuts: Recuts, steps: int = STEPS
) -> str | None:
    optimizers = sgd(stock), sgd(ours)
    for step in range(steps):
        if recuts and step % 2 == 0:
            recut(ours, recuts, step)
        for wrapper, optimizer in zip((stock, ours), optimizers, strict=True):
            _step(wrapper, optimizer, step)
    return difference(stock, ours, "after training")


def _pickled(wrapper: Stock) -> Stock:
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    loaded: Stock = torch.load(file, weights_only=False)
    return loaded


def copied(recuts: Recuts, made: Callable[[Any], Any]) -> str | None:
    """A copy trains on like the one it was made of, and both can still be re-cut."""
    stock, ours = wrapped(normed())
    found = _train(stock, ours, recuts, steps=3)
    twins = made(stock), made(ours)
    if type(twins[1]) is not DistributedDataParallel:
        return f"the copy is a {type(twins[1])}"
    return found or _train(*twins, recuts) or _train(stock, ours, recuts)


def copied_with_a_hook(recuts: Recuts) -> str | None:
    """Torch's copies leave the hook behind."""
    stock, ours = wrapped(normed())
    for wrapper in (stock, ours):
        wrapper.register_comm_hook(None, tripled)
    found = _train(stock, ours, sizes_only(recuts[:1]), steps=2)
    twins = copy.deepcopy(stock), copy.deepcopy(ours)
    return found or _train(*twins, sizes_only(recuts[:1]))


def _zero(*modules: nn.Module) -> None:
    with torch.no_grad():
        for value in (value for module in modules for value in module.parameters()):
            value.zero_()


def distributed_checkpoints(recuts: Recuts) -> str | None:
    """What either wrapper saved by torch.distributed.checkpoint, the other one loads."""
    pair = wrapped(normed())
    found = _train(*pair, recuts, steps=4)
    both = [(wrapper, sgd(wrapper)) for wrapper in pair]
    for wrapper, optimizer in both:
        _step(wrapper, optimizer, 0)
    states = [copy.deepcopy(get_state_dict(wrapper, optimizer)) for wrapper, optimizer in both]
    plain = list(pair[0].module.state_dict())
    for wrapper, (weights, _) in zip(pair, states, strict=True):
        assert list(weights) == list(get_model_state_dict(wrapper)) == plain
    _zero(*pair)
    for (wrapper, optimizer), (weights, moments) in zip(both, reversed(states), strict=True):
        # It puts names of its own into the state that it is given.
        set_model_state_dict(wrapper, copy.copy(weights))
        set_state_dict(wrapper, optimizer, model_state_dict=weights, optim_state_dict=moments)
        _step(wrapper, optimizer, 1)
    if not all(bool(value.any()) for value in pair[1].parameters()):
        return "nothing was loaded"
    return found or difference(*pair, "after loading") or _train(*pair, recuts)


def plain_states(recuts: Recuts) -> str | None:
    """Alone and inside a larger module."""
    stock, ours = wrapped(normed())
    found = _train(stock, ours, recuts, steps=4)
    larger = [nn.ModuleDict({"part": wrapper, "head": normed()}) for wrapper in (stock, ours)]
    assert list(larger[0].state_dict()) == list(larger[1].state_dict())
    assert list(stock.state_dict()) == list(ours.state_dict())
    saved = copy.deepcopy([module.state_dict() for module in larger])
    _zero(*larger)
    larger[0].load_state_dict(saved[1])
    larger[1].load_state_dict(saved[0])
    if not all(bool(value.any()) for value in ours.parameters()):
        return "nothing was loaded"
    larger[1]["head"] = larger[0]["head"]
    return found or difference(*larger, "loaded") or _train(stock, ours, recuts)


@table(
    ("flat", positional_arguments),
    ("flat", keyword, "batched_grad_copy", True),
    ("flat", keyword, "bucket_cap_mb", 0.001),
    ("flat", keyword, "bucket_cap_mb_list", [1, 2]),
    ("flat", keyword, "lazy_bucket_allocation", True),
    ("flat", device_mesh),
    ("flat", own_buffers, "broadcast_buffers"),
    ("flat", own_buffers, "forward_sync_buffers"),
    ("flat", own_buffers, "init_sync"),
    ("flat", graph_called_static_after_wrapping),
    ("flat", tuned_in_the_middle, Stock, 0),
    ("flat", tuned_in_the_middle, Theirs, 3),
    ("flat", python_hook, tripled, 0),
    ("flat", python_hook, default_hooks.fp16_compress_hook, MIDDLE),
    ("by-node", refused_hook, MIDDLE),
    ("flat", two_hooks),
    ("flat", hook_while_a_recut_is_due),
    ("by-node", hook_while_a_recut_is_due),
    ("flat", hook_in_cpp, "ALLREDUCE", MIDDLE),
    ("flat", hook_in_cpp, "FP16_COMPRESS", 0),
    ("flat", power_sgd, 0),
    ("by-node", power_sgd, MIDDLE),
    ("flat", copied, copy.deepcopy),
    ("flat", copied, _pickled),
    ("flat", copied_with_a_hook),
    ("flat", distributed_checkpoints),
    ("flat", plain_states),
)
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
def test_what_torchs_class_does_ours_does(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)
