"""The contract that every database keeps."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, select, update

from bagua_autotune.model.job import Event, Inherited, Observation, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import (
    JobConflict,
    Step,
    Store,
    StoreError,
    UnknownJob,
    UnknownTrial,
    contacts,
    families,
    ranks,
    retention,
)
from bagua_autotune.store.tables import EventRow, JobRow, ObservationRow, ProfileRow, TrialRow
from tests.autotune.store.samples import (
    BASELINE,
    FIRST,
    PROFILE,
    RESULT,
    with_buckets_of_its_own,
)
from tests.autotune.support import make_spec


def test_a_job_comes_back_as_it_was_registered(store: Store) -> None:
    spec = make_spec(software={"torch": "2.13.0"}, limits={"max_samples": 7})
    store.create_job("job", spec, at=5.0, protocol="v1", data={"known": [1]})
    job = store.job("job")
    assert (job.name, job.phase, job.protocol, job.created_at) == ("digits", "tuning", "v1", 5.0)
    assert (job.space, job.baseline) == (spec.knobs, spec.default_configuration)
    assert (job.limits, job.software, job.data) == (spec.limits, spec.software, {"known": [1]})
    assert store.tensors("job") == list(spec.tensors)


def test_registering_again_is_harmless_and_other_content_is_refused(store: Store, job: str) -> None:
    assert not store.create_job(job, make_spec(), at=9.0)
    with pytest.raises(JobConflict, match="other content"):
        store.create_job(job, make_spec(fingerprint="x"), at=9.0)
    tensors = make_spec().model_dump(mode="json")["tensors"][1:]
    with pytest.raises(JobConflict, match="other content"):
        store.create_job(job, make_spec(tensors=tensors), at=9.0)


def test_jobs_are_listed_newest_first_and_by_name(store: Store, job: str) -> None:
    store.create_job("later", make_spec(), at=2.0)
    store.create_job("other", make_spec(name="other"), at=3.0)
    assert [found.id for found in store.jobs()] == ["other", "later", "job"]
    assert [found.id for found in store.jobs("digits", limit=1)] == ["later"]


def test_contacts_tell_who_was_heard_of_and_what_changed(store: Store, job: str) -> None:
    before = contacts.of_job(store, job)
    store.create_job("later", make_spec(), at=100.0)
    assert [found.id for found in contacts.since(store, 50.0)] == ["later"]
    store.add_event(job, Event("note", at=60.0))
    store.end_job("later", 70.0)
    later, found = contacts.since(store, 50.0)
    assert (later.id, later.phase, later.ended_at) == ("later", "ended", 70.0)
    assert found == contacts.of_job(store, job)
    assert (found.last_contact_at, found.version > before.version) == (60.0, True)


def test_an_index_holds_all_that_contacts_need_or_nothing_that_changes(store: Store) -> None:
    found = inspect(store.database._engine).get_indexes("jobs")
    indices = {index["name"]: index["column_names"] for index in found}
    assert indices["jobs_by_creation"][:2] == ["created_at", "id"]
    if store.database.url.get_backend_name() == "sqlite":
        assert set(indices["jobs_by_creation"]) == set(contacts.Contact._fields)
    else:
        indexed = {column for columns in indices.values() for column in columns}
        assert not indexed & {"phase", "revision", "last_contact_at", "ended_at"}


def test_a_job_that_cannot_be_read_does_not_hide_the_others(
    store: Store, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.create_job("broken", make_spec(), at=2.0)
    with store.database.writing() as session:
        session.execute(update(JobRow).where(JobRow.id == "broken").values(spec={"odd": 1}))
    assert [found.id for found in store.jobs()] == [job]
    assert "job broken cannot be read" in caplog.text


def test_pruning_deletes_what_was_not_heard_of_and_nothing_else(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    store.add_observations(job, 0, [Observation(1, (0.1,) * 4)], 50.0)
    store.add_profile(job, 0, PROFILE, 50.0)
    store.add_event(job, Event("ended", at=60.0))
    store.create_job("late", make_spec(), at=100.0)
    assert retention.prune(store, 60.0) == []
    assert [pruned.id for pruned in retention.prune(store, 61.0)] == [job]
    with pytest.raises(UnknownJob):
        store.trials(job)
    with store.database.reading() as session:
        for table in (TrialRow, ObservationRow, ProfileRow, EventRow):
            assert session.scalars(select(table)).all() == []
    assert [found.id for found in store.jobs()] == ["late"]


def test_reading_makes_no_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'typo.db'}"
    with pytest.raises(StoreError, match=r"no database .*typo\.db"):
        Store(url, as_found=True)
    assert list(tmp_path.iterdir()) == []
    Store(url).close()
    Store(url, as_found=True).close()


def test_unknown_things_are_said_to_be(store: Store, job: str) -> None:
    reads = (store.job, store.trials, store.tensors, store.events, store.observations)
    for read in (*reads, store.profiles):
        with pytest.raises(UnknownJob):
            read("nobody")
    with pytest.raises(UnknownJob):
        store.add_event("nobody", Event("note"))
    with pytest.raises(UnknownTrial):
        store.add_observations(job, 0, [], 1.0)
    with pytest.raises(UnknownTrial):
        store.add_profile(job, 0, PROFILE, 1.0)
    with pytest.raises(UnknownTrial):
        store.trial(job, 0)


def test_a_trial_runs_is_measured_and_followed(store: Store, job: str) -> None:
    assert store.advance(job, FIRST)
    assert store.trial(job, 0) == Trial(0, "search", BASELINE)
    store.start_trial(job, 0, 2.0)
    assert store.trial(job, 0).state == "running"
    estimate = Estimate(-1.5, 0.01, 9, 1)
    other = Configuration(BASELINE, bucket_bytes=4 << 20)
    following = Trial(1, "confirm", other)
    assert store.advance(job, Step(3.0, closes=0, estimate=estimate, next_trial=following))
    first, second = store.trials(job)
    assert (first.state, first.estimate, first.started_at, first.ended_at) == (
        "measured",
        estimate,
        2.0,
        3.0,
    )
    assert (second, store.job(job).phase) == (following, "confirming")
    assert store.advance(job, Step(4.0, closes=1, failure="they disagreed", result=RESULT))
    assert store.trial(job, 1).failure == "they disagreed"
    assert (store.job(job).phase, store.job(job).result) == ("finished", RESULT)


def test_an_unknown_error_survives_storing(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    following = Trial(1, "search", BASELINE)
    store.advance(job, Step(2.0, 0, Estimate(1.0, math.inf, 1), next_trial=following))
    found = store.trial(job, 0).estimate
    assert found is not None
    assert found.standard_error == math.inf


def test_a_step_decided_on_an_old_view_changes_nothing(store: Store, job: str) -> None:
    assert store.advance(job, FIRST)
    closing = Step(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=Trial(1, "search", BASELINE))
    assert not store.advance(job, FIRST)
    assert store.advance(job, closing)
    before = store.trials(job)
    assert not store.advance(job, closing)
    assert not store.advance(job, replace(closing, closes=1))
    assert store.trials(job) == before
    store.end_job(job, 3.0)
    assert not store.advance(
        job, replace(closing, closes=1, next_trial=Trial(2, "search", BASELINE))
    )


def test_an_ended_job_can_be_resumed_where_it_was(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    store.end_job(job, 5.0)
    assert (store.job(job).phase, store.job(job).ended_at) == ("ended", 5.0)
    store.resume_job(job, 6.0)
    assert (store.job(job).phase, store.job(job).ended_at) == ("tuning", None)
    store.advance(job, Step(7.0, 0, failure="no", result=RESULT))
    store.end_job(job, 8.0)
    store.resume_job(job, 9.0)
    assert store.job(job).phase == "finished"


def test_what_a_job_inherits_comes_back(store: Store, job: str) -> None:
    inherited = Inherited(
        configuration={"bucket_bytes": 4 << 20, "buckets": (2, 1)},
        gain=0.2,
        ready_seconds=(0.1, 0.2),
        costs={"flat": (1e-4, 1e-9)},
        source="job",
    )
    store.create_job("heir", make_spec(), at=2.0, inherited=inherited)
    assert store.job("heir").inherited == inherited
    assert store.job(job).inherited is None


def test_an_explicit_list_of_buckets_survives_storing(store: Store) -> None:
    spec = make_spec(**with_buckets_of_its_own())
    assert store.create_job("job", spec, at=1.0)
    assert not store.create_job("job", spec, at=2.0)
    chosen = Configuration(spec.default_configuration, buckets=(100, 150))
    store.advance("job", Step(1.0, next_trial=Trial(0, "search", chosen)))
    assert store.trial("job", 0).configuration == chosen
    result = replace(RESULT, configuration=chosen, payback_steps=12, cost_steps=1.5)
    store.advance("job", Step(2.0, 0, Estimate(1.0, 0.1, 5), result=result))
    assert (store.job("job").result, store.job("job").space) == (result, spec.knobs)


def test_the_latest_alike_job_is_found(store: Store, job: str) -> None:
    assert store.latest_job(fingerprint="other") is None
    for number, (fingerprint, model, network) in enumerate(("amn", "bmo", "cno")):
        spec = make_spec(fingerprint=fingerprint)
        keys = {"model_key": model, "network_key": network}
        store.create_job(fingerprint, spec, at=10.0 + number, **keys)
    bagua = make_spec(fingerprint="a")
    store.create_job("bagua", bagua, at=99.0, protocol="v1", model_key="m", network_key="o")

    def latest(**wanted: Any) -> str | None:
        found = store.latest_job(**wanted)
        return found.id if found else None

    assert latest() == "c"
    assert latest(fingerprint="a") == "a"
    assert latest(model_key="m") == "b"
    assert latest(network_key="o", model_key="m") == "b"
    assert latest(fingerprint="a", network_key="o") is None
    assert (latest(finished=True), latest(profiled=True)) == (None, None)
    for job_id in ("a", "b"):
        store.advance(job_id, FIRST)
    store.add_profile("a", 0, PROFILE, 20.0)
    store.advance("b", Step(2.0, 0, Estimate(1.0, 0.1, 5), result=RESULT))
    assert (latest(finished=True), latest(profiled=True)) == ("b", "a")
    assert latest(model_key="m", finished=True, profiled=True) is None


def test_an_alike_job_that_cannot_be_read_is_passed_over(store: Store, job: str) -> None:
    store.create_job("broken", make_spec(), at=2.0)
    with store.database.writing() as session:
        session.execute(update(JobRow).where(JobRow.id == "broken").values(spec={"odd": 1}))
    found = store.latest_job(fingerprint="f" * 64)
    assert found is not None
    assert found.id == job


def test_a_finished_job_can_be_tuned_in_another_round(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    assert not store.open_round(job, 1.5)
    store.advance(job, Step(2.0, 0, Estimate(1.0, 0.1, 5), result=RESULT))
    assert store.open_round(job, 3.0)
    assert not store.open_round(job, 3.0)
    found = store.job(job)
    assert (found.phase, found.round, found.result) == ("tuning", 1, RESULT)
    assert (found.finished_at, found.last_contact_at) == (None, 3.0)
    again = Trial(1, "search", BASELINE, round=1)
    assert store.advance(job, Step(4.0, next_trial=again))
    assert store.trials(job)[1] == again
    other = replace(RESULT, summary="kept again")
    assert store.advance(job, Step(5.0, 1, Estimate(1.0, 0.1, 5), result=other))
    assert (store.job(job).phase, store.job(job).result) == ("finished", other)
    store.end_job(job, 6.0)
    assert not store.open_round(job, 7.0)


def test_jobs_that_are_gone_are_lost_and_not_heard_of(store: Store) -> None:
    for number, job_id in enumerate(("tuning", "confirming", "finished", "late")):
        store.create_job(job_id, make_spec(), at=number + 1.0)
    store.advance("confirming", Step(2.0, next_trial=Trial(0, "confirm", BASELINE)))
    store.advance("finished", Step(3.0, result=RESULT))
    revision = store.job("tuning").revision
    end = Event("lost", message="gone", at=9.0)
    assert store.lose_silent("v2", 1.0, end) == store.lose_silent("v1", 4.0, end) == []
    assert sorted(store.lose_silent("v2", 4.0, end)) == ["confirming", "tuning"]
    assert store.lose_silent("v2", 4.0, end) == []
    found = store.job("tuning")
    assert (found.phase, found.ended_at, found.last_contact_at) == ("lost", 9.0, 1.0)
    assert (found.is_lost, found.revision > revision) == (True, True)
    assert store.events("tuning") == store.events("confirming") == [end]
    assert store.end_gone(["tuning", "nobody"], end) == []
    assert store.lose_silent("v2", 4.0, end, also_finished=True) == ["finished"]
    found = store.job("finished")
    assert (found.phase, found.ended_at, found.result) == ("finished", 9.0, RESULT)
    assert [store.job("late").phase, store.events("late")] == ["tuning", []]
    store.resume_job("confirming", 10.0)
    found = store.job("confirming")
    assert (found.phase, found.ended_at, found.is_lost) == ("confirming", None, False)


def test_of_many_that_find_a_job_silent_one_ends_it(store: Store, job: str) -> None:
    end, ended = Event("ended", at=9.0), []
    threads = [
        threading.Thread(target=lambda: ended.extend(store.lose_silent("v2", 2.0, end)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [job]
    assert store.events(job) == [end]


def test_a_job_that_ended_as_a_round_began_is_resumed_in_its_search(store: Store, job: str) -> None:
    confirming = Step(1.0, next_trial=Trial(0, "confirm", BASELINE))
    store.advance(job, confirming)
    store.advance(job, Step(2.0, 0, Estimate(1.0, 0.1, 5), result=RESULT))
    store.open_round(job, 3.0)
    store.end_job(job, 4.0)
    assert (store.job(job).phase, store.job(job).result) == ("ended", RESULT)
    store.resume_job(job, 5.0)
    assert (store.job(job).phase, store.job(job).round) == ("tuning", 1)


def test_threads_that_write_at_once_lose_nothing(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    families.register(store, "DDP_140", "family", {"n": 0})
    failures: list[BaseException] = []

    def write(rank: int) -> None:
        try:
            for step in range(10):
                ranks.put_value(store, job, 0, step, rank, float(rank), 1.0)
                families.update(store, "family", lambda data: {"n": data["n"] + 1})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [found.values for _, found in store.observations(job, 0)] == [(0.0, 1.0, 2.0, 3.0)] * 10
    assert families.load(store, "family")[0] == {"n": 40}


def test_of_many_that_take_the_same_step_one_does(store: Store, job: str) -> None:
    took = []
    threads = [
        threading.Thread(target=lambda: took.append(store.advance(job, FIRST))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(took) == [False] * 5 + [True]
    assert len(store.trials(job)) == 1


def test_a_rank_value_is_taken_once(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    assert ranks.put_value(store, job, 0, 100, 1, 2.5, 1.0)
    assert not ranks.put_value(store, job, 0, 100, 1, 9.0, 1.0)
    assert store.observations(job, 0) == [(0, Observation(100, (None, 2.5)))]


def test_a_job_is_widened_to_the_ranks_that_were_seen(store: Store) -> None:
    store.create_job("bagua", make_spec(world_size=1, ranks_per_node=[1]), at=1.0, protocol="v1")
    for count in (3, 2):
        ranks.widen(store, "bagua", count)
    job = store.job("bagua")
    assert (job.world_size, job.ranks_per_node) == (3, (3,))


def test_a_family_is_found_by_its_aliases_and_keeps_its_state(store: Store) -> None:
    assert families.resolve(store, "DDP_140") is None
    families.register(store, "DDP_140", "family", {"n": 0})
    families.register(store, "DDP_141", "family", {"n": 99})
    assert families.resolve(store, "DDP_141") == families.resolve(store, "DDP_140") == "family"
    families.update(store, "family", lambda data: {"n": data["n"] + 1})
    families.extend_order(store, "family", ["b", "a"])
    families.extend_order(store, "family", ["a", "c", "b"])
    assert families.load(store, "family") == ({"n": 1}, ["b", "a", "c"])
    with pytest.raises(families.UnknownFamily):
        families.load(store, "other")


def test_only_families_of_jobs_still_tuned_and_heard_of_are_listed(store: Store) -> None:
    for number in range(3):
        data = {"family": f"f{number}"}
        store.create_job(f"j{number}", make_spec(), at=number, protocol="v1", data=data)
    store.end_job("j2", 3.0)
    store.create_job("other", make_spec(), at=2.0)
    assert families.tuned(store, since=0.5) == {"f1": "j1"}


def test_a_family_without_a_job_is_forgotten_with_its_aliases(store: Store) -> None:
    store.create_job("j", make_spec(), at=1.0, protocol="v1", data={"family": "kept"})
    for key in ("kept", "orphan"):
        families.register(store, f"{key}_140", key, {})
    families.forget_orphans(store)
    assert families.resolve(store, "kept_140") == "kept"
    assert families.resolve(store, "orphan_140") is None


def test_two_stores_share_a_file_and_it_outlives_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'autotune.db'}"
    first, second = Store(url), Store(url)
    first.create_job("job", make_spec(), at=1.0)
    assert second.advance("job", FIRST)
    assert not first.advance("job", FIRST)
    first.close()
    second.close()
    assert len(Store(url).trials("job")) == 1


@pytest.mark.parametrize("url", ["mongodb://x/y", "sqlite:////proc/no/such.db"])
def test_a_database_that_cannot_be_used_is_named(url: str) -> None:
    with pytest.raises(StoreError) as error:
        Store(url)
    assert url in str(error.value)


def test_something_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(StoreError, match=r"notes\.txt"):
        Store(f"sqlite:///{path}")
    assert path.read_text().startswith("not a database")


def test_a_view_stays_as_it_was_when_it_was_opened(store: Store, job: str) -> None:
    if not store.database.url.database:
        pytest.skip("a database in memory has one connection: writers wait for readers")
    with store.database.reading(), ThreadPoolExecutor(1) as writer:
        before = store.job(job)
        writer.submit(store.touch, job, 99.0).result()
        assert store.job(job) == before
    assert store.job(job).last_contact_at == 99.0


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
def test_connections_that_were_lost_are_not_used_again(empty_url: str) -> None:
    store = Store(empty_url)
    other = create_engine(empty_url)
    with other.connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid != pg_backend_pid()"
        )
    other.dispose()
    store.check()
    store.close()
