"""What is known of a job's costs, from real stores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bagua_autotune.earlier import knowledge
from bagua_autotune.earlier.knowledge import LONGEST_HORIZON_TRIALS, Knowledge
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Observation
from bagua_autotune.store.maintenance import retention
from bagua_autotune.tuning.status import WrongStep
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from bagua_wire.configuration import Configuration
from bagua_wire.profile import BucketTiming, Profile
from tests.autotune.support import MIB, make_spec, registration
from tests.autotune.tuning.jobs import simulator, slower_than_best, tuned
from tests.simulator.jobs import make_cluster, make_workload

LISTS = ("bucket_bytes", "hierarchical", "buckets")


def profile(count: int, step: int = 10) -> Profile:
    ready = tuple(0.1 + 0.001 * place for place in range(count))
    bucket = BucketTiming(bytes=MIB, started_seconds=0.1, ended_seconds=0.2)
    return Profile(step=step, step_seconds=0.4, ready_seconds=ready, buckets=(bucket,) * 3)


def test_an_id_that_is_used_again_is_another_job(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    tuner.take_profile("job", 0, profile(250))
    store = tuner.store
    before = Knowledge(store).problem(Round.of(store.jobs.get("job"), store.trials.of("job")))
    retention.prune(store, math.inf)
    small = make_spec(tensors=registration()["tensors"][:3])
    tuner.register("job", small)
    with pytest.raises(WrongStep, match="250 values, the job has 3 tensors"):
        tuner.take_profile("job", 0, profile(250))
    tuner.take_profile("job", 0, profile(3))
    steps = [Observation(step, (0.2,) * 4) for step in range(1, 30)]
    tuner.observe("job", 0, steps)
    assert tuner.store.trials.of("job")[0].state == "measured"
    asked = [trial.configuration for trial in store.trials.of("job")]
    # A model of three tensors leaves hardly anything to try.
    after = Knowledge(store).problem(Round.of(store.jobs.get("job"), store.trials.of("job")))
    assert len(after.candidates) < len(before.candidates)
    assert set(asked) <= set(after.candidates)


def test_a_profile_has_a_ready_time_of_each_tensor_and_no_more_buckets_than_tensors(
    tuner: Tuner,
) -> None:
    tuner.register("job", make_spec(tensors=registration()["tensors"][:2]))
    with pytest.raises(WrongStep, match="ready_seconds has 3 values, the job has 2 tensors"):
        tuner.take_profile("job", 0, profile(3))
    with pytest.raises(WrongStep, match="3 are more than the job's 2 tensors"):
        tuner.take_profile("job", 0, profile(2))
    assert tuner.store.profiles.of("job") == []


@pytest.mark.parametrize("seed", range(2))
def test_one_explicit_list_is_offered_for_each_way_to_reduce_and_stays(
    tuner: Tuner, seed: int
) -> None:
    """Each fit would list slightly other buckets; a new one each time would never be compared."""
    job = tuned(tuner, "job", simulator(), seed, knobs=LISTS)
    trials = tuner.store.trials.of("job")
    problem = Knowledge(tuner.store).problem(Round.of(tuner.store.jobs.get("job"), trials))
    listed = [c for c in problem.candidates if c["buckets"]]
    assert sorted(str(c["hierarchical"]) for c in listed) == ["leaders", "off", "shards"]
    tried = {t.configuration for t in trials if t.configuration["buckets"]}
    assert tried <= set(listed)
    assert problem.candidates[0] == job.baseline


def test_no_explicit_list_is_offered_before_two_settings_were_profiled(tuner: Tuner) -> None:
    usual = registration()
    spec = make_spec(
        knobs={**usual["knobs"], "buckets": {"type": "partition"}},
        default_configuration={**usual["default_configuration"], "buckets": []},
    )
    tuner.register("job", spec)
    tuner.take_profile("job", 0, profile(250))
    store = tuner.store
    problem = Knowledge(store).problem(Round.of(store.jobs.get("job"), store.trials.of("job")))
    assert problem.predictor is not None
    assert not any(c["buckets"] for c in problem.candidates)


def test_what_a_better_setting_is_worth_grows_with_the_steps_that_remain(tuner: Tuner) -> None:
    found = []
    for steps in (1, 1000, 10**9):
        tuner.register(f"job{steps}", make_spec(limits={"remaining_steps": steps}))
        job = tuner.store.jobs.get(f"job{steps}")
        found.append(Knowledge(tuner.store).problem(Round(job, [])).horizon_trials)
    assert 0 < found[0] < found[1] < found[2] == LONGEST_HORIZON_TRIALS


def unfittable(*_: object) -> None:
    raise np.linalg.LinAlgError("singular matrix")


def test_a_job_whose_profiles_cannot_be_fitted_goes_on(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knowledge, "fit_model", unfittable)
    job = tuned(tuner, "job", simulator())
    assert slower_than_best(job) < 0.1, "found by what was measured: the default is 0.23"
    assert "job job: no cost model can be fitted to its profiles" in caplog.text
    assert "search failed" not in caplog.text


@pytest.mark.slow
def test_a_job_begins_although_nothing_can_be_learned_from_earlier_ones(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(tuner, "first", simulator())
    monkeypatch.setattr(knowledge, "fit_model", unfittable)
    assert tuned(tuner, "second", simulator(), 1).status.result is not None
    assert tuner.store.jobs.get("second").inherited is None
    assert "job second: begins without what earlier jobs found" in caplog.text


@pytest.mark.parametrize("count", [1, 2])
def test_of_few_tensors_no_list_is_tried_that_does_what_another_setting_does(
    tuner: Tuner, count: int
) -> None:
    """The default has more channels than there can be buckets."""
    few = Simulator(make_workload((8 * MIB,) * count, milliseconds=20), make_cluster())
    knobs = ("bucket_bytes", "hierarchical", "channels", "buckets")
    default = Configuration({**{knob: few.default[knob] for knob in knobs}, "channels": 4})
    job = tuned(tuner, "job", few, knobs=knobs, default=default)
    tried = [trial.configuration for trial in tuner.store.trials.of("job")]
    assert len(set(tried)) > 2
    assert not any(configuration["buckets"] for configuration in tried)
    assert slower_than_best(job) < 0.05
