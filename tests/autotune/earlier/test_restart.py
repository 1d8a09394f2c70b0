"""Trainings that are cut short and started again, with as many ranks or with others."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bagua_autotune.costs import Kind
from bagua_autotune.earlier.heritage import network_key, resized_costs
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.earlier.restart import DEADLY
from bagua_autotune.model.job import Event, JobSpec, Trial
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration
from tests.autotune.support import Ranks, make_spec, peaked, present
from tests.autotune.tuning.jobs import simulator, tuned
from tests.autotune.tuning.test_gone import run

RESIZED: dict[str, Any] = {"world_size": 2, "ranks_per_node": [1, 1], "fingerprint": "2" * 64}


def cut_short(tuner: Tuner, job_id: str, trials: int, **changes: Any) -> Trial:
    """A job whose training is killed when so many trials are measured; the one it was killed in."""
    tuner.register(job_id, make_spec(**changes))
    run(tuner, job_id, Ranks(noise=0.002), trials=trials)
    trial = present(tuner.open_trial(job_id))
    return trial


def tried(tuner: Tuner, job_id: str) -> list[Configuration]:
    return [trial.configuration for trial in tuner.store.trials.of(job_id)]


def searched(tuner: Tuner, job_id: str) -> list[Configuration]:
    trials = tuner.store.trials.of(job_id)
    return [trial.configuration for trial in trials if trial.purpose == "search"]


def notes(tuner: Tuner, job_id: str) -> list[str]:
    return [event.message for event in tuner.store.events.of(job_id) if event.kind == "note"]


def test_a_restart_on_the_same_ranks_goes_on_where_it_was(empty_url: str) -> None:
    tuner = Tuner(Store(empty_url))
    limits = {"max_samples": 6}
    open_trial = cut_short(tuner, "before", 4, limits=limits)
    measured = tried(tuner, "before")[:4]
    tuner.register("after", make_spec(limits=limits))
    (note,) = notes(tuner, "after")
    assert note.startswith("continues job before, which was interrupted, and uses its 3 trials")
    run(tuner, "after", Ranks(seed=1, noise=0.002))
    # The default, what was under way, and the one that was left of six.
    own = searched(tuner, "after")
    assert own[:2] == [measured[0], open_trial.configuration]
    assert len(own) <= 3
    assert not set(own[1:]) & set(measured)
    result = present(tuner.status("after").result)
    assert result.kept == "winner"
    fastest = min(map(peaked, [*measured, *own]))
    assert peaked(result.configuration) < 1.02 * fastest
    # What was cut short is neither scored nor failed, and stays as it was.
    left = tuner.store.trials.of("before")[4]
    assert (left.is_open, left.estimate, left.failure) == (True, None, None)
    tuner.store.close()


def test_what_is_best_may_have_been_measured_before_the_restart(tuner: Tuner) -> None:
    cut_short(tuner, "before", 4)
    fast = tried(tuner, "before")[2]
    ranks = Ranks(noise=0.002, step_seconds=lambda c: 0.1 if c == fast else 0.2)
    tuner = Tuner(Store("sqlite://"))
    tuner.register("before", make_spec(limits={"max_samples": 5}))
    run(tuner, "before", ranks, trials=4)
    tuner.register("after", make_spec(limits={"max_samples": 5}))
    run(tuner, "after", ranks)
    assert fast not in searched(tuner, "after")
    result = present(tuner.status("after").result)
    assert (result.configuration, result.kept) == (fast, "winner")


def test_a_job_that_shall_try_nothing_takes_over_nothing(tuner: Tuner) -> None:
    cut_short(tuner, "before", 4)
    tuner.register("after", make_spec(limits={"max_samples": 1}))
    run(tuner, "after", Ranks(noise=0.002))
    assert tried(tuner, "after") == [make_spec().default_configuration]
    assert tuner.status("after").state == "finished"


def test_lives_add_up(tuner: Tuner) -> None:
    limits = {"max_samples": 8}
    for life in range(3):
        cut_short(tuner, f"life-{life}", 3, limits=limits)
    inherited = present(tuner.store.jobs.get("life-2").inherited)
    assert inherited.earlier is not None
    before = {c for life in ("life-0", "life-1") for c in searched(tuner, life)[1:3]}
    assert {Configuration(trial.configuration) for trial in inherited.earlier.trials} == before
    assert len(before) == 4, "the second life made other trials than the first"


def test_trials_of_before_do_not_count_where_the_default_takes_another_time(tuner: Tuner) -> None:
    cut_short(tuner, "before", 5)
    status = tuner.status("before")
    tuner.register("after", make_spec())
    ranks = Ranks(noise=0.002, step_seconds=lambda c: 1.3 * peaked(c))
    run(tuner, "after", ranks, trials=1)
    # What was best is only where it begins.
    trial = present(tuner.open_trial("after"))
    assert trial.configuration == status.progress.incumbent
    run(tuner, "after", ranks)
    result = present(tuner.status("after").result)
    assert result.kept == "winner"
    assert len(searched(tuner, "after")) >= 5


def test_what_failed_before_the_restart_is_not_tried_again(tuner: Tuner) -> None:
    failing = cut_short(tuner, "before", 3)
    tuner.take_event("before", Event("disagreement", failing.index, 99, "out of memory"))
    tuner.register("after", make_spec())
    run(tuner, "after", Ranks(noise=0.002))
    assert tuner.status("after").result is not None
    assert failing.configuration not in tried(tuner, "after")


def test_a_configuration_that_may_be_what_ends_the_training_is_not_tried_for_ever(
    tuner: Tuner,
) -> None:
    """Nor does it matter with how many ranks."""
    deadly = cut_short(tuner, "life-1", 2).configuration
    assert cut_short(tuner, "life-2", 1).configuration == deadly, "once may be chance"
    for job_id, changes in (("life-3", {}), ("resized", RESIZED)):
        tuner.register(job_id, make_spec(**changes))
        size = int(changes.get("world_size", 4))
        run(tuner, job_id, Ranks(noise=0.002, world_size=size))
        assert tuner.status(job_id).result is not None
        if job_id == "life-3":
            assert deadly not in tried(tuner, job_id), DEADLY


@pytest.mark.parametrize("is_done", [False, True])
def test_with_other_ranks_a_job_begins_with_what_was_best_and_measures_anew(
    tuner: Tuner, is_done: bool
) -> None:
    if is_done:
        tuner.register("before", make_spec())
        run(tuner, "before", Ranks(noise=0.002))
    else:
        cut_short(tuner, "before", 5)
    status = tuner.status("before")
    best = status.configuration if is_done else status.progress.incumbent
    tuner.register("after", make_spec(**RESIZED))
    inherited = present(tuner.store.jobs.get("after").inherited)
    assert (inherited.gain, inherited.source) == (None, "before")
    assert not (inherited.earlier and inherited.earlier.trials)
    # Another way is the fastest there: neither times nor the choice of before decide.
    ranks = Ranks(noise=0.002, step_seconds=lambda c: peaked(c, best_bytes=64 << 20), world_size=2)
    run(tuner, "after", ranks)
    assert tried(tuner, "after")[:2] == [make_spec().default_configuration, best]
    assert best is not None
    result = present(tuner.status("after").result)
    assert peaked(result.configuration, 64 << 20) < peaked(best, 64 << 20)


def test_back_on_its_first_ranks_a_job_finds_its_trials_of_then(tuner: Tuner) -> None:
    cut_short(tuner, "four", 4)
    tuner.register("two", make_spec(**RESIZED))
    tuner.register("four-again", make_spec())
    inherited = present(tuner.store.jobs.get("four-again").inherited)
    assert inherited.earlier is not None
    assert len(inherited.earlier.trials) == 3


def test_another_job_or_another_model_is_no_restart(tuner: Tuner) -> None:
    cut_short(tuner, "before", 4)
    for place, changes in enumerate(
        ({"name": "other"}, {"tensors": make_tensors(249), "fingerprint": "3" * 64})
    ):
        tuner.register(f"after-{place}", make_spec(**changes))
        assert tuner.store.jobs.get(f"after-{place}").inherited is None


def make_tensors(count: int) -> list[dict[str, Any]]:
    return [asdict(tensor) for tensor in make_spec().tensors[:count]]


def test_costs_of_other_ranks_are_those_of_their_messages(tuner: Tuner) -> None:
    tuned(tuner, "eight", simulator())
    previous, knowledge = tuner.store.jobs.get("eight"), Knowledge(tuner.store)
    spec = resized(previous.software, [2, 2])
    before = present(knowledge.fit_whole(previous))
    found = resized_costs(previous, spec, knowledge)
    flat = Kind("off", 1)
    was, now = before.costs[flat], found[flat]
    assert now.latency_seconds / was.latency_seconds == pytest.approx(3 / 7)
    assert now.seconds_per_byte / was.seconds_per_byte == pytest.approx((3 / 4) / (7 / 8))
    # One node has other links, and so may other software.
    assert resized_costs(previous, resized(previous.software, [4]), knowledge) == {}
    assert resized_costs(previous, resized({"torch": "9"}, [2, 2]), knowledge) == {}
    assert network_key(spec) != network_key(resized(previous.software, [2, 2, 2, 2]))


def resized(software: dict[str, str], ranks_per_node: list[int]) -> JobSpec:
    world_size = sum(ranks_per_node)
    return make_spec(world_size=world_size, ranks_per_node=ranks_per_node, software=software)
