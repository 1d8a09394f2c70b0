"""A training whose ranks Lightning starts itself, as a user would run it.

    BAGUA_AUTOTUNE=1 python -m tests.integrations.trainings.lightning_job FOLDER --until-tuned

It validates after each second step.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import time
from typing import Any

from torch import nn

import bagua_client.lightning  # noqa: F401
from tests.integrations.trainings import regression
from tests.integrations.trainings.lightning_modules import Regression, of

VALIDATION_SECONDS = 0.05
"""Several times as long as a step."""


class Slow(Regression):
    """Its validations are, and it has gradients of 0.8 MB."""

    def __init__(self) -> None:
        super().__init__()
        widths = [regression.WIDTH, 256, 256, 256, 256, regression.TARGETS]
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self.layers = nn.Sequential(*layers)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(VALIDATION_SECONDS)
        self.log("validation_loss", self.loss(batch), sync_dist=True)


class Failing(Regression):
    """On rank 1, in a validation after some steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.global_step > 8:
            print("rank 1 fails", flush=True)
            raise RuntimeError("this is the failure")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="bagua")
    parser.add_argument("--until-tuned", action="store_true", help="else to the end of time")
    parser.add_argument("--failing", action="store_true")
    arguments = parser.parse_args()
    lightning = importlib.import_module(arguments.package)
    logging.getLogger(arguments.package).setLevel(logging.ERROR)

    class Following(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if arguments.until_tuned and not trainer.strategy.model.is_tuning:
                trainer.should_stop = True

    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=2,
        max_epochs=-1,
        val_check_interval=2,
        limit_val_batches=1,
        callbacks=[Following()],
        default_root_dir=arguments.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = of(lightning, Failing if arguments.failing else Slow)
    trainer.fit(module, regression.data(64), regression.data(16, shuffle=False))
    print("the training is over", flush=True)


if __name__ == "__main__":
    main()
