"""Trains a model under torch's wrapper and a copy under ours, which is re-cut, and compares."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.torch_private import reducer as torchs
from bagua_wire.knobs import MIB
from tests.client import comparison

Recuts = Sequence[Configuration]
Train = Callable[[Stock, int], object]
"""Forward and backward passes of one step of a wrapper; the number is the step's."""
Wrap = Callable[[type[Stock], nn.Module], Stock]

FLAT = (
    Configuration(1),
    Configuration(2048, channels=2),
    # Torch before 2.11 cannot cut every first bucket.
    Configuration(25 * MIB, first_bucket_bytes=1 if torchs.HAS_BUCKET_CAPS else 0),
    Configuration(1, channels=2),
)
BY_NODE = (
    Configuration(1, "leaders"),
    Configuration(2048, "shards", channels=2),
    Configuration(25 * MIB),
    Configuration(1, "shards"),
)
STEPS = 2 * len(FLAT)
WIDTH = 24
LEARNING_RATE = 0.05
RELATIVE = {**comparison.RELATIVE, torch.float16: 2**-8}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def normed() -> nn.Sequential:
    """With buffers."""
    first = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def inputs(grad: bool = False) -> torch.Tensor:
    return torch.randn(3, WIDTH, requires_grad=grad)


def backward(output: torch.Tensor) -> None:
    output.square().mean().backward()


def passes(wrapper: Stock, step: int = 0) -> None:
    """One forward, and one backward."""
    backward(wrapper(inputs()))


FIND, STATIC, AS_VIEW = "find_unused_parameters", "static_graph", "gradient_as_bucket_view"
"""Options of the wrapper that are on; see :func:`switched_on`."""
UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""What torch says of weights that had no gradient."""


def side_by_side(
    model: nn.Module,
    train: Train,
    recuts: Recuts,
    *,
    steps: int = STEPS,
    wrap: Wrap | None = None,
    set_to_none: bool = True,
    error: str = "",
    new_reducers: bool = True,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    rounding: torch.dtype = torch.float32,
    **options: Any,
) -> str | None:
    """The first difference between the two; None: they are alike. Called on all ranks.

    Ours is reconfigured before every second step. Both get the same random numbers, which differ
    by rank and step.

    Args:
        wrap: makes either wrapper, of the class that it is given; by default with ``options``.
        set_to_none: how gradients are zeroed.
        error: part of the message that stock fails with; ours must fail in the same step.
        new_reducers: whether the re-cuts must have made new reducers.
        optimizer_of: by default SGD.
        rounding: the coarsest dtype that gradients travel in.
    """
    pair = wrapped(model, wrap, **options)
    optimizers = [(optimizer_of or sgd)(wrapper) for wrapper in pair]
    with counted_reducers() as made:
        found = _compare(pair, optimizers, train, recuts, steps, set_to_none, error, rounding)
    if found is None and recuts and new_reducers and not error and made.call_count < 2:
        return "the buckets were not re-cut"
    return found


def _compare(
    pair: tuple[Stock, DistributedDataParallel],
    optimizers: Sequence[torch.optim.Optimizer],
    train: Train,
    recuts: Recuts,
    steps: int,
    set_to_none: bool,
    error: str,
    rounding: torch.dtype,
) -> str | None:
    stock, ours = pair
    found = None
    for step in range(steps):
        if recuts and step % 2 == 0:
            recut(ours, recuts, step)
        failures = []
        for wrapper, optimizer in zip(pair, optimizers, strict=True):
            torch.manual_seed(1000 * step + dist.get_rank())
            optimizer.zero_grad(set_to_none)
            failures.append(failure_of(train, wrapper, step))
        if any(failures):
            return _unlike(failures[0], failures[1], error, step)
        # All ranks go on to the end: one that left would leave the others waiting.
        found = found or difference(stock, ours, f"step {step}, {ours.configuration}", rounding)
        for optimizer in optimizers:
            optimizer.step()
    if error:
        return f"stock did not fail with {error}"
    unlike_others = _unlike_others(stock, ours)
    return found or difference(stock, ours, "at the end", rounding) or unlike_others


def wrapped(
    model: nn.Module, wrap: Wrap | None = None, **options: Any
) -> tuple[Stock, DistributedDataParallel]:
    """``model`` under torch's wrapper, and a copy of it under ours."""

    def plainly(wrapper: type[Stock], module: nn.Module) -> Stock:
        return wrapper(module, **options)

    twin = copy.deepcopy(model)
    make = wrap or plainly
    stock, ours = make(Stock, model), make(DistributedDataParallel, twin)
    assert isinstance(ours, DistributedDataParallel)
    return stock, ours


def recut(ours: DistributedDataParallel, recuts: Recuts, step: int) -> None:
    """Have ours re-cut in the next step, to the next of ``recuts``."""
    assert ours.reconfigure(recuts[step // 2 % len(recuts)])


def counted_reducers() -> AbstractContextManager[mock.Mock]:
    """Counts the reducers that ours makes."""
    new_reducer = torchs.new_reducer
    return mock.patch.object(torchs, "new_reducer", wraps=new_reducer)


def switched_on(options: Sequence[str]) -> dict[str, Any]:
    """For :func:`side_by_side`."""
    return dict.fromkeys(options, True)


def sizes_only(recuts: Recuts) -> Recuts:
    """For where a hook of the training's own decides how buckets travel: only their sizes."""
    return [Configuration(recut.bucket_bytes) for recut in recuts]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.5)


# Errors


def failure_of(train: Train, wrapper: Stock, step: int) -> Exception | None:
    """What ``train`` raises, if anything."""
    try:
        train(wrapper, step)
    except Exception as error:
        return error
    return None


def gist(error: BaseException) -> str:
    """The type of an error and the first words of its message, which name no bucket."""
    return f"{type(error).__name__}: {str(error)[:60]}"


def _unlike(
    stock: Exception | None, ours: Exception | None, expected: str, step: int
) -> str | None:
    if stock is None or ours is None or gist(stock) != gist(ours):
        return f"step {step}: stock {_whole(stock)}, ours {_whole(ours)}"
    if not expected or expected not in str(stock):
        return f"step {step}: both fail, not with {expected!r} but {_whole(stock)}"
    return None


def _whole(error: Exception | None) -> str:
    return "".join(traceback.format_exception(error)) if error else "does not fail"


# Comparison


def difference(
    stock: nn.Module, ours: nn.Module, at: str = "", rounding: torch.dtype = torch.float32
) -> str | None:
    """The first weight, gradient or buffer that differs by more than rounding."""
    pairs = zip(_values(stock), _values(ours), strict=True)
    # The coarsest dtype's rounding reaches all the others.
    relative = RELATIVE[rounding]
    for (name, expected), (others_name, actual) in pairs:
        assert name == others_name
        if (expected is None) != (actual is None):
            return f"{at}: {name} is {expected} under torch, {actual} under ours"
        if expected is not None and actual is not None and not _close(expected, actual, relative):
            return f"{at}: {name} is {expected} under torch, {actual} under ours"
    return None


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        yield f"gradient of {name}", parameter.grad
    for name, buffer in model.named_buffers():
        yield name, buffer


def _close(expected: torch.Tensor, actual: torch.Tensor, relative: float) -> bool:
    if expected.layout != actual.layout or expected.dtype != actual.dtype:
        return False
    expected, actual = expected.to_dense(), actual.to_dense()
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
    return torch.allclose(actual, expected, rtol=relative, atol=relative * scale)


def _unlike_others(stock: nn.Module, ours: nn.Module) -> str | None:
    """What is the same on all ranks under torch, and not under ours."""
    gathered: list[list[tuple[str, bytes, bytes]]] = [[] for _ in range(dist.get_world_size())]
    own = [
        (name, _bytes(expected), _bytes(actual))
        for (name, expected), (_, actual) in zip(_values(stock), _values(ours), strict=True)
    ]
    dist.all_gather_object(gathered, own)
    for values in zip(*gathered, strict=True):
        in_stock = {expected for _, expected, _ in values}
        in_ours = {actual for _, _, actual in values}
        if len(in_stock) == 1 and len(in_ours) != 1:
            return f"{values[0][0]} differs between the ranks"
    return None


def _bytes(value: torch.Tensor | None) -> bytes:
    return b"" if value is None else value.cpu().to_dense().to(torch.complex128).numpy().tobytes()
