"""What Bagua's protocol stores, on every database."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.model.job import Observation
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance import retention
from bagua_v1.family import Family
from bagua_v1.storage import Known, NotRegistered, Storage
from tests.autotune.store.samples import FIRST
from tests.autotune.support import counting, make_spec, stored_jobs
from tests.v1.worker import TENSORS

pytestmark = pytest.mark.slow


NEW = Family.new("DDP", {"bucket_bytes": 10 << 20, "hierarchical": "off"}, 0.0)


def entered(iteration: int) -> Family:
    return NEW.model_copy(update={"entered_iteration": iteration})


def one_later(known: Known) -> tuple[Family, int]:
    return entered((known.family.entered_iteration or 0) + 1), 0


@pytest.fixture
def store(every_store: Store) -> Store:
    return every_store


def test_threads_that_write_at_once_lose_nothing(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    replicas = [Storage(store) for _ in range(2)]
    replicas[0].register("2/DDP_140", "family", NEW)
    failures: list[BaseException] = []

    def write(rank: int) -> None:
        try:
            for step in range(10):
                store.observations.add_value(job, 0, step, rank, float(rank), 1.0)
                replicas[rank % 2].change("2/DDP_140", one_later)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [found.values for _, found in store.observations.of(job, 0)] == [
        (0.0, 1.0, 2.0, 3.0)
    ] * 10
    for replica in replicas:
        assert replica.find("2/DDP_140").family == entered(40)


def test_a_rank_value_is_taken_once(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    assert store.observations.add_value(job, 0, 100, 1, 2.5, 1.0)
    assert not store.observations.add_value(job, 0, 100, 1, 9.0, 1.0)
    assert store.observations.of(job, 0) == [(0, Observation(100, (None, 2.5)))]


def test_a_job_is_widened_to_the_ranks_that_were_seen(store: Store) -> None:
    store.jobs.create("bagua", make_spec(world_size=1, ranks_per_node=[1]), at=1.0, protocol="v1")
    for count in (3, 2):
        store.jobs.widen("bagua", count)
    job = store.jobs.get("bagua")
    assert (job.world_size, job.ranks_per_node) == (3, (3,))


def test_a_family_is_found_by_its_aliases_and_keeps_its_state(store: Store) -> None:
    storage = Storage(store)
    assert storage.known("2/DDP_140") is None
    with pytest.raises(NotRegistered, match=r"^DDP_140$"):
        storage.change("2/DDP_140", one_later)
    assert storage.register("2/DDP_140", "family", NEW)[0] is None
    storage.register("2/DDP_141", "family", entered(99))
    assert storage.find("2/DDP_141").key == storage.find("2/DDP_140").key == "family"
    storage.change("2/DDP_141", one_later)
    store.families.extend_order("family", ["b", "a"])
    store.families.extend_order("family", ["a", "c", "b"])
    known = storage.change("2/DDP_140", one_later).before
    assert (known.family, known.order) == (entered(1), ["b", "a", "c"])
    store.families.extend_order("other", ["a"])  # of which nothing is left


def test_a_change_is_made_of_what_another_replica_stored(store: Store) -> None:
    first, second = Storage(store), Storage(store)
    first.register("2/net", "family", NEW)
    first.change("2/net", one_later)
    second.change("2/net", one_later)
    changed = first.change("2/net", one_later)
    assert changed.before.family == entered(2), "it knew of one"
    assert second.find("2/net").family == changed.after.family == entered(3)


def test_a_name_that_another_replica_gave_to_another_model_means_that(store: Store) -> None:
    first, second = Storage(store), Storage(store)
    first.register("2/net", "family", NEW)
    first.register("2/same", "family", NEW)
    first.change("2/net", one_later)
    before, now = second.register("2/net", "other", NEW)
    assert before is not None
    assert (before.key, now.key) == ("family", "other")
    assert first.change("2/net", one_later).before.key == "other"
    assert first.find("2/same").family == first.find("2/net").family == entered(1)


def test_a_family_that_was_deleted_is_not_registered_for_any_replica(store: Store) -> None:
    first, second = Storage(store), Storage(store)
    first.register("2/net", "family", NEW)
    second.change("2/net", one_later)
    store.families.forget()
    for replica in (first, second):
        with pytest.raises(NotRegistered):
            replica.change("2/net", one_later)


def test_a_change_tells_what_is_stored_of_the_job(store: Store) -> None:
    job_id = NEW.models[0].job_id
    storage = Storage(store)
    storage.register("2/net", "family", NEW)
    assert storage.change("2/net", one_later).job == (None, None, None)
    store.jobs.create(job_id, make_spec(), at=5.0, protocol="v1", data={"family": "family"})
    store.jobs.touch(job_id, 7.0)
    assert storage.change("2/net", one_later).job == (5.0, 0, 7.0)


def test_only_families_of_jobs_still_tuned_and_heard_of_are_listed(store: Store) -> None:
    for number in range(3):
        data = {"family": f"f{number}"}
        store.jobs.create(f"j{number}", make_spec(), at=number, protocol="v1", data=data)
    store.jobs.end("j2", 3.0)
    store.jobs.create("other", make_spec(), at=2.0)
    assert store.families.being_tuned(0.5) == {"f1": "j1"}


def test_a_family_without_a_job_is_forgotten_with_its_aliases(store: Store) -> None:
    store.jobs.create("j", make_spec(), at=1.0, protocol="v1", data={"family": "kept"})
    store.jobs.create("old", make_spec(), at=0.0, protocol="v1", data={"family": "orphan"})
    for key in ("kept", "orphan"):
        Storage(store).register(f"{key}_140", key, NEW)
    assert [pruned.id for pruned in retention.prune(store, 1.0)] == ["old"]
    assert Storage(store).find("kept_140").key == "kept"
    assert Storage(store).known("orphan_140") is None


def test_whatever_is_written_of_a_job_raises_its_revision(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    before = store.jobs.get(job).revision
    assert store.observations.add_value(job, 0, 1, 0, 2.5, 9.0)
    assert store.jobs.get(job).revision == before + 1
    store.jobs.widen(job, 7)
    assert store.jobs.get(job).revision == before + 2


RANKS = 4
WIRE_TENSORS = [{"name": t.name, "num_elements": t.elements, "dtype": t.dtype} for t in TENSORS]


class Rank:
    """A worker that sends each request to another replica."""

    def __init__(self, replicas: list[FlaskClient], rank: int) -> None:
        self.replicas, self.rank, self.chance = replicas, rank, random.Random(rank)
        self.running: dict[str, Any] = {}
        self.speed = 10.0 + rank

    def post(self, what: str, **body: Any) -> Any:
        client = self.chance.choice(self.replicas)
        answer = client.post(f"/api/v1/{what}", json={"model_name": "net", **body})
        assert answer.status_code == 200, answer.text
        return answer.get_json()

    def register(self) -> None:
        self.post("register_tensors", tensor_list=WIRE_TENSORS)

    def report(self, iteration: int) -> None:
        told = {"train_iter": iteration, "hyperparameters": self.running, "speed": self.speed}
        self.post("report_metrics", rank=self.rank, **told)

    def ask(self, iteration: int) -> dict[str, Any]:
        answer = self.post("ask_hyperparameters", rank=self.rank, train_iter=iteration)
        self.running = answer["recommended_hyperparameters"]
        return self.running


def clients(url: str, count: int, **settings: Any) -> Iterator[list[FlaskClient]]:
    stores = [Store(url) for _ in range(count)]
    chosen = Settings.load({}, database=url, world_size=RANKS, **settings)
    yield [create_app(chosen, store).test_client() for store in stores]
    for store in stores:
        store.close()


@pytest.fixture
def replicas(empty_url: str) -> Iterator[list[FlaskClient]]:
    yield from clients(empty_url, 2, warmup_seconds=0.0, trial_seconds=0.001)


def test_ranks_that_speak_to_two_replicas_at_once_are_told_the_same(
    replicas: list[FlaskClient], empty_url: str
) -> None:
    # A client of Flask's is of one thread.
    ranks = [Rank([r.application.test_client() for r in replicas], rank) for rank in range(RANKS)]
    ranks[0].register()
    sizes = set()
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(lambda rank: rank.ask(0), ranks))
        for iteration in range(100, 2600, 100):
            list(threads.map(Rank.report, ranks, [iteration] * RANKS))
            told = list(threads.map(Rank.ask, ranks, [iteration] * RANKS))
            assert told == [told[0]] * RANKS
            sizes.add(told[0]["bucket_size"])
    assert len(sizes) > 1
    store = Store(empty_url)
    (job,) = stored_jobs(store)
    last = {found.step: found.values for _, found in store.observations.of(job.id)}
    whole = [values for values in last.values() if len(values) == RANKS and None not in values]
    assert len(whole) == len(last), "a report was acknowledged and is not stored"
    store.close()


def test_a_pair_is_two_statements_while_nothing_is_tuned(store: Store) -> None:
    chosen = Settings.load({}, database="sqlite://", world_size=1, warmup_seconds=86_400)
    rank = Rank([create_app(chosen, store).test_client()], 0)
    rank.register()
    rank.ask(0)
    for iteration in (100, 200):
        rank.speed *= 2  # it has not settled
        with counting() as statements:
            rank.report(iteration)
            rank.ask(iteration)
    assert [statement.split()[:2] for statement in statements] == [["UPDATE", "families"]] * 2
