"""A re-cut that one rank has no memory for: all go back to what they had, and train on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.torch_private import reducer as torchs
from tests.client.beside_stock.side_by_side import LEARNING_RATE, difference, wrapped
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH = 24
FAILING_STEP = 4
STEPS = 10
FIRST = Configuration(2048, channels=2)
SECOND = Configuration(1)


class Messages(logging.Handler):
    """What the client logs as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


PLACES: dict[str, tuple[object, str]] = {
    "new reducer": (torchs, "new_reducer"),
    "torch's reducer": (dist, "Reducer"),
    "torch's cut": (torchs, "rebuild"),
}


@contextmanager
def failing_once(where: str) -> Any:
    """What comes next at the place runs out of memory: torch's cut at its end, when it has agreed
    on its buckets with the other ranks and makes them; the others do nothing at all.
    """
    module, name = PLACES[where]
    function: Callable[..., Any] = getattr(module, name)
    calls: list[str] = []

    def fail(*args: Any) -> Any:
        calls.append(name)
        if len(calls) > 1:
            return function(*args)
        if where == "torch's cut":
            function(*args)
        raise torch.OutOfMemoryError("no memory for the buckets")

    with mock.patch.object(module, name, fail):
        yield
    assert calls, f"{name} was not called"


def _layers(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def _steps(
    pair: tuple[Stock, DistributedDataParallel],
    optimizers: list[torch.optim.Optimizer],
    micro_batches: int,
    steps: range,
) -> str | None:
    found = None
    for step in steps:
        for wrapper, optimizer in zip(pair, optimizers, strict=True):
            torch.manual_seed(1000 * step + dist.get_rank())
            optimizer.zero_grad()
            for _ in range(micro_batches - 1):
                with wrapper.no_sync():
                    wrapper(torch.randn(3, WIDTH)).square().mean().backward()
            wrapper(torch.randn(3, WIDTH)).square().mean().backward()
            optimizer.step()
        found = found or difference(*pair, f"step {step}")
    return found


def _out_of_memory(
    where: str,
    rank: int,
    micro_batches: int,
    earlier: Configuration | None,
    later: Configuration,
) -> tuple[str | None, Configuration, list[str]]:
    """The difference to stock, the configuration that is in force at the end, and the log."""
    messages = Messages()
    logging.getLogger("bagua_client").addHandler(messages)
    pair = wrapped(_layers(), gradient_as_bucket_view=rank == 0)
    ours = pair[1]
    sgds: list[torch.optim.Optimizer] = [
        torch.optim.SGD(wrapper.parameters(), LEARNING_RATE, momentum=0.5) for wrapper in pair
    ]
    if earlier is not None:
        assert ours.reconfigure(earlier)

    def train(*steps: int) -> str | None:
        return _steps(pair, sgds, micro_batches, range(*steps))

    found = train(FAILING_STEP)
    failing = failing_once(where) if dist.get_rank() == rank else nullcontext()
    if where == "torch's cut":  # It comes at the end of the step after ours.
        assert ours.reconfigure(later)
        with failing:
            found = train(FAILING_STEP, FAILING_STEP + 1) or found
    else:
        with failing:
            assert not ours.reconfigure(later)
    back_at = ours.configuration
    start = FAILING_STEP + (where == "torch's cut")
    found = train(start, STEPS) or found
    # Later re-cuts are as good as ever.
    assert ours.reconfigure(later)
    found = train(STEPS, STEPS + 3) or found
    if ours.configuration != later:
        found = found or f"then in force: {ours.configuration}"
    logging.getLogger("bagua_client").removeHandler(messages)
    return found, back_at, messages.texts


DEFAULT = Configuration(first_bucket_bytes=1024 * 1024)


@pytest.mark.parametrize("where", list(PLACES))
@pytest.mark.parametrize(
    ("rank", "micro_batches", "earlier", "later"),
    [
        (0, 1, None, FIRST),
        (1, 2, None, FIRST),
        (3, 1, FIRST, Configuration(4096, "shards")),
        (0, 2, SECOND, Configuration(4096, "leaders", channels=2)),
    ],
)
def test_all_ranks_go_back_and_train_on(
    two_by_two_ranks: RankPool,
    where: str,
    rank: int,
    micro_batches: int,
    earlier: Configuration | None,
    later: Configuration,
) -> None:
    results = two_by_two_ranks.run(_out_of_memory, where, rank, micro_batches, earlier, later)
    for found, back_at, _ in results:
        assert found is None
        assert back_at == (earlier or DEFAULT)
    told = [[text for text in texts if "went back" in text] for _, _, texts in results]
    assert [len(texts) for texts in told] == [1, 0, 0, 0]
    assert f"rank {rank}" in told[0][0]
    assert any("no memory for the buckets" in text for text in results[rank][2])


def _cut_fails_under_decentralized() -> tuple[list[float], Configuration]:
    """How far apart the replicas are after the last steps, and what is in force."""
    torch.manual_seed(0)
    # Torch cuts a static graph's buckets after two steps, so all ranks keep the first of them.
    model = DistributedDataParallel(_layers(), static_graph=True)
    sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.5)
    apart = []
    for step in range(FAILING_STEP + 3):
        if step == FAILING_STEP - 1:
            assert model.reconfigure(Configuration(2048, algorithm="decentralized"))
        torch.manual_seed(1000 * step + dist.get_rank())
        sgd.zero_grad()
        fails = step == FAILING_STEP and dist.get_rank() == 1
        with failing_once("torch's cut") if fails else nullcontext():
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
