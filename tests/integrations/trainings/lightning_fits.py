"""Trainings by Lightning's Trainer under its DDPStrategy."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy

from tests.integrations.arms import Run, Trained
from tests.integrations.trainings import regression
from tests.integrations.trainings.lightning_modules import Regression, of
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


def _fit(
    run: Run,
    resume: str | None = None,
    epochs: int = 3,
    callbacks: tuple[L.Callback, ...] = (),
    **options: Any,
) -> Trained:
    recuts = Recuts(run)
    module = of(L, Regression)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(),
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
    return _fit(run, gradient_clip_val=0.5, accumulate_grad_batches=3)


def resumed(run: Run) -> Trained:
    """Stopped after an epoch, and gone on with by another Trainer."""
    keep = ModelCheckpoint(dirpath=run.folder, filename="last", save_top_k=1)
    _fit(run, epochs=1, callbacks=(keep,), enable_checkpointing=True)
    return _fit(run, f"{run.folder}/last.ckpt")


def averaged(run: Run) -> Trained:
    """Its last epoch makes forward passes alone, for the statistics of the averaged weights."""
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    return _fit(run, callbacks=(averaging,))
