"""The runs of a search in the store: going on, what happens meanwhile, and the time that it has."""

from __future__ import annotations

import math

import pytest
from sqlalchemy import text

from bagua_autotune.model.job import Event
from bagua_autotune.model.statistics import Interval
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance.retention import delete_training
from bagua_runs.job import Interrupted
from bagua_runs.outcomes import BASELINE, CONFIRM, SEARCH
from bagua_runs.record import About, Diverged, Record
from bagua_runs.report import describe_price, job_result, pays_after_seconds
from bagua_wire.configuration import Configuration
from tests.runs.recorded import Searching

pytestmark = pytest.mark.slow


def test_a_search_goes_on_from_each_of_its_runs_as_if_nothing_had_been(every_store: Store) -> None:
    whole = Searching(None, has_seconds=True)
    _, expected, _ = whole.part()
    runs = len(whole.job.made)
    searching = Searching(every_store, has_seconds=True)
    for _ in range(runs - 1):
        with pytest.raises(Interrupted):
            searching.part(runs=1)
    search, verdict, record = searching.part()
    assert searching.job.made == whole.job.made, "none is made twice, nor another one"
    assert verdict == expected
    assert [run.outcome.cost for run in search.runs] == [
        run.outcome.cost for run in whole.search.runs
    ]
    assert record.job_id is not None
    trials = every_store.trials.of(record.job_id)
    assert len(trials) == runs
    assert {trial.state for trial in trials} == {"measured", "failed", "infeasible"}
    assert {trial.purpose for trial in trials} == {"search", "confirm"}
    scores = [told.values[0] for _, told in every_store.observations.of(record.job_id)]
    assert scores == [run.outcome.score for run in search.runs if run.outcome.score]
    record.finish(job_result(search, verdict, "spent 1 s", 300.0, True))
    job = every_store.jobs.get(record.job_id)
    assert (job.phase, job.protocol) == ("finished", "runs")
    assert job.result is not None
    assert job.result.configuration == search.space.settings_of(verdict.configuration)
    assert not job.is_lost
    assert job.result.payback_steps
    # The next one begins anew.
    searching.part(runs=math.inf)
    assert len(searching.job.made) == 2 * runs


def test_a_search_that_was_taken_for_lost_goes_on(store: Store) -> None:
    searching = Searching(store)
    with pytest.raises(Interrupted):
        searching.part(runs=4)
    lost = Event("lost", at=searching.clock())
    assert len(store.jobs.lose_silent("scores", searching.clock.now, lost)) == 1
    _, _, record = searching.part(runs=math.inf)
    assert record.job_id is not None
    assert store.jobs.get(record.job_id).phase == "confirming"
    assert searching.said[-1].startswith("4 runs of an interrupted search taken over")


def test_a_search_that_is_taken_for_lost_while_it_runs_is_stored_on(store: Store) -> None:
    searching = Searching(store)

    def lose() -> None:
        lost = Event("lost", at=searching.clock())
        assert store.jobs.lose_silent("scores", searching.clock.now, lost)

    searching.job.meanwhile[4] = lose
    search, _, record = searching.part()
    assert record.job_id is not None
    assert len(store.trials.of(record.job_id)) == len(search.runs)
    assert searching.said == []


def test_a_store_that_fails_for_a_while_ends_nothing_and_gets_the_runs_later(store: Store) -> None:
    searching = Searching(store)

    def rename(name: str, other: str) -> None:
        store.database.write(text(f"ALTER TABLE {name} RENAME TO {other}"))

    searching.job.meanwhile[3] = lambda: rename("trials", "hidden")
    searching.job.meanwhile[6] = lambda: rename("hidden", "trials")
    search, _, record = searching.part()
    assert record.job_id is not None
    assert len(store.trials.of(record.job_id)) == len(search.runs)
    (said,) = searching.said
    assert said.startswith("the search goes on, but is not stored at present: ")


def test_a_job_that_is_deleted_under_a_search_ends_nothing(store: Store) -> None:
    searching = Searching(store)

    def delete() -> None:
        (contact,) = store.jobs.contacts()
        delete_training(store, contact.id, force=True)

    searching.job.meanwhile[5] = delete
    _, verdict, record = searching.part()
    assert verdict.gain is not None
    assert store.jobs.contacts() == []
    assert not record.is_kept
    assert searching.said == [
        "the search goes on without being stored: the job was deleted or is written by another "
        "search"
    ]


def test_what_does_not_fit_is_not_taken_over(store: Store) -> None:
    searching = Searching(store)
    with pytest.raises(Interrupted):
        searching.part(runs=4)
    about = About("train.py", "f" * 64, store.jobs.get(store.jobs.contacts()[0].id).limits, False)
    record = Record(store, about, searching.said.append, searching.clock)
    assert record.resume() is not None
    own = store.jobs.get(store.jobs.contacts()[0].id).baseline
    assert record.recalled(1, BASELINE, own) is not None
    with pytest.raises(Diverged):
        record.recalled(2, CONFIRM, own)
    with pytest.raises(Diverged):
        record.recalled(2, SEARCH, Configuration({**own, "NCCL_BUFFSIZE": 7}))


def test_the_time_before_an_interruption_counts_and_that_in_between_does_not(store: Store) -> None:
    searching = Searching(store, most_seconds=480, most_runs=100, fails=False)
    for _ in range(6):
        with pytest.raises(Interrupted):
            searching.part(runs=2)  # and a third, which is cut short
        searching.clock.now += 86_400
    search, verdict, record = searching.part()
    assert verdict.gain is not None
    assert 400 < record.spent_seconds() < 480
    assert len(search.runs) == len(searching.job.made)


def test_without_time_for_a_comparison_nothing_is_changed() -> None:
    searching = Searching(None, most_seconds=100, most_runs=100, fails=False)
    search, verdict, _ = searching.part()
    assert verdict.configuration == search.space.own
    assert verdict.gain is None
    assert len(search.runs) == 1


def test_the_price_is_what_was_spent_and_when_it_is_earned() -> None:
    gain = Interval(1.10, 1.05, 1.20)
    assert describe_price(1020.0, 2, gain) == (
        "spent 34 GPU-minutes (17.0 min on 2 GPUs); pays after 2.8 h of training at 1.10x "
        "(85 min to 5.7 h)"
    )
    assert describe_price(30.0, 0, None) == "spent 30 s"
    assert describe_price(6000.0, 1, None) == "spent 100 GPU-minutes (100 min on 1 GPU)"
    assert "(60 s to never)" in describe_price(30.0, 0, Interval(1.2, 1.0, 1.5))
    # An hour at 1.25x does what took 75 minutes: it has earned 15.
    assert pays_after_seconds(900.0, 1.25) == pytest.approx(3600.0)


@pytest.mark.parametrize("minutes", [6])
def test_a_search_with_a_limit_of_time_ends_in_time_with_a_comparison(minutes: float) -> None:
    searching = Searching(None, most_seconds=60 * minutes, most_runs=100, fails=False)
    search, verdict, record = searching.part()
    assert verdict.gain is not None
    assert not verdict.is_out_of_time
    purposes = [run.purpose for run in search.runs]
    assert purposes.count(CONFIRM) >= 4
    spent = record.spent_seconds()
    assert 60 * minutes - 5 * searching.job.run_seconds < spent < 60 * minutes
