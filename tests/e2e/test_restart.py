"""A training that is killed in the middle of a trial and started again, on other ranks too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.service import ServiceProcess
from tests.e2e.test_faults import begin
from tests.e2e.test_tuning import check
from tests.e2e.training import train
from tests.ranks import RankFailure, RankPool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def trials_of(service: ServiceProcess, job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(service.get(f"jobs/{job['id']}/trials")["trials"])


def newest(service: ServiceProcess) -> dict[str, Any]:
    return dict(service.get("jobs")["jobs"][0])


def test_a_killed_training_finds_its_tuning_again_whatever_its_size(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    pool = tuned_ranks(service.url, (2,))
    training = begin(pool, 20_000)

    def runs_its_fourth_trial() -> bool:
        jobs = service.get("jobs")["jobs"]
        return bool(jobs) and [t["state"] for t in trials_of(service, jobs[0])[3:4]] == ["running"]

    wait_until(runs_its_fourth_trial, "the fourth trial", 100)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankFailure):
        training.result()
    killed = newest(service)
    before = trials_of(service, killed)

    reports = tuned_ranks(service.url, (3,)).run(train, 3000, timeout_seconds=100)
    check(reports)
    resized = newest(service)
    assert (resized["name"], resized["world_size"]) == (killed["name"], 3)
    assert (resized["state"], reports[0].tuned) == ("finished", True)

    reports = tuned_ranks(service.url, (2,)).run(train, 3000, timeout_seconds=100)
    check(reports)
    again = newest(service)
    assert (again["name"], again["world_size"]) == (killed["name"], 2)
    assert (again["state"], reports[0].tuned) == ("finished", True)
    left = sum(trial["state"] == "measured" for trial in before[1:])
    (note, *_) = service.get(f"jobs/{again['id']}/events")["events"]
    # Whether they count depends on how fast the machine is now.
    assert f"job {killed['id']}, which was cut short: {left} trial" in note["message"]
    own = trials_of(service, again)
    assert own[0]["configuration"] == before[0]["configuration"], "the default comes first"
    # What was under way is neither scored nor failed.
    after = trials_of(service, killed)
    assert [trial["state"] for trial in after] == [trial["state"] for trial in before]
    measured = [trial["seconds"] for trial in own + trials_of(service, resized)]
    assert max(measured) < 5, "the time between two lives is in no trial"
