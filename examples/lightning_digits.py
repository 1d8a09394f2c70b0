"""Handwritten digits with Lightning, which starts the ranks itself.

    python examples/lightning_digits.py --strategy bagua
    BAGUA_AUTOTUNE=1 python examples/lightning_digits.py --strategy bagua_bytegrad

The data are scikit-learn's (1,797 images of 8 x 8, shipped with it): nothing is downloaded.
The line that a training under ``strategy="ddp"`` has not is marked.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import bagua_client.lightning  # noqa: F401  (the line that is new: it makes the names known)
from bagua_client.algorithms import QAdamOptimizer

Batch = tuple[Tensor, Tensor]


class Digits(L.LightningDataModule):
    """Images (1, 8, 8) in 0..1 and their labels: 1,300 to train, 137 to validate, 360 to test."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.tensor(data.target))
        generator = torch.Generator().manual_seed(0)
        self.parts = random_split(dataset, [1300, 137, 360], generator)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts[1], self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts[2], self.batch_size)


class Classifier(L.LightningModule):
    """Two convolutions and two dense layers: 0.3 million parameters."""

    def __init__(self, learning_rate: float = 1e-3, quantized: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_accuracy("validation", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_accuracy("test", batch)

    def _log_accuracy(self, of: str, batch: Batch) -> None:
        images, labels = batch
        right = self.layers(images).argmax(1) == labels
        self.log(f"{of}_accuracy", right.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.hparams["quantized"]:  # the one optimizer that the algorithm qadam works with
            return QAdamOptimizer(self.parameters(), self.hparams["learning_rate"])
        return torch.optim.AdamW(self.parameters(), self.hparams["learning_rate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="bagua", help="such as ddp, bagua, bagua_bytegrad")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--folder", default="lightning_digits", help="for logs and checkpoints")
    arguments = parser.parse_args()

    L.seed_everything(0)
    accuracy: dict[str, Any] = {"monitor": "validation_accuracy", "mode": "max"}
    best = ModelCheckpoint(save_last=True, **accuracy)
    trainer = L.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=[EarlyStopping(patience=5, **accuracy), best],
        logger=CSVLogger(arguments.folder),
        log_every_n_steps=10,
    )
    model = Classifier(quantized=arguments.strategy == "bagua_qadam")
    trainer.fit(model, datamodule=Digits())
    (found,) = trainer.test(model, datamodule=Digits(), ckpt_path=best.best_model_path)
    if trainer.is_global_zero:
        print(f"test accuracy {found['test_accuracy']:.1%}, epoch {trainer.current_epoch}")


if __name__ == "__main__":
    main()
