"""One training, run twice: with ours, tuned by its agent while it goes on, and with torch alone."""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client import Configuration
from bagua_client.agent import report
from bagua_client.communication import link
from tests.client.listening import logged

ROWS, WIDTH = 4, 8
LAST_STEPS = 3
"""Under the last of the configurations that are tried."""
MOST_STEPS = 1000
UNTUNED_STEPS = 12
"""Of a training that no tuning changes."""
WRONG = 1 + 2**-20
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@dataclass
class Run:
    """What a training calls, with torch alone or with ours.

    Args:
        is_ours: whether its models are tuned.
        is_sharded: whether they are sharded (``fully_shard``), or replicated.
        steps: how many to make; None: until ours has been through all that is tried.
        tried: the configurations.
        is_spoilt: whether one gradient is wrong, in one step and by its last bits.
    """

    is_ours: bool
    is_sharded: bool
    steps: int | None = None
    tried: Sequence[Configuration] = ()
    is_spoilt: bool = False
    step: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    configurations: list[tuple[Configuration, ...]] = field(default_factory=list)
    _models: list[Any] = field(default_factory=list)
    _optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """The model as it is trained.

        Args:
            options: of the wrapper of a replicated model.
        """
        model: Any
        if self.is_sharded:
            for block in getattr(module, "blocks", ()):
                fully_shard(block)
            model = fully_shard(module)
        else:
            model = (bagua_client.DistributedDataParallel if self.is_ours else Stock)(
                module, **options
            )
        return self.tuned(model)

    def tuned(self, model: Any) -> Any:
        """A model that the training has wrapped or sharded itself."""
        if self.is_ours:
            bagua_client.tune(model)
        self._models = [each for each in self._models if _module(each) is not _module(model)]
        self._models.append(model)
        return model

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Its state is compared, too."""
        if self.is_spoilt and not self._optimizers:
            optimizer.register_step_pre_hook(self._spoil)
        self._optimizers.append(optimizer)
        return optimizer

    def sgd(self, model: nn.Module) -> torch.optim.SGD:
        return self.optimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.5))

    def descending(self, module: nn.Module, **options: Any) -> tuple[Any, torch.optim.SGD]:
        """The model as it is trained, and its optimizer."""
        model = self.wrap(module, **options)
        return model, self.sgd(model)

    def batches(self) -> Iterator[torch.Tensor]:
        """One for each step. From the first on, only the training draws random numbers."""
        torch.manual_seed(100 + dist.get_rank())
        random.seed(100)
        for self.step in count():
            if self._is_over:
                return
            yield batch()
            if self.is_ours:
                time.sleep(0.002)  # The service answers meanwhile.

    def without_sync(self, model: Any) -> AbstractContextManager[None]:
        """A context of passes whose gradients stay each rank's own."""
        return _unsynced(model) if self.is_sharded else model.no_sync()

    def state(self) -> dict[str, Any]:
        """All that the training has computed, by name: this rank's part of it."""
        found: dict[str, Any] = {f"loss {at}": loss for at, loss in enumerate(self.losses)}
        for at, model in enumerate(self._models):
            for name, value in model.named_parameters():
                found[f"model {at}: {name}"] = value
                found[f"model {at}: gradient of {name}"] = value.grad
            for name, value in model.named_buffers():
                found[f"model {at}: {name}"] = value
            found |= {f"model {at}: state {n}": v for n, v in model.state_dict().items()}
        for at, optimizer in enumerate(self._optimizers):
            found |= _flat(optimizer.state_dict(), f"optimizer {at}")
        found["torch's random numbers"] = torch.get_rng_state()
        found["random numbers"] = random.getstate()
        return {name: _bits(value) for name, value in found.items()}

    @property
    def tuning(self) -> str:
        """The state of the last model's."""
        state: str = self._models[-1].tuning.state
        return state

    @property
    def _is_over(self) -> bool:
        if self.steps is not None:
            return self.step >= self.steps
        # All ranks change in the same step, so that all end in the same one.
        self.configurations.append(tuple(model.configuration for model in self._models))
        if self.tuning in ("off", "failed"):
            return self.step >= UNTUNED_STEPS
        were = {each for models in self.configurations[:-LAST_STEPS] for each in models}
        return were.issuperset(self.tried) or self.step >= MOST_STEPS

    def _spoil(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.step == 2 and self.is_ours:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][-1].grad.mul_(WRONG)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cpu")


def _module(model: Any) -> nn.Module:
    module: nn.Module = model.module if isinstance(model, Stock) else model
    return module


@contextmanager
def _unsynced(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _flat(tree: Any, name: str) -> dict[str, Any]:
    if not isinstance(tree, dict | list | tuple):
        return {name: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {f"{name}/": len(tree)}
    for key, value in pairs:
        found |= _flat(value, f"{name}/{key}")
    return found


def _bits(value: Any) -> Any:
    """Equal if all bits are, also those of what is no number."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    local = value.to_local() if hasattr(value, "to_local") else value
    flat = local.detach().cpu().contiguous().flatten()
    placed = str(getattr(value, "placements", ""))
    return local.dtype, tuple(local.shape), placed, flat.view(torch.uint8).numpy().tobytes()


Training = Callable[[Run], None]


@dataclass(frozen=True)
class Outcome:
    """Of one rank.

    Attributes:
        differences: names of what differs.
        tuning: the state of ours at the end.
        configurations: of ours, step by step: one for each model.
        warnings: what ours has said that went wrong.
    """

    differences: list[str]
    tuning: str
    configurations: list[tuple[Configuration, ...]]
    warnings: list[str]


def beside_torch(
    training: Training,
    is_sharded: bool,
    url: str,
    tried: Sequence[Configuration],
    is_spoilt: bool = False,
) -> Outcome:
    """Run it with ours, tuned by the service at ``url`` until all of ``tried`` have been in force;
    then with torch alone, for as many steps.

    Called on all ranks.
    """
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url})
        )
        # Small, so that these small models travel in stripes, too.
        small = {"SMALLEST_STRIPE_BYTES": 16, "ALIGNED_ELEMENTS": 2}
        stack.enter_context(mock.patch.multiple(link, **small))
        stack.enter_context(mock.patch.object(report, "MOST_SHARE", math.inf))
        warnings = stack.enter_context(logged(logging.WARNING))
        ours = _run(training, Run(True, is_sharded, None, tried, is_spoilt))
        found, tuning = ours.state(), ours.tuning
        steps, configurations = ours.step, ours.configurations
        del ours
        gc.collect()  # What is said where a model goes belongs to it, too.
    expected = _run(training, Run(False, is_sharded, steps)).state()
    return Outcome(
        [name for name in {**expected, **found} if expected.get(name) != found.get(name)],
        tuning,
        configurations,
        warnings,
    )


def _run(training: Training, run: Run) -> Run:
    torch.manual_seed(0)
    training(run)
    return run
