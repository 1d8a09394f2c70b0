"""Samplers that give all ranks samples of about the same cost in the same step.

In synchronous training a step takes as long as its slowest rank. Where samples differ in cost, as
sentences do in length, a random split makes some rank slow in nearly every step. Bagua's answer,
kept here: sort the samples by a complexity that you know, and give the neighbours in that order to
the ranks in the same step.

Beyond Bagua: all ranks have equally many batches, whatever makes the batches (with Bagua 0.9 some
jobs hang); no rank always gets the largest sample of a step; each complexity is computed once in
the whole job; what is left out is chosen anew in each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, Sampler

Sample = TypeVar("Sample", covariant=True)


class LoadBalancingDistributedSampler(DistributedSampler[int]):
    """Gives all ranks samples of similar complexity in each step.

    A drop-in for ``torch.utils.data.DistributedSampler``, and a subclass of it, so that frameworks
    know it for a sampler that has split the samples already. All ranks must make it together, with
    the same arguments: where ``torch.distributed`` is in use they share the computing of the
    complexities.

    Args:
        dataset: with a length and ``dataset[index]``.
        complexity_fn: the cost of a sample, as a number: for example its length. Called once for
            each sample of the dataset, by one of the ranks.
        num_replicas, rank: by default the process group's.
        shuffle: whether the order of the steps, and who gets which sample in a step, differ from
            epoch to epoch; without it the complexity ascends.
        seed: the same on all ranks.
        drop_last: where the ranks do not divide the dataset, leave some samples out rather than
            repeat some. Which ones differs from epoch to epoch.
        random_level: from 0, neighbours of the sorted order go together, to 1, the order is nearly
            that of chance; more random steps for less balance.
        complexities: in place of ``complexity_fn``, one number for each sample, in their order.

    Raises:
        ValueError: ``random_level`` or ``rank`` is out of range, a complexity is no finite number,
            or there are not as many as samples.
        RuntimeError: ``complexity_fn`` failed, on some rank.
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        complexity_fn: Callable[[Sample], Any] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
        complexities: Iterable[float] | torch.Tensor | None = None,
    ) -> None:
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level must be from 0 to 1, not {random_level}")
        if (complexity_fn is None) == (complexities is None):
            raise ValueError("give complexity_fn or complexities, one of the two")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.random_level = random_level
        self.dataset_length = _length(dataset)
        if complexity_fn is not None:
            complexities = _computed(dataset, complexity_fn, self.num_replicas)
        assert complexities is not None
        self.complexities = _checked(complexities, self.dataset_length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_all_ranks()[self.rank])

    def of_all_ranks(self) -> list[list[int]]:
        """The indices of each rank in this epoch; the same on every rank."""
        generator = torch.Generator().manual_seed(int(self.seed + self.epoch))
        indices = self._as_many_as_needed(generator)
        costs = self.complexities[indices]
        if self.random_level and len(indices):
            spread = float(self.complexities.max() - self.complexities.min())
            noise = torch.rand(len(costs), generator=generator, dtype=torch.float64)
            costs = costs + self.random_level * spread * noise
        steps = indices[torch.argsort(costs, stable=True)].view(self.num_samples, self.num_replicas)
        return self._dealt(steps, generator).t().tolist()

    def _as_many_as_needed(self, generator: torch.Generator) -> torch.Tensor:
        """Return samples in ascending order; some left out, or twice, so that the ranks divide
        them.
        """
        everything = torch.arange(self.dataset_length)
        wanted = self.num_samples * self.num_replicas
        if wanted == self.dataset_length or not self.dataset_length:
            return everything[:wanted]
        order = torch.randperm(self.dataset_length, generator=generator)
        rounds = math.ceil(wanted / self.dataset_length)
        return torch.cat([everything] * (rounds - 1) + [order])[:wanted].sort().values

    def _dealt(self, steps: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Deal the samples: which rank gets which of a step, and the order of the steps.

        Each step's samples ascend; if rank i had the i-th, the last rank would always be slowest.
        """
        if self.shuffle:
            chances = torch.rand(steps.shape, generator=generator)
            steps = steps.gather(1, chances.argsort(1))
            return steps[torch.randperm(len(steps), generator=generator)]
        turns = torch.arange(len(steps))[:, None] + torch.arange(self.num_replicas)
        return steps.gather(1, turns % self.num_replicas)


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of different sizes, equally many on all ranks: for a limit of tokens, for example.

    Args:
        sampler: whose order the batches are made of.
        batch_fn: makes batches of a rank's indices. Each rank calls it for all ranks, so it must
            give the same batches for the same indices. Batches without samples are left out.
        drop_last: ranks that have more batches than others leave the last ones out; otherwise
            those that have fewer repeat their first ones.

    Raises:
        ValueError: the sampler is another, or leaves samples out by itself.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Iterable[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler) or sampler.drop_last:
            raise ValueError("sampler must be a LoadBalancingDistributedSampler without drop_last")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._made: tuple[int, list[list[int]]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, before each one; the sampler's own method does the same."""
        self.sampler.set_epoch(epoch)

    def _batches(self) -> list[list[int]]:
        """Return this rank's batches of the sampler's epoch.

        Raises:
            ValueError: ``batch_fn`` makes no batches for a rank, which has none to repeat then.
        """
        epoch = self.sampler.epoch
        if self._made is None or self._made[0] != epoch:
            self._made = epoch, self._make()
        return self._made[1]

    def _make(self) -> list[list[int]]:
        of_ranks = [
            [batch for batch in self.batch_fn(indices) if len(batch)]
            for indices in self.sampler.of_all_ranks()
        ]
        numbers = [len(batches) for batches in of_ranks]
        own = of_ranks[self.sampler.rank]
        if self.drop_last:
            return own[: min(numbers)]
        if max(numbers) and not min(numbers):
            empty = numbers.index(0)
            raise ValueError(
                f"batch_fn makes no batch for rank {empty}, and {max(numbers)} for others"
            )
        return [own[number % len(own)] for number in range(max(numbers))]


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]


def _computed(
    dataset: Dataset[Sample], complexity_fn: Callable[[Sample], Any], num_replicas: int
) -> list[float]:
    """The complexities of all samples; each rank computes a part, where these are the ranks of the
    job.

    Raises:
        RuntimeError: that failed, on some rank; on all of them.
    """
    length = _length(dataset)
    is_shared = dist.is_initialized() and dist.get_world_size() == num_replicas
    rank, ranks = (dist.get_rank(), num_replicas) if is_shared else (0, 1)
    part: list[float] | str
    try:
        part = [float(complexity_fn(dataset[index])) for index in range(rank, length, ranks)]
    except Exception as error:
        if not is_shared:
            raise
        part = f"rank {rank}: {error!r}"  # The others must not wait for this rank.
    parts: list[Any] = [part]
    if is_shared:
        parts = [None] * ranks
        dist.all_gather_object(parts, part)
    if failed := [part for part in parts if isinstance(part, str)]:
        raise RuntimeError(f"complexity_fn failed on {failed[0]}")
    return [parts[index % ranks][index // ranks] for index in range(length)]


def _checked(complexities: Iterable[float] | torch.Tensor, length: int) -> torch.Tensor:
    if not isinstance(complexities, torch.Tensor):
        # Torch would index it, and a column of pandas is indexed by labels, not by position.
        complexities = torch.tensor(list(complexities), dtype=torch.float64)
    found = complexities.to("cpu", torch.float64)
    if found.shape != (length,):
        raise ValueError(
            f"there are {length} samples, but complexities of shape {tuple(found.shape)}"
        )
    if not found.isfinite().all():
        index = int((~found.isfinite()).nonzero()[0])
        raise ValueError(f"the complexity of sample {index} is {found[index]}")
    return found
