"""Lightning modules, with automatic and with manual optimization.

Written for either of Lightning's packages, ``lightning`` and ``pytorch_lightning``: see :func:`of`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bagua_client.algorithms import QAdamOptimizer
from tests.integrations.trainings import regression

if TYPE_CHECKING:
    from lightning import LightningModule
else:
    LightningModule = object

Batch = list[torch.Tensor]


def of(package: ModuleType, module: type[Regression], *arguments: Any) -> Any:
    """A new ``module``, for the Trainer of that package."""
    return type(module.__name__, (module, package.LightningModule), {})(*arguments)


class Regression(LightningModule):
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

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, _: int) -> torch.Tensor:
        found: torch.Tensor = self.layers(batch[0])
        return found

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


class Partial(Regression):
    """Each other batch leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Linear(regression.TARGETS, regression.TARGETS)

    def training_step(self, batch: Batch, number: int) -> torch.Tensor:
        inputs, targets = batch
        outputs = self.layers(inputs)
        return nn.functional.mse_loss(self.further(outputs) if number % 2 else outputs, targets)


class WithQAdam(Regression):
    """Its warm-up ends in the first epoch."""

    def configure_optimizers(self) -> Any:
        return QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=5)


class WithTwoQAdams(Regression):
    """More than qadam can take."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [QAdamOptimizer(layer.parameters()) for layer in (self.layers[0], self.layers[4])]


class WithTwoSchedulers(Regression):
    """More than qadam can take."""

    def configure_optimizers(self) -> Any:
        optimizer = QAdamOptimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(2)]
