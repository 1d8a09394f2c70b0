"""What Bagua's protocol stores, on every database."""

from __future__ import annotations

import threading

import pytest

from bagua_autotune.model.job import Observation
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance import retention
from bagua_v1.directory import Known, NotRegistered, Storage
from bagua_v1.family import Family
from tests.autotune.store.samples import FIRST
from tests.autotune.support import make_spec

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
