"""Simulated Bagua 0.9 workers of the real service, without HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

from bagua_autotune.model.job import Limits
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import AtOnce, Background
from bagua_autotune.tuning.tuner import Tuner
from bagua_v1.hyperparameters import ELEMENT_BYTES, tensor, to_configuration
from bagua_v1.tuning import BaguaTuning
from tests.autotune.support import Clock

MIB = 1024**2
addresses = count(140_234_234_230_000, 16)
TENSORS = [tensor(f"layer{i}.weight", (i + 1) * MIB, "f32") for i in range(5)]
QUICK = Limits(max_samples=40, trial_seconds=0.001, warmup_seconds=0)
Wire = dict[str, Any]
Speed = Callable[[int, Wire], float]


def tuning(
    store: Store,
    world_size: int | None = 2,
    searcher: str = "random",
    background: Background | None = None,
    default_bucket_bytes: int = 10 * MIB,
    clock: Clock | None = None,
) -> BaguaTuning:
    """Searching at random where the search does not matter: it takes no time."""
    clock = clock or Clock()
    tuner = Tuner(store, searcher, clock=clock, background=background or AtOnce())
    return BaguaTuning(tuner, QUICK, world_size, default_bucket_bytes, clock)


class Worker:
    """One rank of one model, as Bagua 0.9 behaves between two of its cycles."""

    def __init__(self, service: BaguaTuning, name: str, rank: int, speed: Speed) -> None:
        self.service, self.name, self.rank, self.speed = service, name, rank, speed
        self.running: Wire = {}
        self.is_completed = False

    def register(self) -> None:
        self.service.register(self.name, TENSORS)

    def report(self, iteration: int) -> None:
        ran = to_configuration(self.running["bucket_size"], self.running["is_hierarchical_reduce"])
        speed = self.speed(self.rank, self.running)
        self.service.report(self.name, self.rank, iteration, ran, speed)

    def ask(self, iteration: int) -> None:
        wire, self.is_completed = self.service.ask(self.name, self.rank, iteration)
        self.running = json.loads(wire)


def peaked(rank: int, wire: Wire) -> float:
    """Bagua's own test objective: best are buckets of 20 MiB, flat."""
    sizes = [
        sum(member["num_elements"] * ELEMENT_BYTES[member["dtype"]] for member in bucket)
        for bucket in wire["buckets"]
    ]
    score = -sum(abs(size - 20 * MIB) for size in sizes)
    return score * (1.1 if wire["is_hierarchical_reduce"] else 1.0)


def enter(workers: list[Worker]) -> None:
    for worker in workers:
        worker.register()
        worker.ask(0)


def cycle(workers: list[Worker], iteration: int) -> None:
    """All ranks report and ask, and are told the same."""
    for worker in workers:
        worker.report(iteration)
        worker.ask(iteration)
    answers = [(worker.running, worker.is_completed) for worker in workers]
    assert all(answer == answers[0] for answer in answers)


def cycles(workers: list[Worker], first: int, end: int) -> None:
    """A window after the other."""
    for iteration in range(first, end, 100):
        cycle(workers, iteration)


def finish(workers: list[Worker], iteration: int = 100) -> int:
    """All ranks in step until they are told that tuning is over; returns the iteration."""
    for now in range(iteration, iteration + 20_000, 100):
        cycle(workers, now)
        if workers[0].is_completed:
            return now
    raise AssertionError("tuning did not end")


def run(workers: list[Worker]) -> int:
    enter(workers)
    return finish(workers)


def ranks_of(service: BaguaTuning, speed: Speed | None = None, count: int = 2) -> list[Worker]:
    """The ranks of one model, which run the default."""
    workers = [Worker(service, "net", rank, speed or peaked) for rank in range(count)]
    enter(workers)
    return workers


# The best of peaked() for the five tensors of 4 to 20 MiB: [0, 1, 2], [3], [4].
BEST = -8.0 * MIB


def processes(service: BaguaTuning, ranks: int = 2, models: int = 1) -> list[list[Worker]]:
    """By model the ranks' workers, under names that nobody had before."""
    return [
        [Worker(service, f"Net_{next(addresses)}", rank, peaked) for rank in range(ranks)]
        for _ in range(models)
    ]
