"""One training in several lives, and trainings that only have the same name."""

from __future__ import annotations

from typing import Any

import pytest

from bagua_autotune.model.job import Event
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance.retention import prune
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.overviews import Overviews
from bagua_autotune.views.summary import Life
from bagua_wire.messages import LEASE_SECONDS
from tests.autotune.earlier.test_restart import RESIZED, make_tensors
from tests.autotune.support import Clock, Ranks, make_spec
from tests.autotune.tuning.test_gone import run

RUN = {"run": "night-shift"}


@pytest.fixture
def clock() -> Clock:
    return Clock(step=0.001)


@pytest.fixture
def tuner(store: Store, clock: Clock) -> Tuner:
    return Tuner(store, clock=clock)


def begin(tuner: Tuner, job_id: str, **changes: Any) -> None:
    tuner.register(job_id, make_spec(**changes))
    size = int(changes.get("world_size", 4))
    run(tuner, job_id, Ranks(noise=0.002, world_size=size), trials=2)


def lives(tuner: Tuner, job_id: str) -> list[Life]:
    return Overviews(tuner.store).overview(job_id).lives


def listed(tuner: Tuner) -> dict[str, int]:
    return {job.id: job.life for job in Overviews(tuner.store).job_list().jobs}


def ended(tuner: Tuner, job_id: str) -> None:
    tuner.take_event(job_id, Event("ended", message="the training process ended"))


def test_one_run_is_one_job_whose_lives_are_told(tuner: Tuner) -> None:
    """The launcher's name of the run says so at once: nobody tells the end of a killed training."""
    begin(tuner, "first", **RUN)
    begin(tuner, "killed", **RUN)
    begin(tuner, "grown", **RUN, **RESIZED)
    assert listed(tuner) == {"grown": 3}
    for job_id in ("first", "killed", "grown"):
        found = lives(tuner, job_id)
        assert [life.job for life in found] == ["first", "killed", "grown"]
        assert [life.number for life in found] == [1, 2, 3]
        assert [life.end for life in found] == ["killed", "resized", "running"]
        assert [life.world_size for life in found] == [4, 4, 2]
        assert [life.trials_measured for life in found] == [2, 2, 2]
    ended(tuner, "grown")
    assert lives(tuner, "first")[-1].end == "finished"
    begin(tuner, "crashed", **RUN, **RESIZED)  # its ranks had a last word, and were started again
    assert [life.end for life in lives(tuner, "first")][-2:] == ["killed", "running"]
    detail = Overviews(tuner.store).detail("killed")
    assert (detail.run, detail.life, detail.continues) == ("night-shift", 2, "first")
    # Whoever looks at it need not wait for its lease to run out.
    assert (detail.state, detail.is_lost) == ("ended", True)


def test_two_that_run_at_the_same_time_are_two_jobs(tuner: Tuner, clock: Clock) -> None:
    begin(tuner, "one", run="one")
    begin(tuner, "two", run="two")
    begin(tuner, "three")
    assert listed(tuner) == {"one": 1, "two": 1, "three": 1}
    clock.now += LEASE_SECONDS / 2
    for job_id in ("one", "two", "three"):
        tuner.observe(job_id, 0, [])
    tuner.leases.look()
    assert listed(tuner) == {"one": 1, "two": 1, "three": 1}


def test_by_hand_a_training_goes_on_if_it_was_cut_short(tuner: Tuner) -> None:
    begin(tuner, "cut")
    gone = Event(
        "ended", message="its processes are gone", at=tuner.store.jobs.get("cut").created_at + 9
    )
    tuner.store.jobs.end_gone(["cut"], gone)
    begin(tuner, "ended-first")
    ended(tuner, "ended-first")
    begin(tuner, "again")
    run(tuner, "again", Ranks(noise=0.002))
    ended(tuner, "again")
    assert tuner.status("again").state == "finished"
    begin(tuner, "next")
    # Nobody killed a training that ended by itself, though the next goes on with its tuning.
    assert [life.end for life in lives(tuner, "cut")] == ["killed", "finished", "finished"]
    assert listed(tuner) == {"next": 1, "again": 3}
    ended(tuner, "next")
    begin(tuner, "other-model", tensors=make_tensors(9), fingerprint="3" * 64)
    begin(tuner, "other-name", name="other")
    assert listed(tuner) == {"next": 1, "again": 3, "other-model": 1, "other-name": 1}


def test_the_lease_tells_where_nobody_else_does(tuner: Tuner, clock: Clock) -> None:
    """A training that is killed, and started again at once by hand: nothing told its end."""
    for _ in range(12):  # a service that has listened
        clock.now += 30
        tuner.leases.look()
    begin(tuner, "killed")
    begin(tuner, "again")
    begin(tuner, "second-life-of-again")
    for _ in range(12):
        clock.now += 30
        tuner.observe("again", 0, [])
        tuner.observe("second-life-of-again", 0, [])
        tuner.leases.look()
    assert tuner.status("killed").state == "lost"
    assert listed(tuner) == {"second-life-of-again": 1, "again": 2}
    # It was only cut off: what is there beside it is another training.
    tuner.observe("killed", 0, [])
    assert listed(tuner) == {"second-life-of-again": 1, "again": 1, "killed": 1}


def test_lives_are_put_in_their_order_whenever_that_is_found_out(tuner: Tuner) -> None:
    for job_id in ("a", "b", "c"):
        begin(tuner, job_id)
    assert tuner.store.lives.join("b", "c")
    assert tuner.store.lives.join("a", "b")
    assert [(life.job, life.number) for life in lives(tuner, "b")] == [("a", 1), ("b", 2), ("c", 3)]
    assert listed(tuner) == {"c": 3}
    tuner.store.lives.part("a")
    assert listed(tuner) == {"a": 1, "c": 2}
    assert tuner.store.lives.join("a", "b")
    # Nothing goes on twice, nor in a circle.
    assert not tuner.store.lives.join("c", "a")
    begin(tuner, "d")
    assert not tuner.store.lives.join("a", "d")
    assert not tuner.store.lives.join("d", "c")


def test_the_first_lives_may_be_deleted(tuner: Tuner) -> None:
    for job_id in ("a", "b", "c"):
        begin(tuner, job_id, **RUN)
    prune(tuner.store, tuner.store.jobs.get("a").last_contact_at + 1e-6)
    assert [(life.job, life.number) for life in lives(tuner, "c")] == [("b", 2), ("c", 3)]
