"""Whatever died before, all ranks of a model are told the same: any order, any moment of death."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_autotune.store import Store
from bagua_v1.family import Family, Grant, Window
from bagua_v1.hyperparameters import to_wire
from tests.autotune.support import Later, present, stored_jobs
from tests.v1.worker import MIB, Worker, addresses, tuning

pytestmark = pytest.mark.slow


class Pure:
    """A service that is nothing but a family's state, and grants something new when it can."""

    def __init__(self, world_size: int | None, chance: random.Random) -> None:
        self.world_size, self.chance = world_size, chance
        self.family = Family.new("Net", {"size": 0}, 0.0)

    def register(self, name: str, _tensors: object) -> None: ...

    def report(self, name: str, rank: int, iteration: int, *_: object) -> None:
        window = Window(iteration=iteration, speed=1.0)
        self.family = self.family.reported(rank, name, window, True, 0.0)

    def ask(self, name: str, rank: int, iteration: int) -> tuple[str, bool]:
        # As it is stored.
        self.family = Family.model_validate_json(self.family.model_dump_json())
        if self.family.is_entering(rank, name, iteration):
            self.family = self.family.entered(rank, iteration, 0.0)
            return BASELINE, False
        grant = None
        if self.chance.random() < 0.7:
            size = self.chance.randrange(1, 2**40)
            configuration = {"bucket_bytes": size, "hierarchical": "off"}
            grant = Grant(from_iteration=iteration, configuration=configuration, trial=1, at=0.0)
        self.family = self.family.asked(rank, name, iteration, grant, self.world_size)
        position = present(self.family.position(rank, name))
        told = self.family.models[position].grant_at(iteration).configuration
        return (BASELINE if told == {"size": 0} else json.dumps(to_wire([], told))), False


BASELINE = json.dumps(to_wire([], {"bucket_bytes": 10 * MIB, "hierarchical": "off"}))


@dataclass(frozen=True)
class History:
    """``lives``: after how many requests each dies, if the run is not over before."""

    ranks: int
    models: int
    lives: list[int]
    knows_world_size: bool
    is_named_by_address: bool
    seed: int

    @property
    def world_size(self) -> int | None:
        return self.ranks if self.knows_world_size else None


def histories(longest_life: int) -> st.SearchStrategy[History]:
    return st.builds(
        History,
        ranks=st.integers(1, 4),
        models=st.integers(1, 2),
        lives=st.lists(st.integers(1, longest_life), min_size=1, max_size=4),
        knows_world_size=st.booleans(),
        is_named_by_address=st.booleans(),
        seed=st.integers(0, 2**32),
    )


def requests_of(
    models: list[Worker], windows: int, chance: random.Random
) -> list[Callable[[], None] | None]:
    """What a rank does, in order; at None it waits for the others, as training makes it."""
    found: list[Callable[[], None] | None] = []
    for worker in models:
        found += [worker.register, partial(worker.ask, 0)]
    for iteration in range(100, 100 * windows, 100):
        found.append(None)
        for worker in models:
            found += [partial(worker.report, iteration), partial(worker.ask, iteration)]
            if chance.random() < 0.2:
                found.append(partial(ask_besides, worker, iteration + 37))
    return found


def ask_besides(worker: Worker, iteration: int) -> None:
    """A rank with unused parameters asks in the middle of a window: nothing may change."""
    before = (worker.running, worker.is_completed)
    worker.ask(iteration)
    assert (worker.running, worker.is_completed) == before


def live(
    ranks: list[list[Worker]], length: int, chance: random.Random, between: Callable[[], None]
) -> dict[tuple[int, int], list[Any]]:
    """Let the ranks do so many requests in any order that training allows.

    Returns what they were told, by model and iteration.
    """
    told: dict[tuple[int, int], list[Any]] = defaultdict(list)
    plans = [requests_of(models, 1 + length, chance) for models in ranks]
    for _ in range(length):
        ready = [rank for rank, plan in enumerate(plans) if plan[0] is not None]
        if not ready:
            for plan in plans:
                plan.pop(0)
            ready = list(range(len(plans)))
        rank = chance.choice(ready)
        request = present(plans[rank].pop(0))
        repeats = 2 if isinstance(request, partial) and chance.random() < 0.1 else 1
        for _ in range(repeats):  # the first answer was lost
            request()
        between()
        if isinstance(request, partial) and request.func.__name__ == "ask":
            worker = request.func.__self__
            (iteration,) = request.args
            told[ranks[rank].index(worker), iteration].append((worker.running, worker.is_completed))
    return told


def assert_told_the_same(told: dict[tuple[int, int], list[Any]]) -> None:
    for (model, iteration), answers in told.items():
        assert all(answer == answers[0] for answer in answers), (model, iteration)


def ranks_of(history: History, services: list[Any], chance: random.Random) -> list[list[Worker]]:
    """A new run: by rank its models, each rank speaking to any of the services."""
    return [
        [
            Worker(
                chance.choice(services),
                f"Net_{next(addresses)}" if history.is_named_by_address else f"net{model}",
                rank,
                lambda *_: 10.0,
            )
            for model in range(history.models)
        ]
        for rank in range(history.ranks)
    ]


@given(histories(longest_life=200))
def test_whatever_died_before_all_ranks_are_told_the_same_and_it_goes_on(history):
    chance = random.Random(history.seed)
    if not history.is_named_by_address:
        history = replace(history, models=1)
    service = Pure(history.world_size, chance)
    for length in history.lives:
        ranks = ranks_of(history, [service], chance)
        assert_told_the_same(live(ranks, length, chance, lambda: None))
    ranks = ranks_of(history, [service], chance)
    told = live(ranks, 40 * history.ranks * history.models, chance, lambda: None)
    assert_told_the_same(told)
    for model in range(history.models):
        sizes = {answers[0][0]["bucket_size"] for (m, _), answers in told.items() if m == model}
        assert len(sizes) > 3, "a run after others was not tuned"


@settings(max_examples=10)
@given(histories(longest_life=80))
def test_two_services_with_decisions_at_any_time_tell_all_ranks_the_same(history):
    chance = random.Random(history.seed)
    store = Store("sqlite://")
    decisions = [Later(), Later()]
    services = [tuning(store, history.world_size, background=later) for later in decisions]

    def between() -> None:
        if chance.random() < 0.2:
            chance.choice(decisions).finish()

    for length in history.lives:
        ranks = ranks_of(history, services, chance)
        assert_told_the_same(live(ranks, length, chance, between))
    assert len(stored_jobs(store)) <= history.models
    store.close()
