"""Training loops as Lightning Fabric's documentation writes them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from tests.integrations.arms import Run, Trained
from tests.integrations.trainings import regression
from tests.integrations.trainings.recuts import Recuts

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class _Loop:
    """Fabric's own example, with the buckets cut anew after some of its backward passes."""

    def __init__(self, run: Run, accumulate: int = 1, precision: Any = None, **ddp: Any) -> None:
        strategy = DDPStrategy(**ddp)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        self.fabric.launch()
        self._run, self._accumulate = run, accumulate
        self._recuts = Recuts(run)
        module = regression.model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(module, optimizer)
        self._recuts.wrapped(self.model._forward_module)
        self._loader, self._validation = self.fabric.setup_dataloaders(
            regression.data(64), regression.data(16, shuffle=False)
        )
        self._losses: list[float] = []

    def epoch(self) -> None:
        for _ in range(self._run.times):
            for step, (inputs, targets) in enumerate(self._loader, 1):
                self._batch(inputs, targets, is_last=step % self._accumulate == 0)
            self._validate()

    def _batch(self, inputs: torch.Tensor, targets: torch.Tensor, is_last: bool) -> None:
        with self.fabric.no_backward_sync(self.model, enabled=not is_last):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.fabric.backward(loss)
        if is_last:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._losses.append(float(loss.detach()))
        self._recuts.stepped()

    def _validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for inputs, targets in self._validation:
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self._losses.append(float(self.fabric.all_reduce(loss)))
        self.model.train()

    def trained(self) -> Trained:
        return self._recuts.trained(self.model.module, self._losses)


def accumulation(run: Run) -> Trained:
    """Buckets are cut anew between the backward passes of a step too."""
    loop = _Loop(run, accumulate=3, gradient_as_bucket_view=True)
    loop.epoch()
    loop.epoch()
    return loop.trained()


def bf16(run: Run) -> Trained:
    loop = _Loop(run, precision="bf16-mixed")
    loop.epoch()
    loop.epoch()
    return loop.trained()


def state(run: Run) -> Trained:
    """Saved, trained on, loaded, and trained on again."""
    loop = _Loop(run)
    state = {"model": loop.model, "optimizer": loop.optimizer}
    loop.epoch()
    loop.fabric.save(f"{run.folder}/state.ckpt", state)
    loop.epoch()
    loop.fabric.load(f"{run.folder}/state.ckpt", state)
    loop.epoch()
    return loop.trained()
