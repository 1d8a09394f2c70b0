"""Jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import inspect, update

from bagua_autotune.model.job import Event, Inherited, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.store.errors import JobConflict, UnknownJob, UnknownTrial
from bagua_autotune.store.jobs import Contact
from bagua_autotune.store.trials import Move
from tests.autotune.store.samples import BASELINE, FIRST, MEASURED, PROFILE, RESULT
from tests.autotune.support import make_spec, stored_jobs


def test_a_job_comes_back_as_it_was_registered(store: Store) -> None:
    spec = make_spec(software={"torch": "2.13.0"}, limits={"max_samples": 7})
    store.jobs.create("job", spec, at=5.0, protocol="v1", data={"known": [1]})
    job = store.jobs.get("job")
    assert (job.name, job.phase, job.protocol, job.created_at) == ("digits", "tuning", "v1", 5.0)
    assert (job.space, job.baseline) == (spec.knobs, spec.default_configuration)
    assert (job.limits, job.software, job.data) == (spec.limits, spec.software, {"known": [1]})
    assert store.jobs.tensors("job") == list(spec.tensors)


def test_registering_again_is_harmless_and_other_content_is_refused(store: Store, job: str) -> None:
    assert not store.jobs.create(job, make_spec(), at=9.0)
    with pytest.raises(JobConflict, match="other content"):
        store.jobs.create(job, make_spec(fingerprint="x"), at=9.0)
    tensors = make_spec().model_dump(mode="json")["tensors"][1:]
    with pytest.raises(JobConflict, match="other content"):
        store.jobs.create(job, make_spec(tensors=tensors), at=9.0)


def test_contacts_tell_who_was_heard_of_and_what_changed(store: Store, job: str) -> None:
    before = store.jobs.contact(job)
    store.jobs.create("later", make_spec(), at=100.0)
    assert [found.id for found in store.jobs.contacts_since(50.0, 50.0)] == ["later"]
    store.events.add(job, Event("note", at=60.0))
    store.jobs.end("later", 70.0)
    later, found = store.jobs.contacts_since(50.0, 50.0)
    assert (later.id, later.phase, later.ended_at) == ("later", "ended", 70.0)
    assert found == store.jobs.contact(job)
    assert (found.last_contact_at, found.version > before.version) == (60.0, True)


def test_of_jobs_that_ended_only_contacts_of_late_are_told(store: Store) -> None:
    for job_id, at in (("ended", 10.0), ("just_ended", 20.0), ("lost", 10.0), ("runs", 10.0)):
        store.jobs.create(job_id, make_spec(), at=at)
    store.jobs.end_gone(["ended", "just_ended"], Event("ended", at=30.0))
    lost = store.jobs.lose_silent("v2", 11.0, Event("lost", at=30.0))
    assert sorted(lost) == ["lost", "runs"]
    store.jobs.resume("runs", 10.0)
    found = {contact.id for contact in store.jobs.contacts_since(5.0, ended_at=15.0)}
    assert found == {"just_ended", "lost", "runs"}


def test_contacts_are_listed_newest_first(store: Store, job: str) -> None:
    for number in range(3):
        store.jobs.create(f"new{number}", make_spec(name=f"n{number % 2}"), at=10.0 + number)
    assert [c.id for c in store.jobs.contacts()] == ["new2", "new1", "new0", "job"]
    assert [c.id for c in store.jobs.contacts("n0")] == ["new2", "new0"]
    assert [c.id for c in store.jobs.contacts(limit=1)] == ["new2"]
    assert [c.id for c in store.jobs.contacts_since(11.0, 11.0)] == ["new2", "new1"]
    found = store.jobs.contact(job)
    assert (found.name, found.phase, found.version) == ("digits", "tuning", (1.0, 0))
    with pytest.raises(UnknownJob):
        store.jobs.contact("nobody")


def test_jobs_are_listed_and_counted_by_team(store: Store) -> None:
    for job_id, team in (("one", "vision"), ("two", "vision"), ("other", "speech"), ("no", None)):
        spec = make_spec(name=job_id).model_copy(update={"team": team})
        store.jobs.create(job_id, spec, at=1.0)
        assert not store.jobs.create(job_id, spec, at=2.0)
        assert store.jobs.get(job_id).team == team
    store.jobs.end("one", 3.0)
    assert {contact.id for contact in store.jobs.contacts(team="vision")} == {"one", "two"}
    assert [contact.id for contact in store.jobs.contacts("other", team="vision")] == []
    assert store.jobs.count_running() == {"vision": 1, "speech": 1, None: 1}
    with pytest.raises(JobConflict):
        store.jobs.create("two", make_spec(name="two"), at=4.0)


def test_jobs_of_the_same_moment_are_listed_once(store: Store) -> None:
    for number in range(3):
        store.jobs.create(f"job{number}", make_spec(), at=0.1 + 0.2)
    assert [job.id for job in store.jobs.contacts(limit=2)] == ["job0", "job1"]
    assert [job.id for job in store.jobs.contacts(after="job1")] == ["job2"]


def test_an_index_holds_all_that_contacts_need_or_nothing_that_changes(store: Store) -> None:
    found = inspect(store.database._engine).get_indexes("jobs")
    indices = {index["name"]: index["column_names"] for index in found}
    assert indices["jobs_by_creation"][:2] == ["created_at", "id"]
    if store.database.url.get_backend_name() == "sqlite":
        assert set(indices["jobs_by_creation"]) == set(Contact._fields)
    else:
        indexed = {column for columns in indices.values() for column in columns}
        assert not indexed & {"phase", "revision", "last_contact_at", "ended_at"}


def test_a_job_that_cannot_be_read_hides_no_other(
    store: Store, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.jobs.create("broken", make_spec(), at=2.0)
    store.database.write(update(JobRow).where(JobRow.id == "broken").values(spec={"odd": 1}))
    assert [found.id for found in stored_jobs(store)] == [job]
    assert "job broken cannot be read" in caplog.text
    found = store.jobs.latest(fingerprint="f" * 64)
    assert found is not None
    assert found.id == job


def test_unknown_things_are_said_to_be(store: Store, job: str) -> None:
    reads = [store.jobs.get, store.jobs.tensors]
    reads += [each.of for each in (store.trials, store.events, store.observations, store.profiles)]
    for read in reads:
        with pytest.raises(UnknownJob):
            read("nobody")
    with pytest.raises(UnknownJob):
        store.events.add("nobody", Event("note"))
    with pytest.raises(UnknownTrial):
        store.observations.add(job, 0, [], 1.0)
    with pytest.raises(UnknownTrial):
        store.profiles.add(job, 0, PROFILE, 1.0)
    with pytest.raises(UnknownTrial):
        store.trials.get(job, 0)


def test_an_ended_job_can_be_resumed_where_it_was(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    store.jobs.end(job, 5.0)
    assert (store.jobs.get(job).phase, store.jobs.get(job).ended_at) == ("ended", 5.0)
    store.jobs.resume(job, 6.0)
    assert (store.jobs.get(job).phase, store.jobs.get(job).ended_at) == ("tuning", None)
    store.trials.advance(job, Move(7.0, 0, failure="no", result=RESULT))
    store.jobs.end(job, 8.0)
    store.jobs.resume(job, 9.0)
    assert store.jobs.get(job).phase == "finished"


def test_what_a_job_inherits_comes_back(store: Store, job: str) -> None:
    inherited = Inherited(
        configuration={"bucket_bytes": 4 << 20, "buckets": (2, 1)},
        gain=0.2,
        ready_seconds=(0.1, 0.2),
        costs={"flat": (1e-4, 1e-9)},
        source="job",
    )
    store.jobs.create("heir", make_spec(), at=2.0, inherited=inherited)
    assert store.jobs.get("heir").inherited == inherited
    assert store.jobs.get(job).inherited is None


def test_the_latest_alike_job_is_found(store: Store, job: str) -> None:
    assert store.jobs.latest(fingerprint="other") is None
    for number, (fingerprint, model, network) in enumerate(("amn", "bmo", "cno")):
        spec = make_spec(fingerprint=fingerprint)
        keys = {"model_key": model, "network_key": network}
        store.jobs.create(fingerprint, spec, at=10.0 + number, **keys)
    bagua = make_spec(fingerprint="a")
    store.jobs.create("bagua", bagua, at=99.0, protocol="v1", model_key="m", network_key="o")

    def latest(**wanted: Any) -> str | None:
        found = store.jobs.latest(**wanted)
        return found.id if found else None

    assert latest() == "c"
    assert latest(fingerprint="a") == "a"
    assert latest(model_key="m") == "b"
    assert latest(network_key="o", model_key="m") == "b"
    assert latest(fingerprint="a", network_key="o") is None
    assert (latest(finished=True), latest(profiled=True)) == (None, None)
    for job_id in ("a", "b"):
        store.trials.advance(job_id, FIRST)
    store.profiles.add("a", 0, PROFILE, 20.0)
    store.trials.advance("b", Move(2.0, 0, Estimate(1.0, 0.1, 5), result=RESULT))
    assert (latest(finished=True), latest(profiled=True)) == ("b", "a")
    assert latest(model_key="m", finished=True, profiled=True) is None


def test_a_finished_job_can_be_tuned_in_another_round(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    assert not store.jobs.open_round(job, 1.5)
    store.trials.advance(job, Move(2.0, 0, Estimate(1.0, 0.1, 5), result=RESULT))
    assert store.jobs.open_round(job, 3.0)
    assert not store.jobs.open_round(job, 3.0)
    found = store.jobs.get(job)
    assert (found.phase, found.round, found.result) == ("tuning", 1, RESULT)
    assert (found.finished_at, found.last_contact_at) == (None, 3.0)
    store.jobs.end(job, 3.0)
    assert (store.jobs.get(job).phase, store.jobs.get(job).result) == ("ended", RESULT)
    store.jobs.resume(job, 3.0)
    assert (store.jobs.get(job).phase, store.jobs.get(job).round) == ("tuning", 1)
    again = Trial(1, "search", BASELINE, round=1)
    assert store.trials.advance(job, Move(4.0, next_trial=again))
    assert store.trials.of(job)[1] == again
    other = replace(RESULT, summary="kept again")
    assert store.trials.advance(job, Move(5.0, 1, Estimate(1.0, 0.1, 5), result=other))
    assert (store.jobs.get(job).phase, store.jobs.get(job).result) == ("finished", other)
    store.jobs.end(job, 6.0)
    assert not store.jobs.open_round(job, 7.0)


def test_a_replaced_result_may_bring_a_failed_trial_once(store: Store) -> None:
    job = "job"
    store.jobs.create(job, make_spec(), at=1.0, first=Trial(0, "search", BASELINE))
    failed = Trial(1, "search", BASELINE, "failed", failure="no", started_at=2.0, ended_at=2.0)
    store.jobs.replace_result(job, RESULT, failed)
    assert len(store.trials.of(job)) == 1, "it is not finished"
    store.trials.advance(job, Move(2.0, 0, Estimate(1.0, 0.1, 5), result=RESULT))
    other = replace(RESULT, summary="given up")
    for _ in range(2):
        store.jobs.replace_result(job, other, failed)
        assert store.jobs.get(job).result == other
        assert store.trials.of(job)[1:] == [failed]


def test_jobs_that_are_gone_are_lost_and_not_heard_of(store: Store) -> None:
    for number, job_id in enumerate(("tuning", "confirming", "finished", "late")):
        store.jobs.create(job_id, make_spec(), at=number + 1.0)
    store.trials.advance("confirming", Move(2.0, next_trial=Trial(0, "confirm", BASELINE)))
    store.trials.advance("finished", Move(3.0, result=RESULT))
    revision = store.jobs.get("tuning").revision
    end = Event("lost", message="gone", at=9.0)
    assert store.jobs.lose_silent("v2", 1.0, end) == store.jobs.lose_silent("v1", 4.0, end) == []
    assert sorted(store.jobs.lose_silent("v2", 4.0, end)) == ["confirming", "tuning"]
    assert store.jobs.lose_silent("v2", 4.0, end) == []
    found = store.jobs.get("tuning")
    assert (found.phase, found.ended_at, found.last_contact_at) == ("lost", 9.0, 1.0)
    assert (found.is_lost, found.revision > revision) == (True, True)
    assert store.events.of("tuning") == store.events.of("confirming") == [end]
    assert store.jobs.end_gone(["tuning", "nobody"], end) == []
    assert store.jobs.lose_silent("v2", 4.0, end, also_finished=True) == ["finished"]
    found = store.jobs.get("finished")
    assert (found.phase, found.ended_at, found.result) == ("finished", 9.0, RESULT)
    assert [store.jobs.get("late").phase, store.events.of("late")] == ["tuning", []]
    store.jobs.resume("confirming", 10.0)
    found = store.jobs.get("confirming")
    assert (found.phase, found.ended_at, found.is_lost) == ("confirming", None, False)


def test_of_many_that_find_a_job_silent_one_ends_it(store: Store, job: str) -> None:
    end = Event("ended", at=9.0)
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(store.jobs.lose_silent, "v2", 2.0, end) for _ in range(6)]
    assert [ended for each in asked for ended in each.result()] == [job]
    assert store.events.of(job) == [end]


WRITERS: dict[str, Callable[[Store, str], object]] = {
    "end": lambda store, job: store.jobs.end(job, 9.0),
    "resume": lambda store, job: store.jobs.resume(job, 9.0),
    "advance": lambda store, job: store.trials.advance(job, MEASURED),
    "start": lambda store, job: store.trials.start(job, 0, 9.0),
    "observe": lambda store, job: store.observations.add(job, 0, [], 9.0),
    "profile": lambda store, job: store.profiles.add(job, 0, PROFILE, 9.0),
    "event": lambda store, job: store.events.add(job, Event("note", at=9.0)),
    "result": lambda store, job: store.jobs.replace_result(job, RESULT),
    "estimate": lambda store, job: store.trials.update_estimate(job, 0, Estimate(1.0, 0.1, 5)),
}


def test_whatever_is_written_of_a_job_raises_its_revision(store: Store, job: str) -> None:
    assert store.jobs.get(job).revision == 0
    store.trials.advance(job, FIRST)
    for name, write in WRITERS.items():
        before = store.jobs.contact(job).revision
        write(store, job)
        assert store.jobs.contact(job).revision == before + 1, name
    before = store.jobs.contact(job)
    store.jobs.touch(job, 99.0)
    assert store.jobs.contact(job) == before._replace(last_contact_at=99.0)
    finished = Move(9.0, 1, failure="no", result=RESULT)
    assert store.trials.advance(job, finished)
    before = store.jobs.get(job).revision
    assert store.jobs.open_round(job, 9.0)
    assert store.jobs.get(job).revision == before + 1
    store.trials.of(job)
    assert store.jobs.get(job).revision == before + 1
