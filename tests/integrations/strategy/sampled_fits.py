"""Trainings by Lightning's Trainer, on one rank of two, that are fed by the samplers of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from bagua_training.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from tests.integrations.strategy.strategy_fits import Place
from tests.integrations.trainings import regression
from tests.integrations.trainings.lightning_modules import Batch, Regression, of

LENGTHS = torch.randint(1, 50, (41,), generator=torch.Generator().manual_seed(0)).tolist()
EPOCHS = 3

Loader = DataLoader[Any]


class Seeing(Regression):
    """Keeps the indices of each batch's samples, which are their first inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(regression.WIDTH, regression.TARGETS)  # Batches of one, too.
        self.seen: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        self.seen[-1].append(batch[0][:, 0].long().tolist())
        return self.loss(batch)


def dataset() -> TensorDataset:
    inputs = torch.zeros(len(LENGTHS), regression.WIDTH)
    inputs[:, 0] = torch.arange(len(LENGTHS))
    return TensorDataset(inputs, inputs[:, : regression.TARGETS])


def two_each(rank: int | None = None) -> Loader:
    """Batches of two; of this rank, or the one that is named."""
    sampler = LoadBalancingDistributedSampler(
        dataset(), None, 2, dist.get_rank() if rank is None else rank, complexities=LENGTHS
    )
    return DataLoader(dataset(), 2, sampler=sampler)


def by_length(rank: int | None = None) -> Loader:
    """Batches of at most 65 in length, whose number differs from epoch to epoch."""

    def limited(indices: list[int]) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for index in indices:
            if sum(LENGTHS[other] for other in found[-1]) + LENGTHS[index] > 65:
                found.append([])
            found[-1].append(index)
        return found

    sampler: Any = two_each(rank).sampler
    batches = LoadBalancingDistributedBatchSampler(sampler, limited)
    return DataLoader(dataset(), batch_sampler=batches)


def fit(place: Place, make: Callable[[], Loader], **options: Any) -> list[list[list[int]]]:
    """The samples of each batch of each epoch, on this rank."""
    module = of(place.lightning, Seeing)
    trainer = place.lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=place.strategy(),
        max_epochs=EPOCHS,
        default_root_dir=place.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )

    def train_dataloader() -> Loader:
        """Called when the process group is there, and in each epoch where it is to be reloaded."""
        loader = make()
        set_epoch(loader, module.current_epoch)
        return loader

    module.train_dataloader = train_dataloader
    trainer.fit(module)
    seen: list[list[list[int]]] = module.seen
    return seen


def expected(make: Callable[[int], Loader], rank: int) -> list[list[list[int]]]:
    """What a loop of one's own would get, with ``set_epoch`` before each epoch."""
    loader = make(rank)
    epochs = []
    for epoch in range(EPOCHS):
        set_epoch(loader, epoch)
        epochs.append([batch[0][:, 0].long().tolist() for batch in loader])
    return epochs


def set_epoch(loader: Loader, epoch: int) -> None:
    sampler: Any = loader.sampler if hasattr(loader.sampler, "set_epoch") else loader.batch_sampler
    sampler.set_epoch(epoch)


def check_kept(place: Place) -> None:
    """Each epoch has the batches that the sampler makes for it."""
    assert fit(place, two_each) == expected(two_each, dist.get_rank())


def check_by_length(place: Place) -> None:
    """Lightning counts the batches once, and leaves out what a later epoch has beyond that."""
    wanted = expected(by_length, dist.get_rank())
    counts = [len(epoch) for epoch in wanted]
    assert counts[1] > counts[0] > counts[2]
    options = {"use_distributed_sampler": False}
    assert fit(place, by_length, **options) == [epoch[: counts[0]] for epoch in wanted]
    # Unless it is made to count in each epoch.
    assert fit(place, by_length, **options, reload_dataloaders_every_n_epochs=1) == wanted


def said_of_a_batch_sampler(place: Place) -> str:
    """What Lightning says of a batch sampler that it may replace."""
    try:
        fit(place, by_length)
    except TypeError as error:
        return str(error)
    return ""
