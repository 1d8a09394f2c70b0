"""What the ranks keep of a training, for the service of a host that knows nothing of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import ValidationError

from bagua_autotune.earlier.copies import Copy, adopt, copy_of
from bagua_autotune.model.job import Event
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.overviews import Overviews
from bagua_simulator import Cluster, Simulator
from bagua_simulator.workloads import load
from bagua_wire.configuration import Configuration
from tests.autotune.api.test_v2 import change
from tests.autotune.earlier.test_heritage import knows_before_its_first_trial
from tests.autotune.earlier.test_restart import RESIZED
from tests.autotune.simulated_job import SimulatedJob
from tests.autotune.support import Ranks, make_spec, present
from tests.autotune.tuning.jobs import GBIT, simulator, slower_than_best, tuned
from tests.autotune.tuning.test_gone import run

RUN = {"run": "night-shift"}


def carried(tuner: Tuner, job_id: str) -> Tuner:
    """The tuner of another host, to which a copy was brought as bytes."""
    text = copy_of(tuner.store, tuner.knowledge, job_id).model_dump_json()
    other = Tuner(Store("sqlite://"))
    assert adopt(other.store, Copy.model_validate_json(text), time.time())
    return other


def tried(tuner: Tuner, job_id: str) -> list[Configuration]:
    return [trial.configuration for trial in tuner.store.trials.of(job_id)]


def test_a_restart_on_another_host_goes_on_where_it_was(tuner: Tuner) -> None:
    tuner.register("before", make_spec(**RUN))
    run(tuner, "before", Ranks(noise=0.002), trials=4)
    measured = tried(tuner, "before")
    other = carried(tuner, "before")
    other.register("after", make_spec(**RUN))
    inherited = present(other.store.jobs.get("after").inherited)
    assert inherited.earlier is not None
    assert len(inherited.earlier.trials) == 3
    run(other, "after", Ranks(seed=1, noise=0.002), trials=2)
    assert tried(other, "after")[1] == measured[4], "what was under way comes next"
    lives = Overviews(other.store).overview("after").lives
    assert [(life.job, life.end) for life in lives] == [("before", "killed"), ("after", "running")]


def test_what_was_found_for_other_ranks_comes_along(tuner: Tuner) -> None:
    """With two nodes, with one, and on two again: on a third host."""
    tuner.register("two", make_spec(**RUN, **RESIZED))
    run(tuner, "two", Ranks(noise=0.002, world_size=2))
    result = present(tuner.status("two").result)
    assert result.kept == "winner"
    other = carried(tuner, "two")
    other.register("one", make_spec(**RUN))
    run(other, "one", Ranks(noise=0.002), trials=2)
    third = carried(other, "one")
    third.register("two-again", make_spec(**RUN, **RESIZED))
    run(third, "two-again", Ranks(noise=0.002, world_size=2), trials=1)
    trial = present(third.open_trial("two-again"))
    assert trial.configuration == result.configuration
    lives = Overviews(third.store).overview("two").lives
    assert [life.job for life in lives] == ["two", "one", "two-again"]
    assert [life.number for life in lives] == [1, 2, 3]


def smaller() -> Simulator:
    """Two of the four nodes."""
    cluster = Cluster(
        nodes=2,
        ranks_per_node=2,
        bandwidth_bytes_per_second=10 * GBIT,
        latency_seconds=100e-6,
        inside_bandwidth_bytes_per_second=800 * GBIT,
    )
    return Simulator(load("resnet50"), cluster)


@pytest.mark.slow
def test_the_networks_costs_come_along_for_other_ranks(tuner: Tuner) -> None:
    tuned(tuner, "eight", simulator(), name="resnet")
    other = carried(tuner, "eight")
    job = SimulatedJob(other, smaller(), "four", 1, fingerprint="four", name="resnet")
    assert knows_before_its_first_trial(other, "four")
    job.run(3000, until_finished=True)
    assert slower_than_best(job) < 0.05
    size = len(copy_of(tuner.store, tuner.knowledge, "eight").model_dump_json())
    assert size < 100_000


def test_what_is_known_already_stays_as_it_is(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    run(tuner, "job", Ranks(noise=0.002), trials=2)
    copy = copy_of(tuner.store, tuner.knowledge, "job")
    run(tuner, "job", Ranks(noise=0.002), trials=3)
    before = tuner.store.jobs.get("job"), tuner.store.trials.of("job")
    assert adopt(tuner.store, copy, time.time()) == 0
    assert (tuner.store.jobs.get("job"), tuner.store.trials.of("job")) == before


def test_a_copy_of_a_clock_that_is_ahead_is_older_than_what_follows(tuner: Tuner) -> None:
    late = Tuner(Store("sqlite://"), clock=lambda: time.time() + 1e6)
    late.register("before", make_spec(**RUN))
    run(late, "before", Ranks(noise=0.002), trials=2)
    late.take_event("before", Event("ended", message="the training process ended"))
    other = carried(late, "before")
    other.register("after", make_spec(**RUN))
    assert [job.id for job in Overviews(other.store).job_list().jobs] == ["after"]
    assert other.store.jobs.get("before").created_at < other.store.jobs.get("after").created_at


FIRST = "jobs.0.trials.0."
SECOND = "jobs.0.trials.1."


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (SECOND + "configuration.bucket_bytes", 1),
        ("jobs.0.phase", "finished"),  # and no end of it
        (FIRST + "cost", None),
        (FIRST + "cost", 1e300),
        (FIRST + "standard_error", 1e300),
        (FIRST + "steps", 0),
        (SECOND + "round", 1),  # which is yet to come
        ("jobs.0.costs", {"[]": [1.0, 1.0], "nothing": [1.0]}),
        ("jobs.0.owner", "somebody"),
        ("format", 2),
    ],
)
def test_a_copy_that_cannot_be_is_refused(tuner: Tuner, path: str, value: Any) -> None:
    tuner.register("job", make_spec())
    run(tuner, "job", Ranks(noise=0.002), trials=2)
    ready = tuple(0.001 * place for place in range(250))
    copy = copy_of(tuner.store, tuner.knowledge, "job").model_dump(mode="json")
    copy["jobs"][0]["ready_seconds"] = ready
    Copy.model_validate_json(json.dumps(copy))
    (job,) = copy["jobs"]
    round_of_before = {
        **job,
        "round": 1,
        "trials": [{**job["trials"][0], "round": 1}, *job["trials"][1:]],
    }
    for wrong in (
        {"jobs": [job] * 9},
        {"jobs": [round_of_before]},
        {"tensors": copy["tensors"][1:]},
    ):
        with pytest.raises(ValidationError):
            Copy.model_validate_json(json.dumps({**copy, **wrong}))
    change(path, value)(copy)
    with pytest.raises(ValidationError):
        Copy.model_validate_json(json.dumps(copy))
