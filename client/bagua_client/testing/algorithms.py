"""What every algorithm keeps, ours and a stranger's, as tests for pytest::

    from bagua_client.testing.algorithms import AlgorithmContract
    from halving import Halved

    class TestHalved(AlgorithmContract):
        algorithm = Halved

Of the package contracts alone need pytest.
"""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm
from bagua_client.configuration import Configuration
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel
from bagua_client.testing.ranks import Ranks, kept_ranks

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Made:
    """How a training is made on each rank, see :class:`AlgorithmContract`."""

    algorithm: Callable[..., Algorithm]
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    of_optimizer: bool = False


class Net(nn.Module):
    """Its gradients become ready in another order than it lists its parameters in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(13, 5)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(inputs)).tanh())
        return found


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Any:
    """The loss of a rank's own batch."""
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed))
    return model(inputs).square().mean()


class Training:
    """A model with the algorithm, and its optimizer.

    Args:
        options: of the wrapper.
    """

    def __init__(self, made: Made, **options: Any) -> None:
        net = Net()
        self.optimizer = made.optimizer(net.parameters())
        given = (self.optimizer,) if made.of_optimizer else ()
        algorithm = made.algorithm(*given)
        self.model: Any = DistributedDataParallel(net, algorithm=algorithm, **options)

    def step(self, number: int, passes: int = 2) -> list[float]:
        """Make a step, whose gradients are accumulated over the passes; the weights after it."""
        self.optimizer.zero_grad()
        for left in reversed(range(passes)):
            with self.model.no_sync() if left else nullcontext():
                loss_of(self.model, passes * number + left).backward()
        self.optimizer.step()
        return self.weights()

    def weights(self) -> list[float]:
        return [value for each in self.model.parameters() for value in each.flatten().tolist()]

    def recut(self, **changes: Any) -> bool:
        return bool(self.model.reconfigure(replace(self.model.configuration, **changes)))

    def save(self) -> bytes:
        """A checkpoint."""
        states = (each.state_dict() for each in (self.model, self.optimizer, self.model.algorithm))
        torch.save(tuple(states), file := io.BytesIO())
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        weights, moments, own = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
        self.model.algorithm.load_state_dict(own)

    def spread(self) -> float:
        """By how much weights, and what the optimizer keeps beside them, differ between ranks."""
        weights = list(self.model.parameters())
        kept = [value for each in weights for value in self.optimizer.state[each].values()]
        tensors = [*weights, *(k for k in kept if isinstance(k, torch.Tensor) and k.dim())]
        low = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        high = low.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        return float((high - low).max())


STEPS = 24
RECUTS = {6: Configuration(200), 12: Configuration(100, "shards", channels=2), 18: Configuration()}
SMALL_BYTES = 300
SCALE = 1024.0


class _Trained(NamedTuple):
    weights: list[float]
    """In the end."""
    losses: list[float]
    """Of evaluations."""
    agreed: list[bool]
    """Whether each re-cut was made."""
    moves_weights: bool
    is_apart: bool


def _trained(made: Made) -> _Trained:
    """Accumulated over two passes, in mixed precision, scaled, clipped, evaluated now and then, and
    re-cut."""
    training = Training(made)
    model, optimizer = training.model, training.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=5)
    losses, agreed = [], []
    for step in range(STEPS):
        if step in RECUTS:
            agreed.append(model.reconfigure(RECUTS[step]))
        model.train()
        optimizer.zero_grad()
        for part in range(2):
            waits = model.no_sync() if part == 0 else nullcontext()
            with waits, torch.autocast("cpu", dtype=torch.bfloat16):
                scaler.scale(loss_of(model, 2 * step + part) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 0, 0).item())
    algorithm = model.algorithm
    told = algorithm.moves_weights, algorithm.is_apart
    return _Trained(training.weights(), losses, agreed, *told)


def _trained_twice(made: Made) -> tuple[_Trained, _Trained]:
    return _trained(made), _trained(made)


def _trained_if_it_can(made: Made) -> _Trained | str:
    try:
        return _trained(made)
    except ValueError as error:
        return str(error)


def _begins(made: Made) -> tuple[bool, str]:
    """Whether the algorithm says by node, and how the model begins."""
    model = Training(made).model
    return model.algorithm.hierarchical, model.configuration.hierarchical


RESUMED_STEPS, RECUT_AT = 7, 4
GOES_ON_AT = (1, 2, 4, 5)
"""Buckets are not final before the second step, and some algorithms begin with another phase."""


def _resumed(made: Made, options: Mapping[str, Any]) -> list[str]:
    """The steps after which a training that went on from a checkpoint was another."""
    straight, differ = Training(made, **options), []
    saved, weights = [], []
    for step in range(RESUMED_STEPS):
        if step == RECUT_AT:
            assert straight.recut(bucket_bytes=SMALL_BYTES, first_bucket_bytes=0)
        saved.append(straight.save())
        weights.append(straight.step(step))
    for begin in () if straight.model.algorithm.is_apart else GOES_ON_AT:
        resumed = Training(made, **options)
        resumed.load(saved[begin])
        for step in (begin, begin + 1):
            if step == RECUT_AT != begin:
                assert resumed.recut(bucket_bytes=SMALL_BYTES, first_bucket_bytes=0)
            if resumed.step(step) != weights[step]:
                differ.append(f"step {step} after going on at step {begin}")
                break
    return differ


LEFT_AT, TAKEN_AT, LEFT_AGAIN_AT = 5, 9, 13


def _left_and_taken(made: Made) -> tuple[list[str], list[float], bool]:
    """The algorithm in each step, how far apart ranks are after it, and whether this one moves
    weights."""
    training = Training(made)
    names, apart = [], []
    moves_weights = training.model.algorithm.moves_weights
    for step in range(LEFT_AGAIN_AT + 2):
        if step in (LEFT_AT, TAKEN_AT, LEFT_AGAIN_AT):
            name = "" if step == TAKEN_AT else DEFAULT_ALGORITHM
            assert training.model.reconfigure(Configuration(200, algorithm=name))
        training.step(step)
        names.append(training.model.algorithm.name)
        apart.append(training.spread())
    return names, apart, moves_weights


def _in_modes(made: Made) -> list[tuple[str, bool]]:
    """In what a training differs that is in evaluation mode, or one of whose ranks makes passes of
    its own, which the others wait for."""
    found = []
    expected: list[float] = []
    for trains, looks in ((True, False), (False, False), (True, True), (False, True)):
        training = Training(made)
        training.model.train(trains)
        for step in range(8):
            if step == 0:
                assert training.recut(bucket_bytes=200)
            for is_after in (False, True):
                if looks:
                    if dist.get_rank() == 1:
                        loss_of(training.model, 99)
                    dist.barrier()
                if not is_after:
                    training.step(step, passes=1)
        assert training.model.configuration.bucket_bytes == 200
        if training.model.algorithm.is_apart:
            return []
        expected = expected or training.weights()
        found.append((f"{trains=}, {looks=}", training.weights() != expected))
    return [each for each in found if each[1]]


INFINITE_AT = (2, 6)


def _with_infinite_gradients(made: Made) -> tuple[list[int], bool, bool]:
    """The steps that left the weights as they were, with infinite gradients on rank 1 in some;
    whether all weights are finite in the end; and whether gradients are each rank's own."""
    training, skipped = Training(made), []
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(INFINITE_AT[-1] + 3):
        before = training.weights()
        training.optimizer.zero_grad()
        is_infinite = step in INFINITE_AT and dist.get_rank() == 1
        loss = loss_of(training.model, step) * (math.inf if is_infinite else 1.0)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        if training.weights() == before:
            skipped.append(step)
    are_finite = all(map(math.isfinite, training.weights()))
    return skipped, are_finite, training.model.algorithm.moves_weights


MORE_STEPS = 20


def _tensors_left(made: Made) -> int:
    """How many more tensors there are after so many steps more, without the help of the collector
    of circles."""
    training, counted = Training(made), []
    gc.collect()
    gc.disable()
    try:
        for step in range(MORE_STEPS + 5):
            training.step(step)
            if step in (4, MORE_STEPS + 4):
                counted.append(sum(isinstance(it, torch.Tensor) for it in gc.get_objects()))
    finally:
        gc.enable()
    return counted[1] - counted[0]


def _ends_one_by_one(made: Made) -> tuple[bool, str]:
    """Whether all ranks must train to the end; what is said where they would not."""
    training = Training(made)
    try:
        with training.model.join():
            for step in range(3 + dist.get_rank()):
                training.optimizer.zero_grad()
                loss_of(training.model, step).backward()
                training.optimizer.step()
    except RuntimeError as error:
        return training.model.algorithm.needs_all_ranks, str(error)
    return training.model.algorithm.needs_all_ranks, ""


class AlgorithmContract:
    """Derive a class from it whose name begins with Test.

    Attributes:
        algorithm: the class, or what else makes an instance; of a module that another process can
            import.
        optimizer: makes one for the parameters.
        of_optimizer: ``algorithm`` is given the optimizer.
    """

    algorithm: Callable[..., Algorithm]
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    of_optimizer = False

    @pytest.fixture
    def ranks(self) -> Ranks:
        """Two ranks on each of two nodes."""
        return kept_ranks(2, 2)

    @pytest.fixture
    def two_ranks(self) -> Ranks:
        return kept_ranks(2)

    @pytest.fixture
    def one_rank(self) -> Ranks:
        return kept_ranks(1)

    @pytest.fixture
    def made(self) -> Made:
        cls = type(self)  # of an instance it would be a method
        return Made(cls.algorithm, cls.optimizer, cls.of_optimizer)

    def test_it_trains_with_all_that_trainings_do(self, ranks: Ranks, made: Made) -> None:
        found = ranks.run(_trained_twice, made)
        for first, second in found:
            assert all(map(math.isfinite, first.weights))
            assert first.losses[-1] < 0.8 * first.losses[0]
            assert first.agreed == found[0][0].agreed
            if not first.moves_weights:
                assert first.weights == found[0][0].weights, "all ranks have the same bits"
            if not first.is_apart:
                assert second == first, "the same bits once more"

    def test_it_begins_as_its_argument_says(self, ranks: Ranks, made: Made) -> None:
        for is_by_node, begins in ranks.run(_begins, made):
            assert begins == ("leaders" if is_by_node else "off")

    def test_it_trains_on_one_rank_or_says_why_not(self, one_rank: Ranks, made: Made) -> None:
        (found,) = one_rank.run(_trained_if_it_can, made)
        if isinstance(found, str):
            assert found
        else:
            assert found.losses[-1] < 0.8 * found.losses[0]
            ((_, begins),) = one_rank.run(_begins, made)
            assert begins == "off", "one rank is no node"

    @pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
    def test_it_goes_on_from_a_checkpoint_bit_for_bit(
        self, ranks: Ranks, made: Made, options: dict[str, Any]
    ) -> None:
        for differ in ranks.run(_resumed, made, options):
            assert differ == []

    def test_replicas_are_equal_whenever_it_is_left(self, ranks: Ranks, made: Made) -> None:
        for names, apart, moves_weights in ranks.run(_left_and_taken, made):
            own = names[0]
            others = [DEFAULT_ALGORITHM] * (TAKEN_AT - LEFT_AT)
            again = [own] * (LEFT_AGAIN_AT - TAKEN_AT)
            assert names == [own] * LEFT_AT + others + again + [DEFAULT_ALGORITHM] * 2
            assert max(apart[LEFT_AT:TAKEN_AT] + apart[LEFT_AGAIN_AT:]) < 1e-6
            assert moves_weights or max(apart) < 1e-6, apart

    def test_the_mode_of_the_model_and_passes_of_one_rank_change_nothing(
        self, two_ranks: Ranks, made: Made
    ) -> None:
        for differ in two_ranks.run(_in_modes, made):
            assert differ == []

    def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(
        self, two_ranks: Ranks, made: Made
    ) -> None:
        """Where each rank keeps its gradients, it skips alone, and holds nobody up."""
        for skipped, are_finite, is_own in two_ranks.run(_with_infinite_gradients, made):
            assert are_finite
            assert is_own or skipped == list(INFINITE_AT)

    def test_what_a_step_needs_goes_with_it(self, two_ranks: Ranks, made: Made) -> None:
        """But for the last one's, which may be under way."""
        assert max(two_ranks.run(_tensors_left, made)) < MORE_STEPS

    def test_ranks_may_end_one_by_one_or_are_told(self, two_ranks: Ranks, made: Made) -> None:
        for needs_all_ranks, said in two_ranks.run(_ends_one_by_one, made):
            assert needs_all_ranks is ("one by one" in said)
