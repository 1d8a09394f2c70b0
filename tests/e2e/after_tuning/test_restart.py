"""A training that is killed in the middle of a trial and started again; test_elastic.py has one
that goes on with other ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.programs.training import train
from tests.e2e.service import ServiceProcess
from tests.e2e.test_faults import begin
from tests.e2e.test_tuning import check
from tests.ranks import RankFailure, RankPool
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def trials_of(service: ServiceProcess, job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(service.get(f"jobs/{job['id']}/trials")["trials"])


def newest(service: ServiceProcess) -> dict[str, Any]:
    return dict(service.get("jobs")["jobs"][0])


def test_a_killed_training_finds_its_tuning_again(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    few: dict[str, Any] = {"ranks_per_node": (2,), "BAGUA_AUTOTUNE_MAX_SAMPLES": "4"}
    pool = tuned_ranks(service.url, **few)
    training = begin(pool, 20_000)

    def runs_its_third_trial() -> bool:
        jobs = service.get("jobs")["jobs"]
        return bool(jobs) and [t["state"] for t in trials_of(service, jobs[0])[2:3]] == ["running"]

    wait_until(runs_its_third_trial, "the third trial", 100)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankFailure):
        training.result()
    killed = newest(service)

    reports = tuned_ranks(service.url, **few).run(train, 3000, timeout_seconds=100)
    check(reports)
    again = newest(service)
    assert (again["name"], again["world_size"]) == (killed["name"], 2)
    assert (again["state"], reports[0].tuned) == ("finished", True)
    # Read now: after the kill the service may still have computed the next trial.
    before = trials_of(service, killed)
    states = [trial["state"] for trial in before]
    assert set(states[states.count("measured") :]) <= {"running", "proposed"}, (
        "neither scored nor failed"
    )
    assert states[-1] != "measured", "something was under way when it was killed"
    left = states.count("measured") - 1
    (note, *_) = service.get(f"jobs/{again['id']}/events")["events"]
    # Whether they count depends on how fast the machine is now.
    told = f"job {killed['id']}, which was interrupted, and uses its {left} trial"
    assert told in note["message"]
    own = trials_of(service, again)
    assert own[0]["configuration"] == before[0]["configuration"], "the default comes first"
    measured = [trial["seconds"] for trial in own]
    assert max(measured) < 5, "the time between two lives is in no trial"
