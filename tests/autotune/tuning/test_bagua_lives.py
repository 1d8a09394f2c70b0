"""Runs that die and begin anew: jobs go on, and no two ranks of a model are told differently."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete

from bagua_autotune.store import Store
from bagua_autotune.store.tables import JobRow
from bagua_autotune.tuning.bagua.family import Family, Grant, Window
from bagua_autotune.tuning.bagua.hyperparameters import to_wire
from bagua_autotune.tuning.bagua.tuning import BaguaTuning
from tests.autotune.tuning.bagua_worker import (
    BEST,
    MIB,
    TENSORS,
    Later,
    Worker,
    cycle,
    enter,
    peaked,
    run,
    tuning,
)

addresses = count(140_234_234_230_000, 16)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/autotune.db")
    yield store
    store.close()


def processes(service: BaguaTuning, ranks: int = 2, models: int = 1) -> list[list[Worker]]:
    """By model the ranks' workers, under names that nobody had before."""
    return [
        [Worker(service, f"Net_{next(addresses)}", rank, peaked) for rank in range(ranks)]
        for _ in range(models)
    ]


def test_a_service_restarted_in_the_middle_goes_on(tmp_path):
    url = f"sqlite:///{tmp_path}/autotune.db"
    first = Store(url)
    workers = [Worker(tuning(first, searcher="bayesian"), "net", rank, peaked) for rank in range(2)]
    enter(workers)
    for iteration in range(100, 1500, 100):
        cycle(workers, iteration)
    (job,) = first.jobs()
    before = len(first.trials(job.id))
    assert before > 2
    running = workers[0].running
    first.close()

    second = Store(url)
    for worker in workers:
        worker.service = tuning(second, searcher="bayesian")
    workers[0].ask(1400)
    assert workers[0].running == running
    for iteration in range(1500, 20_000, 100):
        cycle(workers, iteration)
        if workers[0].is_completed:
            break
    assert peaked(0, workers[0].running) == BEST
    assert len(second.trials(job.id)) > before
    second.close()


@pytest.mark.parametrize("is_named_by_address", [False, True])
def test_a_run_begun_anew_goes_on_with_the_job_and_in_the_end_with_its_choice(
    store, is_named_by_address
):
    service = tuning(store, searcher="bayesian")

    def life() -> list[Worker]:
        if is_named_by_address:
            return processes(service)[0]
        return [Worker(service, "net", rank, peaked) for rank in range(2)]

    first = life()
    enter(first)
    for iteration in range(100, 1500, 100):
        cycle(first, iteration)
    (job,) = store.jobs()
    before = store.trials(job.id)
    assert len(before) > 2

    second = life()
    run(second)
    final = second[0].running
    assert peaked(0, final) == BEST
    assert store.trials(job.id)[: len(before) - 1] == before[:-1]
    assert len(store.trials(job.id)) > len(before)

    third = life()
    assert run(third) == 200
    assert third[0].running == final
    assert [other.id for other in store.jobs()] == [job.id]


@pytest.mark.parametrize("world_size", [2, None])
def test_a_run_of_which_only_some_ranks_had_begun_leaves_no_trace(store, world_size):
    service = tuning(store, world_size)
    enter(processes(service)[0][:1])
    for _ in range(2):
        first, second = processes(service, models=2)
        enter(first)
        enter(second)
        for iteration in range(100, 1500, 100):
            cycle(first, iteration)
            cycle(second, iteration)
    assert len(store.jobs()) == 2
    assert all(len(store.trials(job.id)) > 2 for job in store.jobs())


def test_a_process_that_outlives_its_run_stops_the_tuning_and_parts_nobody(store, caplog):
    service = tuning(store)
    (complete,), (first,), (second,) = (processes(service) for _ in range(3))
    enter(complete)
    for iteration in range(100, 1500, 100):
        cycle(complete, iteration)
    (job,) = store.jobs()
    before = len(store.trials(job.id))
    for workers in (first, second):
        enter(workers)
    first[0].report(100)
    first[0].ask(100)
    for iteration in range(100, 2000, 100):
        cycle(second[::-1], iteration)
        assert second[0].running["bucket_size"] == 10 * MIB
    (warning,) = caplog.messages
    assert "stand" in warning
    assert len(store.trials(job.id)) == before > 2


def test_two_that_outlive_theirs_do_so_even_where_no_model_lacks_a_rank(store):
    service = tuning(store)
    (old,) = processes(service)
    twins = processes(service, models=2)
    for workers in (old, *twins):
        enter(workers)
    ranks = [[old[0], twins[0][0], twins[1][0]], [twins[0][1], twins[1][1], old[1]]]
    for workers in ranks:
        for worker in workers:
            worker.report(100)
            worker.ask(100)
    for iteration in range(200, 2000, 100):
        for workers in twins:
            cycle(workers, iteration)
    assert all(trial.index == 0 for job in store.jobs() for trial in store.trials(job.id))


def test_twins_are_two_jobs_whatever_their_pace(store):
    service = tuning(store, searcher="bayesian")
    often, seldom = processes(service, models=2)
    enter(often)
    enter(seldom)
    for iteration in range(100, 20_000, 100):
        if not often[0].is_completed:
            cycle(often, iteration)
        if iteration % 300 == 0:
            cycle(seldom, iteration // 3)
            if seldom[0].is_completed:
                break
    assert [peaked(0, twin[0].running) for twin in (often, seldom)] == [BEST] * 2
    assert [job.phase for job in store.jobs("Net")] == ["finished"] * 2


def test_a_twin_made_while_the_first_is_trained_disturbs_it_little(store):
    service = tuning(store, searcher="bayesian")
    first, second = processes(service, models=2)
    enter(first)
    for iteration in range(100, 1500, 100):
        cycle(first, iteration)
    enter(second)
    for iteration in range(1500, 30_000, 100):
        if not first[0].is_completed:
            cycle(first, iteration)
        if not second[0].is_completed:
            cycle(second, iteration - 1400)
    assert [peaked(0, twin[0].running) for twin in (first, second)] == [BEST] * 2


def test_the_same_name_with_other_tensors_is_a_new_job(store):
    service = tuning(store)
    service.register("net", TENSORS)
    service.ask("net", 0, 0)
    wire = service.register("net", TENSORS[:2])
    assert len([member for bucket in wire["buckets"] for member in bucket]) == 2
    assert service.ask("net", 0, 0)[0] == wire
    assert sorted(job.phase for job in store.jobs()) == ["ended", "tuning"]
    service.register("net", TENSORS)
    assert len(service.ask("net", 0, 0)[0]["buckets"]) > len(wire["buckets"])
    assert len(store.jobs()) == 2


@pytest.mark.parametrize(
    "other", [{"world_size": 4}, {"world_size": None}, {"default_bucket_bytes": 7 * MIB}]
)
def test_a_service_started_otherwise_does_not_give_an_old_run_s_choice(store, other):
    run([Worker(tuning(store), "net", rank, peaked) for rank in range(2)])
    service = tuning(store, **other)
    workers = [Worker(service, "net", rank, peaked) for rank in range(2)]
    enter(workers)
    cycle(workers, 100)
    cycle(workers, 200)
    assert not workers[0].is_completed
    assert workers[0].running["bucket_size"] == other.get("default_bucket_bytes", 10 * MIB)
    assert sorted(job.phase for job in store.jobs())[0] == "finished"


def test_a_job_that_was_removed_is_made_again(store):
    service = tuning(store)
    twins = processes(service, models=2)
    for twin in twins:
        enter(twin)
    for iteration in (100, 200):
        for twin in twins:
            cycle(twin, iteration)
    second = store.jobs()[0].id
    with store.database.writing() as session:
        session.execute(delete(JobRow).where(JobRow.id == second))
    for iteration in range(300, 1500, 100):
        for twin in twins:
            cycle(twin, iteration)
    assert len(store.jobs()) == 2


class Pure:
    """A service that is nothing but a family's state, and grants something new when it can."""

    def __init__(self, world_size: int | None, chance: random.Random) -> None:
        self.world_size, self.chance = world_size, chance
        self.family = Family.new("Net", {"size": 0}, 0.0)

    def register(self, name: str, _tensors: object) -> None: ...

    def report(self, name: str, rank: int, iteration: int, *_: object) -> None:
        window = Window(iteration=iteration, speed=1.0)
        self.family = self.family.reported(rank, name, window, True, 0.0)

    def ask(self, name: str, rank: int, iteration: int) -> tuple[dict[str, Any], bool]:
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
        position = self.family.position(rank, name)
        assert position is not None
        told = self.family.models[position].grant_at(iteration).configuration
        return (BASELINE if told == {"size": 0} else to_wire([], told)), False


BASELINE = to_wire([], {"bucket_bytes": 10 * MIB, "hierarchical": "off"})


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
        request = plans[rank].pop(0)
        assert request is not None
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


@settings(max_examples=300)
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


@settings(max_examples=20)
@given(histories(longest_life=120))
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
    assert len(store.jobs()) <= history.models
    store.close()
