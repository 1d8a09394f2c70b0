"""Trainings by Lightning's Trainer under its DDPStrategy."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy

from tests.integrations.arms import Run, Trained
from tests.integrations.trainings import regression
from tests.integrations.trainings.lightning_modules import Adversaries, Regression, Twice, of
from tests.integrations.trainings.recuts import Recuts

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class _Between(L.Callback):
    """Sees the wrapper before its first step, and the end of each batch."""

    def __init__(self, recuts: Recuts) -> None:
        self._recuts = recuts

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._recuts.wrapped(trainer.strategy.model)

    def on_train_batch_end(self, *_: Any) -> None:
        self._recuts.stepped()


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


def _fit(
    run: Run,
    kind: type[Regression],
    resume: str | None = None,
    every: int = 2,
    strategy: dict[str, Any] | None = None,
    epochs: int = 3,
    callbacks: tuple[L.Callback, ...] = (),
    **options: Any,
) -> Trained:
    recuts = Recuts(run, every=every)
    module = of(L, kind)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(**(strategy or {})),
        callbacks=[_Between(recuts), *callbacks],
        max_epochs=epochs * run.times,
        default_root_dir=run.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        **{"enable_checkpointing": False, **options},
    )
    validation = regression.data(16, shuffle=False)
    trainer.fit(module, regression.data(64), validation, ckpt_path=resume)
    (found,) = trainer.validate(module, validation, verbose=False)
    return recuts.trained(module, [*module.losses, found["validation_loss"]])


def fit(run: Run) -> Trained:
    return _fit(run, Regression, gradient_clip_val=0.5, accumulate_grad_batches=3)


def bf16(run: Run) -> Trained:
    return _fit(run, Regression, precision="bf16-mixed")


def resumed(run: Run) -> Trained:
    """Stopped after an epoch, and gone on with by another Trainer."""
    keep = ModelCheckpoint(dirpath=run.folder, filename="last", save_top_k=1)
    _fit(run, Regression, epochs=1, callbacks=(keep,), enable_checkpointing=True)
    return _fit(run, Regression, f"{run.folder}/last.ckpt")


def averaged(run: Run) -> Trained:
    """Its last epoch makes forward passes alone, for the statistics of the averaged weights."""
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    return _fit(run, Regression, callbacks=(averaging,))


def thawed(run: Run) -> Trained:
    """Layers that were frozen when the model was wrapped train from the second epoch on."""
    return _fit(run, Regression, callbacks=(Freezing(0, 1),))


def frozen(run: Run) -> Trained:
    """Layers that trained when the model was wrapped are frozen for a while."""
    unused = {"find_unused_parameters": True}
    return _fit(run, Regression, epochs=4, callbacks=(Freezing(1, 3),), strategy=unused)


def static_graph(run: Run) -> Trained:
    """Torch needs two steps to cut the buckets of a static graph."""
    return _fit(run, Regression, every=3, strategy={"static_graph": True})


def twice(run: Run) -> Trained:
    return _fit(run, Twice)


def twice_static(run: Run) -> Trained:
    return _fit(run, Twice, strategy={"static_graph": True})


def adversaries(run: Run) -> Trained:
    return _fit(run, Adversaries, strategy={"find_unused_parameters": True})
