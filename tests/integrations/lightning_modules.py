"""Lightning modules, with automatic and with manual optimization."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from tests.integrations import regression

Batch = list[torch.Tensor]


class Regression(L.LightningModule):
    """Keeps the losses of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = regression.model()
        self.losses: list[float] = []

    def loss(self, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(float(loss.detach()))
        return loss

    def training_step(self, batch: Batch, _: int) -> torch.Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log("validation_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Twice(Regression):
    """Two optimizer steps, each after a backward pass of the whole model, in a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, _: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()


class Adversaries(Regression):
    """As in Lightning's own example, each optimizer's turn has the other's parameters frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(regression.TARGETS, 24), nn.Tanh(), nn.Linear(24, 1))

    def training_step(self, batch: Batch, _: int) -> None:
        inputs, targets = batch
        of_generator, of_critic = self.optimizers()
        self.toggle_optimizer(of_generator)
        self._step(of_generator, self.loss(batch) - self.critic(self.layers(inputs)).mean())
        self.toggle_optimizer(of_critic)
        found = self.critic(self.layers(inputs).detach()).mean()
        self._step(of_critic, found - self.critic(targets).mean())

    def _step(self, optimizer: Any, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.layers, self.critic)]


class Freezing(BaseFinetuning):
    """The first layers are frozen in the epochs from ``first`` to before ``end``."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self._first, self._end = first, end

    def freeze_before_training(self, module: Regression) -> None:
        if self._first == 0:
            self.freeze(module.layers[:2])

    def finetune_function(
        self, module: Regression, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == self._first:
            self.freeze(module.layers[:2])
        elif epoch == self._end:
            self.make_trainable(module.layers[:2])
