"""Training loops as Accelerate's documentation writes them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from tests.integrations.arms import Run, Trained
from tests.integrations.trainings import regression
from tests.integrations.trainings.recuts import OF_A_HOOK, Recuts


def forget_state() -> None:
    """Accelerate keeps its options for the life of a process, which here trains many times."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class _Loop:
    """Accelerate's own example, with the buckets cut anew after some of its backward passes."""

    def __init__(
        self, run: Run, recuts: Recuts, module: nn.Module | None = None, **options: Any
    ) -> None:
        forget_state()
        self._run, self._recuts = run, recuts
        self.accelerator = Accelerator(cpu=True, **options)
        module = module or regression.model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.model, self.optimizer, self._loader, self._scheduler = self.accelerator.prepare(
            module, optimizer, regression.data(rows=56), scheduler
        )
        recuts.wrapped(self.model)
        self._losses: list[float] = []

    def epoch(self) -> None:
        for _ in range(self._run.times):
            for inputs, targets in self._loader:
                self._batch(inputs, targets)

    def _batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self._scheduler.step()
            self.optimizer.zero_grad()
        self._losses.append(float(loss.detach()))
        self._recuts.stepped()

    def module(self) -> nn.Module:
        found: nn.Module = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return found

    def trained(self) -> Trained:
        return self._recuts.trained(self.module(), self._losses)


def _train(run: Run, recuts: Recuts | None = None, **options: Any) -> Trained:
    loop = _Loop(run, recuts or Recuts(run), **options)
    loop.epoch()
    loop.epoch()
    return loop.trained()


def accumulation(run: Run) -> Trained:
    """Buckets are cut anew between the backward passes of a step too."""
    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    return _train(run, gradient_accumulation_steps=3, kwargs_handlers=[kwargs])


def bf16(run: Run) -> Trained:
    return _train(run, mixed_precision="bf16")


def hook(run: Run) -> Trained:
    """Gradients travel in half precision, by a hook that Accelerate registers."""
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return _train(run, Recuts(run, OF_A_HOOK), kwargs_handlers=[kwargs])


def stateful_hook(run: Run) -> Trained:
    """Remembers something of each bucket, so that the buckets must stay as they are."""
    kwargs = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_state_option={"matrix_approximation_rank": 1, "start_powerSGD_iter": 2},
    )
    return _train(run, kwargs_handlers=[kwargs])


def unused_parameters(run: Run) -> Trained:
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
    return _train(run, kwargs_handlers=[kwargs])


def state(run: Run) -> Trained:
    """Saved, trained on, loaded, and trained on again."""
    loop = _Loop(run, Recuts(run))
    loop.epoch()
    loop.accelerator.save_state(run.folder)
    loop.epoch()
    loop.accelerator.load_state(run.folder)
    loop.epoch()
    return loop.trained()


def second_prepare(run: Run) -> Trained:
    """The model is taken out, and wrapped again by another Accelerator."""
    recuts = Recuts(run)
    loop = _Loop(run, recuts, mixed_precision="bf16")
    loop.epoch()
    module = loop.module()
    loop.accelerator.free_memory()
    del loop
    again = _Loop(run, recuts, module)
    again.epoch()
    return again.trained()


def triggered(run: Run) -> Trained:
    """No forward pass of a step synchronises; the last one's backward pass does all the same."""
    recuts = Recuts(run)
    loop = _Loop(run, recuts)
    loop.epoch()
    for _ in range(8):
        first, second = torch.randn(2, 4, regression.WIDTH)
        with loop.accelerator.no_sync(loop.model):
            losses = [loop.model(inputs).square().mean() for inputs in (first, second)]
            loop.accelerator.backward(losses[0])
        with loop.accelerator.trigger_sync_in_backward(loop.model):
            loop.accelerator.backward(losses[1])
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        recuts.stepped()
    return loop.trained()
