"""What is thinned out and deleted, on every database; and a service that does it by itself."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import EventRow, ObservationRow, ProfileRow, TrialRow
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.maintenance import retention
from bagua_autotune.store.maintenance.retention import DAY_SECONDS
from bagua_autotune.store.observations import MOST_LATE_STEPS
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.upkeep import Upkeep
from bagua_autotune.views.overviews import Overviews
from tests.autotune.store.samples import FIRST, PROFILE
from tests.autotune.support import Ranks, make_spec, stored_jobs

pytestmark = pytest.mark.slow


def tune(store: Store, job_id: str = "job", at: float = 100.0) -> None:
    """A whole tuning, each of whose trials runs on for a while after it is closed."""
    tuner, ranks = Tuner(store, "random", clock=lambda: at), Ranks(seed=1, noise=0.01)
    tuner.register(job_id, make_spec(limits={"max_samples": 4}))
    while trial := tuner.open_trial(job_id):
        for step, seconds in ranks.run(trial.configuration, 40):
            tuner.observe(job_id, trial.index, [Observation(step, tuple(seconds))])
    tuner.take_event(job_id, Event("ended"))


def test_thinned_out_in_small_transactions_a_job_has_the_same_figures(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 7)
    tune(store)
    before = Overviews(store).overview("job")
    stored, steps = len(store.observations.of("job")), store.observations.steps("job")
    assert retention.thin(store, 0.0, 100.0) == 0  # heard of at that time
    assert retention.thin(store, 100.1, 1e9) == 0
    thinned = retention.thin(store, 0.0, 100.1)
    assert thinned > max(7, stored / 4)
    assert len(store.observations.of("job")) == stored - thinned
    assert store.observations.steps("job") == steps
    after = Overviews(store).overview("job")
    assert after.job.figures == before.job.figures
    assert (after.ranks, after.why, after.switches) == (before.ranks, before.why, before.switches)
    assert (after.trials, after.best) == (before.trials, before.best)
    assert after.steps.points[0] == before.steps.points[0]
    assert retention.thin(store, 0.0, 100.1) == 0


def test_a_job_that_is_tuned_keeps_all(store: Store) -> None:
    tuner = Tuner(store, clock=lambda: 100.0)
    tuner.register("job", make_spec())
    tuner.observe("job", 0, [Observation(step, (0.1,) * 4) for step in range(MOST_LATE_STEPS)])
    assert retention.thin(store, 0.0, 1e9) == 0


def test_one_replica_at_a_time_has_its_turn(store: Store) -> None:
    barrier, turns = threading.Barrier(4), []

    def ask(now: float) -> None:
        barrier.wait()
        turns.append(retention.claim(store, now, 10.0))

    for now, done in ((1.0, 0.0), (11.0, 5.0)):
        threads = [threading.Thread(target=ask, args=(now,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(turns, key=str) == sorted([done, None, None, None], key=str)
        turns.clear()
        retention.note_thinned(store, 5.0)
        assert retention.claim(store, now + 9.0, 10.0) is None


def test_upkeep_thins_deletes_and_gives_back_what_is_free(tmp_path: Path) -> None:
    file = tmp_path / "autotune.db"
    store = Store(f"sqlite:///{file}")
    now = [100.0]
    tune(store, "first")
    stored = len(store.observations.of("first"))
    upkeep = Upkeep(store, thin_days=7, keep_days=90, clock=lambda: now[0])
    assert upkeep.once()
    assert not upkeep.once()
    assert len(store.observations.of("first")) == stored
    now[0] += 7 * DAY_SECONDS + 1
    assert upkeep.once()
    assert 0 < len(store.observations.of("first")) < stored
    tune(store, "second", at=now[0])

    def bytes_on_disk() -> int:
        ((pages,),) = store.database.read(text("PRAGMA page_count"))
        return int(pages) * 4096

    largest = bytes_on_disk()
    now[0] += 90 * DAY_SECONDS - 3600
    assert upkeep.once()
    with pytest.raises(UnknownJob):
        store.jobs.get("first")
    assert store.jobs.get("second").result is not None
    assert bytes_on_disk() < largest
    store.close()


def test_nought_keeps_all_for_ever(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'autotune.db'}")
    tune(store)
    stored = len(store.observations.of("job"))
    assert Upkeep(store, thin_days=0, keep_days=0, clock=lambda: 1e9).once()
    assert len(store.observations.of("job")) == stored
    store.close()


def test_after_a_jump_of_the_clock_nothing_is_deleted_for_a_pause(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that runs says so every 45 s only, and may seem silent for days."""
    wall, steady = [1000.0], [5.0]
    upkeep = Upkeep(store, 7, 90, 3600.0, lambda: wall[0], lambda: steady[0])
    assert upkeep.clock_is_even()
    wall[0], steady[0] = wall[0] + 30, steady[0] + 30
    assert upkeep.clock_is_even()
    wall[0] += 91 * DAY_SECONDS
    assert not upkeep.clock_is_even()
    wall[0], steady[0] = wall[0] + 3599, steady[0] + 3599
    assert not upkeep.clock_is_even()
    wall[0], steady[0] = wall[0] + 1, steady[0] + 1
    assert upkeep.clock_is_even()
    assert caplog.text.count("the clock jumped by 7862400 s") == 1


def test_a_turn_of_a_clock_that_was_ahead_keeps_nobody_waiting(store: Store) -> None:
    assert retention.claim(store, 1e6, 100.0) is not None
    assert retention.claim(store, 1e6 + 99, 100.0) is None
    assert retention.claim(store, 1e6 - 101, 100.0) is not None  # due two pauses later
    assert retention.claim(store, 1e6 - 2, 100.0) is None
    assert retention.claim(store, 1e6 - 1, 100.0) is not None


def test_a_file_that_cannot_be_written_is_told_as_every_failure_of_a_database(
    tmp_path: Path,
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'autotune.db'}")
    store.database.write(text("PRAGMA query_only = 1"))
    with pytest.raises(OperationalError, match="readonly"):
        retention.prune_now(store, 1)
    store.close()


def test_pruning_deletes_what_was_not_heard_of_and_nothing_else(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    store.observations.add(job, 0, [Observation(1, (0.1,) * 4)], 50.0)
    store.profiles.add(job, 0, PROFILE, 50.0)
    store.events.add(job, Event("ended", at=60.0))
    store.jobs.create("late", make_spec(), at=100.0)
    assert retention.prune(store, 60.0) == []
    assert [pruned.id for pruned in retention.prune(store, 61.0)] == [job]
    with pytest.raises(UnknownJob):
        store.trials.of(job)
    for table in (TrialRow, ObservationRow, ProfileRow, EventRow):
        assert store.database.read(select(table.id)) == []
    assert [found.id for found in stored_jobs(store)] == ["late"]
