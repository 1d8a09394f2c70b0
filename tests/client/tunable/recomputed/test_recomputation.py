"""Which blocks of a model can be switched, why others cannot, and what they keep."""

from __future__ import annotations

import copy
import io
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bagua_client.tunable.looks import Observers
from bagua_client.tunable.recomputation import NO_ROOM, Recomputation
from tests.client.sharded.models import MERGES
from tests.client.tunable.recomputed.models import (
    BLOCKS,
    WIDTH,
    Kind,
    Net,
    OfOlderTransformers,
    differs,
)
from tests.integrations.arms import needs

MIB = 2**20
ONCE = Kind(every=0, dropout=0.0)
"""Nothing is recomputed."""


def seen(
    model: nn.Module,
    step: Callable[[nn.Module], object] = lambda model: model(torch.randn(6, WIDTH)),
    allocated_bytes: Callable[[], int] | None = None,
    fits: Callable[[], bool] = lambda: True,
) -> Recomputation:
    """What is known of a model after its first steps."""
    observers = Observers()
    found = Recomputation(model, observers, allocated_bytes, fits)
    for _ in range(3):
        result = step(model)
        result.square().mean().backward()
    found.conclude()
    assert not observers.has_failed
    return found


def own(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def on_the_host(model: nn.Module) -> torch.Tensor:
    with save_on_cpu():
        return model(torch.randn(6, WIDTH))


def without_gradients(kind: Kind) -> nn.Module:
    model = Net(kind)
    model.first.requires_grad_(False)
    return model


def with_own(function: Any) -> nn.Module:
    model = Net(Kind(every=0))
    for place in (1, 3):
        model.blocks[place] = checkpoint_wrapper(model.blocks[place], checkpoint_fn=function)
    return model


class Counting(nn.Module):
    """Counts what it is given in a buffer, which it replaces."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(values)
        found: torch.Tensor = self.inner(values)
        return found


class HalvedCounts(Counting):
    """As torchtitan's experts, which take it that a wrapper has them counted twice."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += len(values) / 2
        found: torch.Tensor = self.inner(values)
        return found


REENTRANT = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)


class Changing(nn.Module):
    """A block that changes something of its own, or of the process, in each pass."""

    def __init__(self, inner: nn.Module, change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.inner, self.change = inner, change
        self.passes, self.generator = 0, torch.Generator()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.change(self, values)
        found: torch.Tensor = self.inner(values)
        return found


def averaged(self: Any, values: torch.Tensor) -> None:
    self.mean.data.mul_(0.9).add_(values.detach().mean(0))


def averaged_in_weights(self: Any, values: torch.Tensor) -> None:
    self.frozen.data.mul_(0.9).add_(values.detach().mean(0))


def counted(self: Any, _: torch.Tensor) -> None:
    self.passes += 1


def drawn_by_python(*_: Any) -> None:
    random.random()


def drawn_by_a_generator(self: Any, _: torch.Tensor) -> None:
    torch.rand(2, generator=self.generator)


def auxiliary(self: Any, values: torch.Tensor) -> None:
    self.loss = self.inner.weight.sum() if hasattr(self.inner, "weight") else values.sum()


class Inside(nn.Module):
    """Gives its output in something else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> Any:
        found = self.inner(values)
        return found, {"auxiliary": found.sum()}


class GivesInside(Net):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values, _ = block(values)
        found: torch.Tensor = self.last(values)
        return found


def listened_to() -> nn.Module:
    model = with_blocks(REENTRANT)
    for block in model.blocks:
        next(block.children()).register_forward_hook(lambda *_: None)
    return model


def giving_inside() -> nn.Module:
    model = GivesInside(ONCE)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = REENTRANT(Inside(block))
    return model


def called_twice(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = with_blocks(wrap)
    model.blocks.extend([*model.blocks])
    return model


def sharing_weights() -> nn.Module:
    model = with_blocks(REENTRANT)
    model.blocks[0].up.weight = model.blocks[3].up.weight
    return model


class Looped(Net):
    """Calls its blocks once, then twice, then three times."""

    times = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values, self.times = self.first(values), self.times + 1
        for block in self.times * [*self.blocks]:
            values = block(values)
        found: torch.Tensor = self.last(values)
        return found


def with_blocks(wrap: Callable[[nn.Module], nn.Module], kind: Kind = ONCE) -> nn.Module:
    model = Net(kind)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = wrap(block)
    return model


class OwnCode(Net):
    """Calls torch's function itself, for so many blocks at once, as timm does."""

    at_once = 1

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for place in range(0, BLOCKS, self.at_once):
            run = nn.Sequential(*self.blocks[place : place + self.at_once]).forward
            values = checkpoint(lambda x, run=run: run(x), values, use_reentrant=False)
        found: torch.Tensor = self.last(values)
        return found


class InGroups(OwnCode):
    at_once = 2


def as_a_whole(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = checkpoint(model, torch.randn(6, WIDTH), use_reentrant=False)
    return found


def as_a_whole_reentrant(model: nn.Module) -> torch.Tensor:
    values = torch.randn(6, WIDTH, requires_grad=True)
    found: torch.Tensor = checkpoint(model, values, use_reentrant=True)
    return found


def of_older_transformers(function: Any) -> nn.Module:
    model = OfOlderTransformers(Kind("older transformers"))
    model._gradient_checkpointing_func = function
    return model


def compiled_outside(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = torch.compile(model, backend="eager")(torch.randn(6, WIDTH))
    return found


def half_offloaded() -> nn.Module:
    model = Net(Kind(every=2))
    model.blocks[1] = offload_wrapper(model.blocks[1])
    return model


def compiled() -> nn.Module:
    model = Net(Kind())
    model.compile(backend="eager")
    return model


LEFT_ALONE: Mapping[str, tuple[Callable[[], nn.Module], Callable[..., Any] | None, str]] = {
    "other random numbers": (lambda: Net(Kind("random state lost")), None, "preserve_rng_state"),
    "buffers": (lambda: Net(Kind(norm=True)), None, "blocks write buffers"),
    "not trained": (lambda: without_gradients(Kind("reentrant")), None, "requires a gradient"),
    "host's memory": (lambda: Net(Kind()), on_the_host, "kept elsewhere"),
    "offloaded blocks": (half_offloaded, None, "kept elsewhere"),
    "buffers replaced": (
        lambda: with_blocks(lambda each: checkpoint_wrapper(Counting(each))),
        None,
        "blocks write buffers",
    ),
    "counts of experts": (
        lambda: with_blocks(lambda each: checkpoint_wrapper(HalvedCounts(each))),
        None,
        "blocks write buffers",
    ),
    **{
        change.__name__: (
            lambda wrap=wrap, change=change: with_blocks(lambda e: wrap(Changing(e, change))),
            None,
            why,
        )
        for change, wrap, why in (
            (averaged, checkpoint_wrapper, "blocks change attributes, buffers"),
            (averaged_in_weights, composable, "frozen weights"),
            (counted, checkpoint_wrapper, "blocks change attributes"),
            (drawn_by_python, checkpoint_wrapper, "does not put back"),
            (drawn_by_a_generator, composable, "does not put back"),
            (auxiliary, REENTRANT, "blocks change attributes"),
        )
    },
    "read by a hook": (listened_to, None, "or a hook in it reads"),
    "given inside of something": (giving_inside, None, "besides its output"),
    "reentrant, called twice": (lambda: called_twice(REENTRANT), None, "in another order"),
    "reentrant, sharing weights": (sharing_weights, None, "in another order"),
    "called more and more often": (lambda: Looped(Kind()), None, "differs from pass to pass"),
    "host's memory, composable": (lambda: Net(Kind("composable")), on_the_host, "kept elsewhere"),
    "the model's own code": (lambda: OwnCode(ONCE), None, "the model's own code recomputes"),
    "own code, in groups": (lambda: InGroups(ONCE), None, "the model's own code recomputes"),
    "all of it": (lambda: Net(Kind()), as_a_whole, "recomputes the model as a whole"),
    "all of it, reentrant": (lambda: Net(Kind()), as_a_whole_reentrant, "the model as a whole"),
    "in an older model": (lambda: of_older_transformers(own), None, "by own, which is not torch's"),
    "compiled from outside": (
        lambda: Net(Kind()),
        compiled_outside,
        "the whole model may be compiled",
    ),
    "another's function": (lambda: with_own(own), None, "recomputed by own, which is not torch's"),
    "compiled as one": (compiled, None, "the whole model is compiled"),
}


@pytest.mark.parametrize(("make", "step", "why"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_would_change_numbers_is_left_alone_with_the_reason(
    make: Callable[[], nn.Module], step: Callable[..., Any] | None, why: str
) -> None:
    limit = seen(make(), *([step] if step else [])).limit(None)
    assert not limit.values
    assert why in limit.left_alone


@dataclass
class Unset:
    values: Any = field(init=False)


class WithMore(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor, more: Unset) -> torch.Tensor:
        found: torch.Tensor = self.inner(values)
        return found


class GivingMore(Net):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values, Unset())
        found: torch.Tensor = self.last(values)
        return found


def test_what_cannot_be_looked_at_is_left_alone_and_trained() -> None:
    model = GivingMore(ONCE)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = REENTRANT(WithMore(block))
    limit = seen(model).limit(None)
    assert not limit.values
    assert "not every block" in limit.left_alone


def test_another_forward_of_a_part_that_knows_no_more_than_the_part_is_no_reason() -> None:
    model = with_blocks(REENTRANT)
    for block in model.blocks:
        part: Any = next(iter(block.children()))
        part.forward = MethodType(type(part).forward, part)
    assert seen(model).limit(None).values


def test_frozen_weights_that_are_no_numbers_are_equal() -> None:
    model = with_blocks(lambda each: checkpoint_wrapper(Changing(each, lambda *_: None)))
    for name, parameter in model.named_parameters():
        if name.endswith("frozen"):
            parameter.data.fill_(float("nan"))
    assert seen(model).limit(None).values


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, composable, REENTRANT])
def test_what_blocks_set_once_or_only_show_is_no_reason(wrap: Any) -> None:
    def shown(self: Any, values: torch.Tensor) -> None:
        self.longest = max(getattr(self, "longest", 0), len(values))
        if wrap is not REENTRANT:
            auxiliary(self, values)

    assert seen(with_blocks(lambda each: wrap(Changing(each, shown)))).limit(None).values


def test_a_pass_without_gradients_says_nothing_of_reentrant_blocks() -> None:
    def step(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            model(torch.randn(6, WIDTH))
        found: torch.Tensor = model(torch.randn(6, WIDTH))
        return found

    assert seen(Net(Kind("reentrant")), step).limit(None).values


def test_a_reentrant_block_that_is_kept_is_trained_only_where_torch_would() -> None:
    model = Net(Kind("reentrant"))
    found = seen(model)
    found.put(0)
    model.zero_grad()
    model.first.requires_grad_(False)
    model(torch.randn(6, WIDTH)).square().mean().backward()
    assert all(each.grad is None for each in model.blocks.parameters())
    assert model.last.weight.grad is not None


def test_where_the_training_turns_recomputing_off_and_on_again_it_is_kept() -> None:
    model = OfOlderTransformers(Kind("older transformers"))
    given = model._gradient_checkpointing_func
    found = seen(model)
    found.put(1)
    model._gradient_checkpointing_func = given
    model(torch.randn(6, WIDTH)).square().mean().backward()
    assert model._gradient_checkpointing_func is not given
    # Another one is the training's own, and stays.
    model._gradient_checkpointing_func = other = partial(checkpoint, use_reentrant=True)
    for count in (2, BLOCKS):
        found.put(count)
        model(torch.randn(6, WIDTH)).square().mean().backward()
        assert model._gradient_checkpointing_func is other


@pytest.mark.parametrize("way", ["wrapper", "reentrant", "selective", "to the end", "composable"])
def test_blocks_that_the_training_left_alone_are_left_alone(way: str) -> None:
    model = Net(Kind(way, every=2))
    names = list(model.state_dict())
    found = seen(model)
    assert len(found) == BLOCKS // 2
    assert list(found.limit(None).values) == [2, 1, 0]
    found.put(0)
    assert "2" in found.limit(None).cannot(3)
    assert list(model.state_dict()) == names


def test_a_model_that_recomputes_nothing_has_nothing_to_say() -> None:
    model = Net(ONCE)
    found = seen(model)
    assert (found.limit(None).values, found.limit(None).left_alone) == ([], "")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_is_recomputed_inside_of_a_block_stays_as_it_is() -> None:
    found = seen(Net(Kind(inner="nested")))
    assert (len(found), list(found.limit(None).values)) == (BLOCKS, [4, 3, 2, 1, 0])


def test_what_the_training_hangs_on_a_kept_block_is_called_once() -> None:
    model, calls = Net(Kind(dropout=0.0)), []
    for number, block in enumerate(model.blocks):
        inner = block._checkpoint_wrapped_module
        inner.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    found = seen(model)
    found.put(1)
    calls.clear()
    model(torch.randn(6, WIDTH)).square().mean().backward()
    assert sorted(calls) == [0, 0, 1, 2, 3]


def test_nothing_can_be_set_before_it_is_known_what_forbids_it() -> None:
    found = Recomputation(Net(Kind()), Observers())
    assert "after the first steps" in found.limit(None).cannot(0)
    assert not found.limit(None).values
    assert found.limit(None).cannot(BLOCKS) == ""


@pytest.mark.parametrize("way", ["wrapper", "composable", "reentrant", "older transformers"])
def test_by_default_blocks_are_as_the_training_made_them_and_once_forgotten_all(
    way: str,
) -> None:
    model = (OfOlderTransformers if way.startswith("older") else Net)(Kind(way))

    def state_of(module: nn.Module) -> dict[str, Any]:
        return {name: dict(v) if isinstance(v, dict) else v for name, v in vars(module).items()}

    before = {module: state_of(module) for module in model.modules()}

    def assert_untouched(modules: Iterable[nn.Module]) -> None:
        for module in modules:
            now, was = state_of(module), before[module]
            assert now.keys() == was.keys()
            assert all(now[name] is value or now[name] == value for name, value in was.items())

    found = seen(model)
    assert_untouched(model.blocks.modules())
    found.put(1)
    found.forget()
    assert_untouched(model.modules())


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_with_what_recomputes_it_16_bits_are_only_tried_if_allowed(autocast: bool) -> None:
    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            found: torch.Tensor = model(torch.randn(6, WIDTH))
        return found

    limit = seen(Net(Kind(compiles="around")), step).limit(None)
    assert bool(limit.changes) == autocast
    assert limit.values


# What they keep.


class Paper(TorchDispatchMode):
    """A CPU's memory, as far as it is allocated inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def now(self) -> int:
        return self.now_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self._hold(each.untyped_storage())
        return found

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = id(storage), storage.nbytes()
        if (known := self._held.get(key)) is not None and known() is storage:
            return

        def freed(_: object) -> None:
            self.now_bytes -= size_bytes

        self._held[key] = weakref.ref(storage, freed)
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


@pytest.mark.parametrize("way", ["wrapper", "composable", "reentrant", "to the end"])
def test_the_peak_is_predicted_before_it_is_tried(way: str) -> None:
    torch.manual_seed(0)
    model = Net(Kind(way, dropout=0.0), width=256)

    def step(model: nn.Module) -> torch.Tensor:
        return model(torch.randn(1024, 256))

    def peak(count: int) -> int:
        found.put(count)
        with Paper() as paper:
            step(model).square().mean().backward()
            model.zero_grad()
        return paper.peak_bytes

    with Paper() as paper:
        found = seen(model, step, paper.now)
    model.zero_grad()
    default = peak(BLOCKS)
    one = found.kept_bytes(BLOCKS - 1)
    assert one > MIB
    for count in range(BLOCKS):
        predicted = default + found.kept_bytes(count)
        assert predicted - 1.5 * one <= peak(count) <= predicted, count


def test_as_few_are_recomputed_as_fit() -> None:
    torch.manual_seed(0)
    model = Net(Kind(dropout=0.0), width=256)
    with Paper() as paper:
        found = seen(model, lambda model: model(torch.randn(1024, 256)), paper.now)
    one = found.kept_bytes(BLOCKS - 1)
    assert list(found.limit(2 * one).values) == [4, 3, 2]
    full = found.limit(one - 1)
    assert (list(full.values), full.left_alone) == ([4], f"recomputed blocks: {NO_ROOM}")
    assert list(found.limit(-one).values) == [4]
    assert list(found.limit(None).values) == [4, 3, 2, 1, 0]


def test_what_a_block_keeps_in_all_its_calls_of_a_pass_is_predicted() -> None:
    found = []
    for make in (with_blocks, called_twice):
        paper = Paper()
        with paper:
            known = seen(make(checkpoint_wrapper), allocated_bytes=paper.now)
        found.append(known.kept_bytes(0))
    assert found[1] == 2 * found[0] > 0


def test_a_larger_batch_than_any_seen_is_recomputed_and_the_next_one_is_not() -> None:
    model = Net(Kind(dropout=0.0), width=256)
    paper, does_fit = Paper(), True

    def step(rows: int) -> int:
        """How many blocks ran again."""
        count = 0

        def ran(*_: Any) -> None:
            nonlocal count
            count += 1

        handles = [block.up.register_forward_hook(ran) for block in model.blocks]
        with paper:
            model(torch.randn(rows, 256)).square().mean().backward()
        for handle in handles:
            handle.remove()
        return count - BLOCKS

    with paper:
        found = seen(model, lambda model: model(torch.randn(64, 256)), paper.now, lambda: does_fit)
    before = found.kept_bytes(0)
    found.put(1)
    assert step(64) == 1
    assert (step(65), found.was_held_back) == (BLOCKS, True)
    assert found.kept_bytes(0) > before, "and what it would keep is known now"
    assert step(65) == 1
    assert step(32) == 1
    with torch.no_grad():
        model(torch.randn(100, 256))
    model.eval()
    assert step(100) == BLOCKS, "as in an evaluation that remembers what it computes"
    model.train()
    assert step(100) == 1
    does_fit = False
    assert step(110) == step(110) == step(32) == BLOCKS, "until it is known to fit"
    does_fit = True
    assert step(110) == 1


class Chosen(nn.Module):
    """Rows come to it at random, as to the experts of one rank of several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = (torch.rand(len(values)) < 0.5).nonzero()[:, 0]
        found: torch.Tensor = values.index_add(0, rows, self.inner(values[rows]))
        return found


@pytest.mark.parametrize("varies", [False, True])
def test_where_what_is_kept_varies_there_is_room_for_another_block(varies: bool) -> None:
    torch.manual_seed(0)
    model = Net(ONCE, width=64)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(Chosen(block) if varies else block)
    paper = Paper()
    with paper:
        found = seen(model, lambda model: model(torch.randn(64, 64)), paper.now)
    last = found._blocks[-1].kept_bytes
    assert found.kept_bytes(BLOCKS - 1) == (1 + varies) * last > 0
    assert found.kept_bytes(BLOCKS) == 0


def test_a_batch_whose_size_cannot_be_seen_is_left_alone() -> None:
    class Batch:
        values = torch.randn(6, WIDTH)

    model, paper = Net(Kind(dropout=0.0)), Paper()
    unpacks = nn.Module()
    unpacks.model = model
    unpacks.forward = lambda batch: model(batch.values)
    with paper:
        found = seen(unpacks, lambda model: model(Batch()), paper.now)
    assert "how large a batch is" in found.limit(None).left_alone


def test_passes_that_are_open_at_once_are_taken_into_account() -> None:
    model = Net(Kind(dropout=0.0), width=256)

    def step(model: nn.Module, passes: int = 1) -> torch.Tensor:
        return sum(model(torch.randn(64, 256)) for _ in range(passes))

    paper = Paper()
    with paper:
        one = seen(model, step, paper.now)
        kept_bytes = one.kept_bytes(0)
        one.forget()
        two = seen(model, partial(step, passes=2), paper.now)
        assert two.kept_bytes(0) == pytest.approx(2 * kept_bytes, rel=0.1)
        two.put(0)
        step(model, 2).sum().backward()
        assert not two.was_held_back
        step(model, 3).sum().backward()
        assert two.was_held_back
        assert two.kept_bytes(0) == pytest.approx(3 * kept_bytes, rel=0.1)


@pytest.mark.parametrize("way", ["wrapper", "reentrant", "older transformers"])
@pytest.mark.parametrize("is_watched", [True, False])
def test_copies_and_pickles_of_the_model_hold_nothing_of_ours(way: str, is_watched: bool) -> None:
    model = (OfOlderTransformers if way.startswith("older") else Net)(Kind(way, dropout=0.0))
    found = Recomputation(model, Observers(), lambda: 0)
    values = torch.randn(6, WIDTH)
    expected = model(values)
    if not is_watched:
        found.conclude()
        found.put(0)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"bagua_client" not in file.getvalue()
    file.seek(0)
    for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(each(values), expected)
        assert not seen(each).limit(None).left_alone


# Losses, states and random numbers are those of an untouched model, bit for bit, however many
# blocks are recomputed from one step to the next.


UNITS: tuple[Mapping[str, Any], ...] = (
    {"kept_units": 3},
    {"bucket_bytes": 2**20},
    {"kept_units": 4, "bucket_bytes": 2**20, "channels": 2},
    {},
)
OVER_MICRO_BATCHES: tuple[Mapping[str, Any], ...] = (
    {"kept_units": 4, "kept_over_micro_batches": "on"},
    {},
)
BUCKETS: tuple[Mapping[str, Any], ...] = ({"bucket_bytes": 400}, {"channels": 2}, {})
KINDS: Mapping[str, tuple[Kind, str]] = {
    # In what way they are recomputed.
    "wrapper": (Kind(), "alone replicated sharded copies"),
    "reentrant": (Kind("reentrant"), "alone replicated sharded"),
    "selective": (Kind("selective"), "alone sharded"),
    "to the end": (Kind("to the end"), "alone replicated"),
    "composable": (Kind("composable"), "alone replicated sharded"),
    "no dropout": (Kind("random state lost", dropout=0.0), "alone"),
    "older transformers": (Kind("older transformers"), "alone replicated sharded"),
    "older, reentrant": (Kind("older transformers, reentrant"), "alone"),
    "gpt2": (Kind("gpt2"), "replicated sharded"),
    "gpt2 reentrant": (Kind("gpt2 reentrant"), "alone"),
    "llama reentrant": (Kind("llama reentrant"), "sharded"),
    "mixtral": (Kind("mixtral"), "alone"),
    "peft": (Kind("llama reentrant", inner="lora"), "alone"),
    # What is in the blocks.
    "lora": (Kind(inner="lora"), "alone replicated sharded"),
    "lora, reentrant": (Kind("reentrant", inner="lora"), "alone replicated"),
    "experts": (Kind(inner="experts"), "alone replicated sharded"),
    "nested": (Kind(inner="nested"), "alone sharded"),
    "frozen and tied": (Kind(frozen=True, tied=True), "replicated sharded"),
    "compiled inside": (Kind(compiles="inside"), "alone sharded"),
    "compiled around": (Kind(compiles="around"), "alone replicated"),
    # How they are trained.
    "micro-batches, clipped": (
        Kind(micro_batches=3, clips=True),
        "alone replicated sharded copies",
    ),
    "autocast": (Kind(autocast=True), "alone replicated"),
    "evaluation in between": (Kind(between="evaluation"), "alone sharded"),
    "two passes, then one back": (Kind(between="two passes"), "alone replicated sharded"),
    "saved and resumed": (Kind(between="resumed"), "alone replicated sharded"),
    "static graph": (Kind(static_graph=True), "replicated"),
    "static graph, resumed": (Kind(static_graph=True, between="resumed"), "replicated"),
    "buckets cut anew": (Kind(also=BUCKETS), "replicated"),
    "merged and kept units": (Kind(also=UNITS), "sharded"),
    "kept over micro-batches": (
        Kind(micro_batches=3, clips=True, also=OVER_MICRO_BATCHES),
        "sharded",
    ),
    "merged and kept, resumed": (Kind(also=UNITS, between="resumed", micro_batches=2), "copies"),
}
BY_DEFAULT = ("wrapper", "merged and kept units")
"""On two ranks; by one process everything is quick."""


def _marks(name: str, kind: Kind, ranks: str) -> list[pytest.MarkDecorator]:
    lacking = [needs("peft")] * (name == "peft")
    lacking += [needs("transformers")] * (kind.way.split()[0] in ("gpt2", "llama", "mixtral"))
    lacking += [MERGES] * (kind.also is UNITS)
    is_quick = ranks == "alone" or (ranks != "copies" and name in BY_DEFAULT)
    return lacking + [pytest.mark.slow] * (not is_quick)


CASES = [
    pytest.param(replace(kind, ranks=each), id=f"{name} {each}", marks=_marks(name, kind, each))
    for name, (kind, ranks) in KINDS.items()
    for each in ranks.split()
]


@pytest.mark.parametrize("kind", CASES)
def test_any_sequence(request: pytest.FixtureRequest, kind: Kind, tmp_path: Path) -> None:
    asked = kind, request.node.name, str(tmp_path)
    if kind.ranks == "alone":
        assert differs(*asked) == ""
        return
    pool = request.getfixturevalue("four_ranks" if kind.ranks == "copies" else "two_ranks")
    assert pool.run(differs, *asked) == [""] * pool.world_size
