"""Overviews of jobs that are really tuned, in a real store."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update

from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Event, Observation
from bagua_autotune.search import Problem
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.maintenance import retention
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views import summary as module
from bagua_autotune.views.lists import every_trial
from bagua_autotune.views.overviews import LIST_BUDGET_SECONDS, Overviews
from bagua_autotune.views.reading import Reading
from bagua_autotune.views.summary import Summaries
from tests.autotune.support import Clock, Ranks, counting, drive, peaked, present
from tests.autotune.views.jobs import SPEC, run


@pytest.fixture
def tuner(store: Store, clock: Clock) -> Tuner:
    return Tuner(store, clock=clock)


@pytest.fixture
def overviews(tuner: Tuner) -> Overviews:
    return Overviews(tuner.store)


def test_a_job_that_was_just_registered_can_be_looked_at(
    tuner: Tuner, overviews: Overviews
) -> None:
    tuner.register("job", SPEC)
    found = overviews.overview("job")
    assert found.job.figures.speedup is None
    assert (found.steps.points, found.best, found.ranks, found.events) == ([], [], [], [])
    assert [trial.words for trial in found.trials] == ["bucket 25 MiB, flat"]
    assert overviews.curve("job").curves == ()
    assert [layout.role for layout in overviews.buckets("job").layouts] == ["default"]


def test_a_search_lasts_from_its_first_trial_to_the_end_of_its_last(
    tuner: Tuner, overviews: Overviews, clock: Clock
) -> None:
    """Not from the registration: until its first steps a training loads its model."""
    tuner.register("job", SPEC)
    clock.now += 600.0
    run(tuner, Ranks(noise=0.005))
    first = overviews.overview("job").job
    trials = tuner.store.trials.of("job")
    assert trials[0].started_at is not None
    assert first.figures.search_seconds == (trials[-1].ended_at or 0) - trials[0].started_at < 600
    assert first.result is not None
    assert first.result.seconds == first.figures.search_seconds
    assert first.result.steps == first.figures.search_steps
    tuner.take_event("job", Event("drift", None, 10**6, "slower", 0.5))
    run(tuner, Ranks(noise=0.005, seed=1))
    second = overviews.overview("job").job
    assert second.round == 1
    totals = Summaries(tuner.store).of(tuner.store.jobs.contact("job")).totals
    assert totals.search_steps == first.figures.search_steps + second.figures.search_steps
    assert totals.search_seconds == pytest.approx(
        first.figures.search_seconds + second.figures.search_seconds
    )


def test_a_tuned_job_tells_the_same_as_its_result(tuner: Tuner, overviews: Overviews) -> None:
    run(tuner, Ranks(seed=1, noise=0.005))
    found = overviews.overview("job")
    result, figures = found.job.result, found.job.figures
    assert result is not None
    assert result.kept == "winner"
    assert (figures.speedup, figures.speedup_low) == (result.speedup, result.low)
    progress = found.job.progress
    assert (progress.speedup, progress.incumbent) == (result.speedup, result.configuration)
    assert figures.search_steps == result.steps
    assert figures.cost_seconds == pytest.approx(result.cost_seconds)
    assert figures.payback_steps == result.payback_steps
    (best,) = [trial for trial in found.trials if trial.is_best]
    assert best.configuration == result.configuration
    assert figures.incumbent_seconds == pytest.approx(best.seconds, rel=0.01)
    assert found.best[-1].seconds == figures.incumbent_seconds
    # The last trial may have been the default: what runs now is what was kept.
    assert figures.current_seconds == pytest.approx(best.seconds, rel=0.03)
    assert figures.exposed_seconds == pytest.approx(0.2 * (best.seconds or 0), rel=0.05)
    assert len(found.steps.points) == len(tuner.store.observations.of("job"))
    assert len(found.ranks) == 4
    assert "bucket 4 MiB" in found.why
    assert found.switches[-1].words.startswith("tuned: bucket 4 MiB")


def test_the_curve_goes_through_what_was_measured_and_is_fitted_once_per_trial(
    tuner: Tuner, overviews: Overviews
) -> None:
    ranks = Ranks(seed=1, noise=0.005)
    run(tuner, ranks, trials=7)
    curve = overviews.curve("job")
    trials = [trial for trial in every_trial(tuner.store, "job") if trial.seconds]
    assert curve.trials == len(trials) == 7
    assert {line.label for line in curve.curves} == {"flat", "hierarchical"}
    points = {
        (point.bucket_bytes, line.values["hierarchical"]): point
        for line in curve.curves
        for point in line.points
    }
    for trial in trials:
        key = trial.configuration["bucket_bytes"], trial.configuration["hierarchical"]
        point = points[key]  # type: ignore[index]
        assert point.low <= point.seconds <= point.high
        assert point.seconds == pytest.approx(trial.seconds, rel=0.05)
    for line in curve.curves:
        sizes = [point.bucket_bytes for point in line.points]
        assert sizes == sorted(set(sizes))
    assert curve.expected_gain is not None
    assert math.isfinite(curve.expected_gain)
    open_trial = present(tuner.open_trial("job"))
    before = tuner.store.jobs.get("job").revision
    tuner.take_event("job", Event("switched", open_trial.index, 10**6))
    assert tuner.store.jobs.get("job").revision > before
    assert overviews.curve("job") is curve
    run(tuner, ranks, trials=9)  # what follows the one that runs is open already
    assert overviews.curve("job").trials == 8


def test_nobody_waits_for_a_curve_that_is_being_made(tuner: Tuner) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class SlowKnowledge(Knowledge):
        def problem(self, round_: Round) -> Problem:
            if round_.job.id == "slow":
                begun.set()
                assert may_end.wait(60)
            return super().problem(round_)

    overviews = Overviews(tuner.store, knowledge=SlowKnowledge(tuner.store))
    ranks = Ranks(seed=1, noise=0.005)
    for job_id in ("job", "other", "slow"):
        run(tuner, ranks, trials=5, job_id=job_id)
    before = overviews.curve("job")
    run(tuner, ranks, trials=6)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(overviews.curve, "slow")
        assert begun.wait(60)
        try:
            assert overviews.curve("job") is before
            assert [overviews.curve(job_id).trials for job_id in ("other", "slow")] == [0, 0]
        finally:
            may_end.set()
        slow.result()
    assert overviews.curve("job").trials > before.trials
    for job_id in ("job", "other", "slow"):
        measured = sum(trial.estimate is not None for trial in tuner.store.trials.of(job_id))
        assert overviews.curve(job_id).trials == measured > 3
    assert overviews.curve("slow") is slow.result()


def test_the_curve_is_of_the_round_that_the_figures_are_of(
    tuner: Tuner, overviews: Overviews
) -> None:
    run(tuner, Ranks(seed=1, noise=0.005))
    tuned = overviews.curve("job"), overviews.overview("job").job.figures
    tuner.take_event("job", Event("drift", None, 10**6, "slower", 0.5))
    slower = Ranks(seed=1, noise=0.005, step_seconds=lambda c: 3 * peaked(c))
    run(tuner, slower, trials=len(tuner.store.trials.of("job")) + 3)
    assert overviews.curve("job").trials == 4
    tuner.take_event("job", Event("ended"))
    assert overviews.curve("job") == tuned[0]
    found = overviews.overview("job").job.figures
    assert found.baseline_seconds == tuned[1].baseline_seconds
    assert found.speedup == tuned[1].speedup


def test_there_is_no_curve_where_the_search_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(Store("sqlite://"), "random")
    run(tuner, Ranks(noise=0.005), trials=4)
    assert Overviews(tuner.store, "random").curve("job").curves == ()
    monkeypatch.setattr(Knowledge, "problem", lambda *_: 1 // 0)
    assert Overviews(tuner.store).curve("job").curves == ()


def test_another_job_of_the_same_id_is_not_mistaken_for_it(
    tuner: Tuner, overviews: Overviews
) -> None:
    tuner.register("job", SPEC)
    first = overviews.overview("job").job
    retention.prune(tuner.store, 1e9)
    with pytest.raises(UnknownJob):
        overviews.overview("job")
    tuner.register("job", SPEC.model_copy(update={"name": "other"}))
    second = overviews.overview("job").job
    assert (second.revision, second.name) == (first.revision, "other")


def test_a_listing_of_jobs_that_did_not_change_reads_one_line_of_each(
    tuner: Tuner, overviews: Overviews
) -> None:
    for number in range(20):
        tuner.register(f"job{number}", SPEC)
    first = overviews.job_list().jobs
    assert [summary.id for summary in first] == [f"job{n}" for n in reversed(range(20))]
    with counting() as statements:
        assert overviews.job_list().jobs == first
    assert len([s for s in statements if s.startswith("SELECT")]) == 1
    assert not any("tensors" in statement for statement in statements)


def test_a_list_has_a_budget_and_the_rest_comes_next(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, make_totals = [0.0], module.make_totals

    def slow(reading: Reading) -> module.Totals:
        now[0] += 0.6 * LIST_BUDGET_SECONDS
        return make_totals(reading)

    monkeypatch.setattr(module, "make_totals", slow)
    overviews = Overviews(tuner.store, stopwatch=lambda: now[0])
    jobs = [f"job{number}" for number in range(6)]
    for job_id in jobs:
        tuner.register(job_id, SPEC)
    assert len(overviews.job_list().jobs) == 6  # of new ones nothing else could be told
    for job_id in jobs:
        tuner.observe(job_id, 0, [Observation(0, (0.2,) * 4)])
    tuner.take_event("job5", Event("ended"))
    counts = []
    for _ in range(4):
        found = {summary.id: summary for summary in overviews.job_list().jobs}
        for job_id, summary in found.items():
            job = tuner.store.jobs.get(job_id)
            # Who compares revisions must see that the figures are not the newest.
            is_new = summary.figures.search_steps == 1
            assert is_new == (summary.revision == job.revision)
            assert summary.last_contact_at == job.last_contact_at
            assert (summary.state, summary.ended_at) == (job.phase, job.ended_at)
        counts.append(sum(summary.figures.search_steps for summary in found.values()))
    assert counts == [3, 5, 6, 6]


def test_one_reading_serves_all_who_look_at_a_job(tuner: Tuner) -> None:
    summaries = Summaries(tuner.store)
    run(tuner, Ranks(noise=0.005), trials=2)
    contact = tuner.store.jobs.contact("job")
    seen = summaries.of(contact)
    assert (
        Overviews(tuner.store, summaries=summaries).job_list().jobs[0].figures
        is seen.summary.figures
    )
    assert summaries.of(contact) is seen


def test_an_overview_is_of_one_moment(tuner: Tuner, overviews: Overviews) -> None:
    run(tuner, Ranks(noise=0.005), trials=2)
    with counting() as statements:
        overviews.overview("job")
    # Which revision it is; then all that is shown of it.
    assert (statements[0], statements.count("BEGIN"), statements.count("COMMIT")) == ("BEGIN", 2, 2)
    at = statements.index("COMMIT")
    assert (statements[at + 1], statements[-1]) == ("BEGIN", "COMMIT")


def test_a_job_that_cannot_be_read_does_not_hide_the_others(
    tuner: Tuner, overviews: Overviews
) -> None:
    for job_id in ("job", "broken"):
        tuner.register(job_id, SPEC)
    broken = update(TrialRow).where(TrialRow.job_id == "broken")
    tuner.store.database.write(broken.values(configuration=[1], cost=1e300))
    assert [summary.id for summary in overviews.job_list().jobs] == ["job"]


def test_times_are_those_of_the_last_contact(
    tuner: Tuner, overviews: Overviews, clock: Clock
) -> None:
    run(tuner, Ranks(noise=0.005), trials=3)
    before = overviews.overview("job").job.progress
    clock()  # time passes, and nobody is heard of
    assert overviews.overview("job").job.progress == before
    assert overviews.overview("job").job.progress == tuner.status("job").progress


def test_a_drift_that_opens_no_round_is_what_the_job_runs_at_now(
    tuner: Tuner, overviews: Overviews
) -> None:
    limits = SPEC.limits.model_copy(update={"max_rounds": 1})
    tuner.register("job", SPEC.model_copy(update={"limits": limits}))
    drive(tuner, "job", Ranks(noise=0.005), steps=10)
    tuner.take_event("job", Event("drift", None, 10**6, "slower", 0.5))
    assert overviews.overview("job").job.figures.current_seconds == 0.5
