"""Jobs that are like earlier ones take over what they have in common."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from sqlalchemy import update

from bagua_autotune.costs import Kind
from bagua_autotune.earlier.heritage import inherit, model_key, network_key
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Event, JobSpec
from bagua_autotune.model.reasons import NOT_SHOWN
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Value
from tests.autotune.simulated_job import SimulatedJob
from tests.autotune.support import Ranks, drive, make_spec, present, registration
from tests.autotune.tuning.jobs import simulator, slower_than_best, tuned


def knows_before_its_first_trial(tuner: Tuner, job_id: str) -> bool:
    """Whether there was a cost model when only its registration was known."""
    job = tuner.store.jobs.get(job_id)
    return Knowledge(tuner.store).problem(Round(job, [])).predictor is not None


def test_the_same_model_on_another_network_takes_over_the_ready_times(tuner: Tuner) -> None:
    first = simulator()
    tuned(tuner, "first", first)
    job = tuned(tuner, "second", simulator(gbit_per_second=25), 1, fingerprint="second")
    inherited = present(tuner.store.jobs.get("second").inherited)
    assert (inherited.configuration, inherited.costs, inherited.source) == (None, {}, "first")
    assert inherited.ready_seconds is not None
    truth = first.profile(first.default).ready_seconds
    assert inherited.ready_seconds[-1] == pytest.approx(truth[-1], rel=0.1)
    assert not knows_before_its_first_trial(tuner, "second"), "what is sent is still unknown"
    assert slower_than_best(job) < 0.05


@pytest.mark.slow
def test_another_model_on_the_same_network_takes_over_the_costs(tuner: Tuner) -> None:
    tuned(tuner, "first", simulator())
    job = tuned(tuner, "second", simulator("bert-large"), 1, fingerprint="second")
    inherited = present(tuner.store.jobs.get("second").inherited)
    assert (inherited.configuration, inherited.ready_seconds) == (None, None)
    kinds = {Kind.parse(text) for text in inherited.costs}
    assert Kind("off", 1) in kinds
    for latency_seconds, seconds_per_byte, _ in inherited.costs.values():
        assert 0 < latency_seconds < 0.1
        assert 0 < seconds_per_byte < 1e-7
    assert not knows_before_its_first_trial(tuner, "second"), "ready times are still unknown"
    assert slower_than_best(job) < 0.05


@pytest.mark.slow
def test_a_model_and_a_network_known_from_two_jobs_are_put_together(tuner: Tuner) -> None:
    tuned(tuner, "model", simulator("bert-large", gbit_per_second=25), fingerprint="model")
    tuned(tuner, "network", simulator("resnet50"), fingerprint="network")
    job = tuned(tuner, "both", simulator("bert-large"), 1, fingerprint="both")
    assert knows_before_its_first_trial(tuner, "both")
    # From its first switch on it is faster than the default.
    first = job.switches[1].configuration
    assert job.true_seconds(first) < job.true_seconds(job.baseline)
    assert slower_than_best(job) < 0.05


@pytest.mark.slow
def test_an_inherited_network_that_became_slower_does_not_mislead_for_long(tuner: Tuner) -> None:
    before, now = simulator(gbit_per_second=25), simulator(gbit_per_second=5)
    tuned(tuner, "first", before)
    job = SimulatedJob(tuner, before, "second", 1, fingerprint="second")
    assert knows_before_its_first_trial(tuner, "second")
    job.simulator = now
    job.run(3000, until_finished=True)
    assert job.is_finished
    assert slower_than_best(job) < 0.05


def test_keys_tell_apart_what_decides_and_nothing_else() -> None:
    spec = make_spec()
    renamed = make_spec(name="other", fingerprint="g" * 64)
    assert model_key(renamed) == model_key(spec)
    assert network_key(renamed) == network_key(spec)
    tensors = registration()["tensors"]
    shorter = make_spec(tensors=tensors[:-1])
    assert model_key(shorter) != model_key(spec)
    assert network_key(shorter) == network_key(spec)
    for changes in (
        {"ranks_per_node": [1, 3]},
        {"ranks_per_node": [4]},
        {"software": {"torch": "2.6"}},
    ):
        other = make_spec(**changes)
        assert network_key(other) != network_key(spec), changes
        assert model_key(other) == model_key(spec)
    one, two = ({"torch": "2.6", "nccl": "2"}, {"nccl": "2", "torch": "2.6"})
    assert network_key(make_spec(software=one)) == network_key(make_spec(software=two))


def test_the_stored_gain_is_what_was_confirmed(tuner: Tuner) -> None:
    tuner.register("fast", make_spec())
    result = present(drive(tuner, "fast", Ranks()).result)
    found = present(inherit(make_spec(), tuner.store, Knowledge(tuner.store)))
    assert found.gain == pytest.approx(math.log(result.speedup))


def begins_with(tuner: Tuner) -> dict[str, Value] | None:
    """The configuration that another run of the usual job takes over."""
    found = inherit(make_spec(), tuner.store, Knowledge(tuner.store))
    return found.configuration if found else None


def test_a_default_that_was_kept_after_a_whole_search_is_begun_with(tuner: Tuner) -> None:
    tuner.register("first", make_spec())
    first = present(drive(tuner, "first", Ranks(step_seconds=lambda _: 0.2)).result)
    assert (first.kept, first.reason) == ("baseline", "nothing was clearly faster")
    found = present(inherit(make_spec(), tuner.store, Knowledge(tuner.store)))
    assert (found.configuration, found.gain) == (make_spec().default_configuration, 0.0)
    tuner.register("second", make_spec())
    second = present(drive(tuner, "second", Ranks(step_seconds=lambda _: 0.2)).result)
    assert second.trials == 1
    assert begins_with(tuner) == make_spec().default_configuration, "also from one that inherited"


class Afresh(SimulatedJob):
    def _spec(self) -> JobSpec:
        return super()._spec().model_copy(update={"fresh": True})


@pytest.mark.slow
def test_one_that_begins_afresh_takes_over_nothing_and_leaves_what_it_finds(tuner: Tuner) -> None:
    first = SimulatedJob(tuner, simulator(), "first", 0, name="one")
    first.run(100)
    gone = Event("ended", at=tuner.store.jobs.get("first").last_contact_at + 1)
    tuner.store.jobs.end_gone(["first"], gone)
    job = Afresh(tuner, simulator(), "afresh", 1, name="one")
    assert tuner.store.jobs.get("afresh").inherited is None
    assert tuner.store.lives.following("first") is None, "nor is it a life of that one"
    assert not knows_before_its_first_trial(tuner, "afresh")
    job.run(3000, until_finished=True)
    assert job.is_finished
    SimulatedJob(tuner, simulator(), "next", 1, name="one")
    inherited = present(tuner.store.jobs.get("next").inherited)
    assert inherited.source == "afresh"


def test_what_a_training_names_to_begin_with_holds_where_it_begins_afresh(tuner: Tuner) -> None:
    tuner.register("first", make_spec())
    drive(tuner, "first", Ranks(noise=0.002))
    named = {"bucket_bytes": 1024 * 1024, "hierarchical": "off"}
    found = inherit(make_spec(fresh=True, begin_with=named), tuner.store, Knowledge(tuner.store))
    assert found is not None
    assert (found.configuration, found.costs, found.ready_seconds) == (named, {}, None)


def test_explicit_buckets_of_another_model_are_not_begun_with(tuner: Tuner) -> None:
    """A fingerprint is the client's word."""
    usual = registration()
    explicit = make_spec(
        knobs={**usual["knobs"], "buckets": {"type": "partition"}},
        default_configuration={**usual["default_configuration"], "buckets": []},
    )
    tuner.register("first", explicit)
    drive(tuner, "first", Ranks())
    for counts, is_inherited in (([100, 150], True), ([100, 149], False)):
        stored = tuner.store.jobs.get("first").result
        assert stored
        changed = replace(stored, configuration={**stored.configuration, "buckets": counts})
        of_first = update(JobRow).where(JobRow.id == "first")
        tuner.store.database.write(of_first.values(result=asdict(changed)))
        found = inherit(explicit, tuner.store, Knowledge(tuner.store))
        assert (found is not None) == is_inherited


@pytest.mark.parametrize(
    "limits", [{"max_samples": 1}, {"max_samples": 2}, {"remaining_steps": 99}]
)
def test_a_default_that_was_kept_for_want_of_trials_is_not_begun_with(
    tuner: Tuner, limits: dict[str, int]
) -> None:
    tuner.register("short", make_spec(limits=limits))
    result = present(drive(tuner, "short", Ranks(step_seconds=lambda _: 0.2)).result)
    assert result.kept == "baseline"
    assert begins_with(tuner) is None


def test_a_default_that_was_kept_as_noise_would_hide_any_gain_is_not_begun_with(
    tuner: Tuner,
) -> None:
    """The next run may be on a quieter machine, where the little that is possible shows."""
    of = simulator(gbit_per_second=40)
    first = present(tuned(tuner, "first", of, noise=0.12).status.result)
    assert NOT_SHOWN in first.reason
    again = tuned(tuner, "again", of, 1, noise=0.005)
    inherited = present(tuner.store.jobs.get("again").inherited)
    assert (inherited.configuration, inherited.gain) == (None, None)
    result = present(again.status.result)
    assert result.kept == "winner"


def test_a_winner_that_the_ranks_could_not_run_leaves_nothing_to_begin_with(tuner: Tuner) -> None:
    tuner.register("first", make_spec())
    assert drive(tuner, "first", Ranks()).result is not None
    assert begins_with(tuner) is not None
    tuner.take_event("first", Event("disagreement", None, 999, "rank 3 ran out of memory"))
    result = present(tuner.status("first").result)
    assert (result.kept, result.reason) == (
        "baseline",
        "the ranks disagreed: rank 3 ran out of memory",
    )
    assert begins_with(tuner) is None
    tuner.register("second", make_spec())
    second = present(drive(tuner, "second", Ranks()).result)
    assert second.kept == "winner", "it is searched for again"


def test_a_default_that_was_kept_because_ranks_failed_is_not_begun_with(tuner: Tuner) -> None:
    tuner.register("first", make_spec())
    ranks = Ranks()
    while (trial := tuner.open_trial("first")) is not None:
        if trial.configuration == make_spec().default_configuration:
            drive(tuner, "first", ranks, polls=1)
        else:
            tuner.take_event("first", Event("disagreement", trial.index, 50, "out of memory"))
    result = present(tuner.status("first").result)
    assert result.kept == "baseline"
    assert begins_with(tuner) is None


def test_a_job_with_one_trial_does_not_begin_with_another(tuner: Tuner) -> None:
    tuner.register("first", make_spec())
    assert drive(tuner, "first", Ranks()).configuration != make_spec().default_configuration
    tuner.register("second", make_spec(limits={"max_samples": 1}))
    result = present(drive(tuner, "second", Ranks()).result)
    assert (result.kept, result.trials) == ("baseline", 1)


def test_a_winner_is_begun_with_however_few_trials_found_it(tuner: Tuner) -> None:
    tuner.register("first", make_spec(limits={"max_samples": 4}))
    result = present(drive(tuner, "first", Ranks(noise=0.001)).result)
    assert result.kept == "winner"
    assert begins_with(tuner) == result.configuration


def test_jobs_of_bagua_s_protocol_inherit_nothing_and_leave_nothing(tuner: Tuner) -> None:
    tuner.register("new", make_spec(limits={"max_samples": 4}))
    drive(tuner, "new", Ranks())
    tuner.register("old", make_spec(), protocol="v1")
    assert tuner.store.jobs.get("old").inherited is None
    assert tuner.store.jobs.latest(fingerprint=make_spec().fingerprint).id == "new"
