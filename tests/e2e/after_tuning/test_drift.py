"""Jobs whose network becomes slower while they run, and jobs that run a second time."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest

from bagua_client import Configuration
from tests.e2e.programs.changing_network import (
    Course,
    train_on_a_slow_network,
    train_while_the_network_changes,
)
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MOST_STEPS_TO_NOTICE = 100


def check_alike(courses: list[Course]) -> Course:
    """All ranks ran the same configuration in the same step, always."""
    for course in courses:
        assert course.configurations == courses[0].configurations
        assert course.tuning == courses[0].tuning
    return courses[0]


def test_a_lasting_change_is_tuned_for(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    ranks = tuned_ranks(service.url, (1, 1))
    course = check_alike(ranks.run(train_while_the_network_changes, timeout_seconds=300))
    begun = next(at for at in range(course.slowed_at, len(course.tuning)) if course.tuning[at])
    assert begun - course.slowed_at <= MOST_STEPS_TO_NOTICE
    job, trials = service.job(), service.trials()
    assert job["state"] == "finished"
    assert job["round"] >= 1
    own = [trial for trial in trials if trial["round"] == job["round"]]
    before = course.configurations[course.slowed_at - 1]
    assert Configuration.from_json(own[0]["configuration"]) == before, "it begins with what runs"
    assert not course.tuning[-1]
    assert course.configurations[-1] == Configuration.from_json(job["result"]["configuration"])
    # One bucket for all hides nothing of a slow network; what is found hides some of it.
    tried = [(t["purpose"], t["configuration"], t["seconds"], t["steps"]) for t in own]
    assert course.configurations[-1] != before, "\n".join(
        map(str, [job["result"]["summary"], *tried])
    )
    slow = range(course.slowed_at + 2, len(course.seconds))
    unchanged = [course.seconds[at] for at in slow if course.configurations[at] == before]
    assert median(course.seconds[-20:]) < 0.9 * median(unchanged[:20])
    events = service.get(f"jobs/{job['id']}/events")["events"]
    assert any(event["kind"] == "drift" for event in events)


def test_the_second_run_begins_at_the_best_of_the_first(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    first = check_alike(
        tuned_ranks(service.url, (1, 1)).run(train_on_a_slow_network, timeout_seconds=200)
    )
    best = first.configurations[-1]
    assert best != first.configurations[0], "on this network something is better than the default"
    second = check_alike(
        tuned_ranks(service.url, (1, 1)).run(train_on_a_slow_network, timeout_seconds=200)
    )
    changes = [
        now
        for before, now in zip(second.configurations, second.configurations[1:], strict=False)
        if now != before
    ]
    assert changes[0] == best, "it tries the best of the first before all else"
    newest = service.get("jobs")["jobs"][0]
    if newest["result"]["trials"] > 2:
        # The machine is now as busy as another: the first run's gain is doubted, and it is tuned.
        assert newest["state"] == "finished"
        assert not second.tuning[-1]
    else:
        assert changes == [best], "one switch, to the best, and no other"
        assert newest["result"]["kept"] == "winner"
