"""What the reporter says to a service, what it does not, and what it has the ranks do."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from bagua_client.environment import Environment
from bagua_client.measuring.clock import CpuClock
from bagua_client.measuring.profiler import Recording
from bagua_client.measuring.rank_measurement import StepCount
from bagua_client.reporter.conversation import MOST_REFUSALS
from bagua_client.reporter.inbox import LARGEST_INBOX, Event, GatheredTimes, RankTimes
from bagua_client.reporter.lasting_change import BLOCK_STEPS, LASTING_BLOCKS, REFERENCE_BLOCKS
from bagua_client.reporter.reporter import Reporter
from bagua_client.service.breaker import REGISTRATIONS
from bagua_client.tunable.tunable import Timeline
from tests.client.agent.scripted_service import ScriptedService
from tests.client.service.test_client import listening, saying

SMALL, LARGE, OTHER = ({"bucket_bytes": size_bytes} for size_bytes in (1024, 2048, 4096))
DESCRIPTION = {"name": "job", "world_size": 2, "default_configuration": {"bucket_bytes": 512}}
WATCHED = BLOCK_STEPS * (REFERENCE_BLOCKS + LASTING_BLOCKS)

Start = Callable[..., Reporter]


@pytest.fixture
def start(caplog: pytest.LogCaptureFixture) -> Iterator[Start]:
    caplog.set_level(logging.INFO, "bagua_client")
    reporters = []

    def make(service: ScriptedService, count: StepCount | None = None) -> Reporter:
        reporters.append(Reporter(Environment(url=service.url), DESCRIPTION, count=count))
        return reporters[-1]

    yield make
    for reporter in reporters:
        reporter.finish()


def wait_for(condition: Callable[[], Any]) -> Any:
    """What it gives once that is something; the time is only to find a hang."""
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def _has_ended() -> bool:
    """Whether no reporter's thread runs any more."""
    return all(thread.name != "bagua-reporter" for thread in threading.enumerate())


def command_of(reporter: Reporter) -> dict[str, Any]:
    """Without what it tells besides, which is in test_outcome."""
    command = dict(json.loads(zlib.decompress(wait_for(reporter.take_command))))
    del command["told"]
    return command


def tell(reporter: Reporter, trial: int | None, first_step: int, seconds: Sequence[float]) -> None:
    """Both ranks' times; the first is always fast, so that the slowest counts."""
    for at in range(0, len(seconds), BLOCK_STEPS):
        part = list(seconds[at : at + BLOCK_STEPS])
        by_rank = [RankTimes(first_step + at, times) for times in ([0.001] * len(part), part)]
        reporter.put(GatheredTimes(trial, by_rank))


def tuned(reporter: Reporter) -> None:
    """Let a service of one trial end the tuning."""
    assert command_of(reporter)["trial"] == 0
    tell(reporter, 0, 1, [0.1] * 3)
    assert command_of(reporter) == {"trial": None, "configuration": SMALL, "watch": True}


def _recording(trial: int) -> Recording:
    timeline = Timeline(lambda: 2.0)
    for index in (1, 0):
        timeline.tensor_ready(index)
    timeline.bucket_starts(24)()
    return Recording(trial, 7, CpuClock(), timeline, 1.0, 3.0, (1, 0))


@pytest.mark.parametrize("closes", [False, True])
def test_while_the_service_decides_it_is_asked_again(start: Start, closes: bool) -> None:
    with ScriptedService([[SMALL, LARGE]], deciding=3, closes=closes) as service:
        reporter = start(service)
        assert command_of(reporter)["configuration"] == SMALL
        tell(reporter, 0, 1, [0.1] * 3)
        assert command_of(reporter) == {"trial": 1, "configuration": LARGE, "watch": True}
        assert len(service.bodies("state")) == 3


def test_a_profile_arrives_as_it_was_recorded(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        start(service).put(_recording(0))
        (profile,) = wait_for(lambda: service.bodies("profiles"))
    bucket = {"bytes": 24, "started_seconds": 1.0, "ended_seconds": 1.0}
    assert profile == {
        "trial": 0,
        "step": 7,
        "step_seconds": 2.0,
        "ready_seconds": [1.0, 1.0],
        "buckets": [bucket],
        "gathers": [],
    }


@pytest.mark.parametrize("status", [404, 422])
def test_a_service_that_takes_no_profiles_is_offered_none_again(
    start: Start, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with ScriptedService([[SMALL, LARGE]], refuses={"profiles": status}) as service:
        reporter = start(service)
        for _ in range(MOST_REFUSALS):
            reporter.put(_recording(0))
        wait_for(lambda: "does not accept profiles" in caplog.text)
        service.refuses.clear()
        reporter.put(_recording(0))
        tell(reporter, 0, 1, [0.1] * 3)
        assert command_of(reporter)["trial"] == 0
        assert command_of(reporter)["trial"] == 1
        assert service.bodies("profiles") == []
        assert service.refused == MOST_REFUSALS
        assert len(service.bodies("PUT")) == 1  # it is not taken for an unknown job


def test_a_job_that_was_forgotten_when_a_profile_came_is_registered_anew(start: Start) -> None:
    with ScriptedService([[SMALL, LARGE]]) as service:
        reporter = start(service)
        assert command_of(reporter)["trial"] == 0
        service.forget()
        reporter.put(_recording(0))
        assert command_of(reporter)["trial"] == 0
        assert len(service.bodies("PUT")) == 2
        reporter.put(_recording(0))
        wait_for(lambda: service.bodies("profiles"))


def test_a_job_that_ended_and_was_forgotten_is_not_registered_anew(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        command_of(reporter)
        service.forget()
        reporter.close(60.0)
        wait_for(_has_ended)
        assert service.refused == 1
        assert len(service.bodies("PUT")) == 1


def test_nothing_is_said_while_step_times_stay_and_once_when_they_change(start: Start) -> None:
    with ScriptedService([[SMALL], [LARGE]]) as service:
        reporter = start(service)
        tuned(reporter)
        said = len(service.requests)
        tell(reporter, None, 4, [0.1] * 3000)
        tell(reporter, None, 3004, [0.3] * WATCHED)
        (drift,) = wait_for(lambda: service.bodies("drift"))
        assert 3004 < drift["step"] < 3104
        assert drift["seconds"] == pytest.approx(0.3)
        assert drift["trial"] is None
        assert command_of(reporter) == {"trial": 1, "configuration": LARGE, "watch": True}
        kinds = [kind for kind, _ in service.requests[said:]]
        assert kinds == ["progress", "drift"], "how far it came under what it leaves, and why"


def test_a_change_that_the_service_does_not_act_on_is_the_new_normal(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        tuned(reporter)
        tell(reporter, None, 4, [0.1] * WATCHED + [0.3] * 500 + [0.1] * WATCHED)
        drifts = wait_for(lambda: len(service.bodies("drift")) == 2 and service.bodies("drift"))
        assert [drift["seconds"] for drift in drifts] == [pytest.approx(0.3), pytest.approx(0.1)]
        assert reporter.take_command() is None


def test_a_change_reaches_a_service_that_was_away(start: Start) -> None:
    with ScriptedService([[SMALL], [LARGE]]) as service:
        reporter = start(service)
        tuned(reporter)
        service.refuses["drift"] = 503
        tell(reporter, None, 4, [0.1] * WATCHED + [0.3] * WATCHED)
        wait_for(lambda: service.refused)
        service.refuses.clear()
        assert command_of(reporter)["trial"] == 1
        assert len(service.bodies("drift")) == 1


def test_a_refused_change_keeps_no_steps_from_the_watch(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        tuned(reporter)
        service.refuses["drift"] = 422
        # In one message: the change, and the steps after it that make it the new normal.
        slowest = [0.1] * WATCHED + [0.2] * WATCHED * 2
        reporter.put(GatheredTimes(None, [RankTimes(4, slowest)] * 2))
        tell(reporter, None, 4 + len(slowest), [0.3] * WATCHED)
        wait_for(lambda: service.refused == 2)


def test_refusals_while_watching_leave_the_ranks_at_what_was_found(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        tuned(reporter)
        service.refuses["drift"] = 422
        levels = [0.1 * (1 + place % 2) for place in range(2 * MOST_REFUSALS)]
        tell(reporter, None, 4, [level for level in levels for _ in range(WATCHED)])
        assert command_of(reporter) == {"trial": None, "configuration": SMALL, "watch": False}
        assert caplog.text.count("autotune is off") == 1


@pytest.mark.parametrize("ends_while_tuning", [True, False])
def test_the_end_of_the_training_is_told_and_called_early_only_while_tuning(
    start: Start, caplog: pytest.LogCaptureFixture, ends_while_tuning: bool
) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        if ends_while_tuning:
            command_of(reporter)
        else:
            tuned(reporter)
        reporter.close(60.0 if ends_while_tuning else 0.0)
        wait_for(lambda: service.bodies("ended"))
        said = "the training ended before its tuning did; its trials are kept"
        assert (said in caplog.text) is ends_while_tuning


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (None, "could not be used: it needs a token (not here); set BAGUA_AUTOTUNE_TOKEN to that"),
        ("http://nowhere.invalid:8123", "could not be used: there is no host with that name"),
        ("http://127.0.0.1:1", "could not be used: nothing listens there"),
    ],
)
def test_where_no_service_took_the_job_its_end_does_not_say_that_anything_is_kept(
    caplog: pytest.LogCaptureFixture, url: str | None, why: str
) -> None:
    caplog.set_level(logging.INFO, "bagua_client")
    with ScriptedService([[SMALL]], refuses={"PUT": 401}) as service:
        reporter = Reporter(Environment(url=url or service.url), DESCRIPTION)
        wait_for(lambda: reporter._conversation._connection._trouble)
        reporter.close(60.0)
    (said,) = [line for line in caplog.messages if "the training ended" in line]
    assert "are kept" not in said
    place = f"{url or service.url} (BAGUA_AUTOTUNE_URL)"
    assert f"nothing is kept of it, as the service at {place} {why}" in said


def test_the_end_of_the_training_names_its_step(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        count = StepCount()
        reporter = start(service, count=count)
        command_of(reporter)
        count.made = 137
        reporter.close(60.0)
        wait_for(lambda: service.bodies("ended"))
        assert [body["step"] for body in service.bodies("ended")] == [137]


def test_after_a_disagreement_the_command_is_given_again(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        tuned(reporter)
        reporter.put(Event("disagreement", None, 4, "rank 1 disagreed"))
        assert command_of(reporter) == {"trial": None, "configuration": SMALL, "watch": True}


@pytest.mark.parametrize("kind", ["diverged", "infeasible", "disagreement"])
def test_what_was_commanded_before_the_ranks_went_back_is_not_carried_out(
    start: Start, kind: str
) -> None:
    """It may do the same harm: the service chooses trials ahead."""
    with ScriptedService([[SMALL, LARGE, OTHER]]) as service:
        reporter = start(service)
        assert command_of(reporter)["trial"] == 0
        tell(reporter, 0, 1, [0.1] * 3)
        wait_for(lambda: reporter.has_command)
        service.refuses[kind] = 503
        reporter.put(Event(kind, 1, 4, "the loss rose"))
        assert not reporter.has_command
        wait_for(lambda: service.refused)  # The event is in hand, and what follows waits.
        reporter.put(Event(kind, 1, 5, "the loss rose"))
        reporter._put_command(b"from before the second", False)
        assert not reporter.has_command
        service.refuses.clear()
        assert command_of(reporter) == {"trial": 2, "configuration": OTHER, "watch": True}


def test_a_client_that_gives_up_does_not_keep_what_it_has_yet_to_call_harmful(start: Start) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        tuned(reporter)
        service.refuses["drift"] = 503
        levels = [0.1 * (1 + place % 2) for place in range(2 * MOST_REFUSALS)]
        tell(reporter, None, 4, [level for level in levels for _ in range(WATCHED)])
        wait_for(lambda: service.refused)
        reporter.put(Event("diverged", None, 4, "the loss rose"))
        service.refuses["drift"] = 422
        default = DESCRIPTION["default_configuration"]
        assert command_of(reporter) == {"trial": None, "configuration": default, "watch": False}


def test_a_refused_registration_may_have_been_damaged_on_its_way(start: Start) -> None:
    with ScriptedService([[SMALL]], refuses={"PUT": 400}) as service:
        reporter = start(service)
        wait_for(lambda: service.refused == 1)
        service.refuses.clear()
        assert command_of(reporter)["trial"] == 0


def test_a_registration_that_is_wrong_ends_the_tuning_in_one_line(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedService([[SMALL]], refuses={"PUT": 422}) as service:
        reporter = start(service)
        default = DESCRIPTION["default_configuration"]
        command = json.loads(zlib.decompress(wait_for(reporter.take_command)))
        assert command.pop("told") == {"state": "failed", "reason": "not here"}
        assert command == {"trial": None, "configuration": default, "watch": False}
        assert service.refused == REGISTRATIONS
    assert [record.getMessage() for record in caplog.records] == [
        "autotune is off for this job: not here"
    ]


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed"])
def test_an_address_with_another_service_is_said_to_have_none_of_ours(
    caplog: pytest.LogCaptureFixture, status: str
) -> None:
    """It said that the job was forgotten right after it was registered."""
    with listening(saying(status)) as (url, _):
        reporter = Reporter(Environment(url=url), DESCRIPTION)
        wait_for(lambda: caplog.messages)
        reporter.finish()
    (said,) = caplog.messages
    assert f"cannot be used: there is no such service there ({status})" in said
    assert "set BAGUA_AUTOTUNE_URL to the address that bagua-autotune serve prints" in said


def test_a_service_that_refuses_is_there(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedService([[SMALL]], refuses={"profiles": 503}) as service:
        start(service).put(_recording(0))
        wait_for(lambda: "cannot be used" in caplog.text)
        service.refuses["profiles"] = 422
        wait_for(lambda: "the service answers again" in caplog.text)


def _steps_of(service: ScriptedService) -> list[int]:
    return [step["step"] for body in service.bodies("observations") for step in body["steps"]]


def test_the_steps_before_the_ranks_switch_are_told_as_well(start: Start) -> None:
    with ScriptedService([[SMALL, LARGE]]) as service:
        reporter = start(service)
        command_of(reporter)
        tell(reporter, 0, 1, [0.1] * 3)
        assert command_of(reporter)["trial"] == 1
        tell(reporter, 0, 4, [0.1] * 3)
        tell(reporter, 1, 7, [0.1])
        wait_for(lambda: 7 in _steps_of(service))
        assert _steps_of(service) == [1, 2, 3, 4, 5, 6, 7]
        assert not reporter.has_command  # what they tell late changes nothing


def test_what_was_dropped_while_the_service_was_away_is_said_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedService([[SMALL, LARGE]], steps=10**6) as service:
        reporter = start(service)
        command_of(reporter)
        service.refuses["observations"] = 503
        tell(reporter, 0, 1, [0.1])
        wait_for(lambda: service.refused)  # it is in hand, and not in the inbox
        told = 1 + LARGEST_INBOX + 30
        for step in range(2, told + 1):
            tell(reporter, 0, step, [0.1])
        service.refuses.clear()
        wait_for(lambda: told in _steps_of(service))
        wait_for(lambda: "dropped" in caplog.text)  # said once the service's answer is read
        tell(reporter, 0, told + 1, [0.1])
        wait_for(lambda: told + 1 in _steps_of(service))
        tell(reporter, 0, told + 2, [0.1])
        wait_for(lambda: told + 2 in _steps_of(service))
        assert _steps_of(service) == [1, *range(32, told + 3)]
        assert len(service.bodies("observations")) <= 4  # what waited came together
    assert [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()] == [
        "autotune: 30 reports were dropped while the service did not answer; the tuning measures "
        "again what it needs"
    ]


def test_a_fork_of_the_training_uses_nothing_of_the_reporter(start: Start) -> None:
    """Whatever lock the reporter's thread held when a DataLoader forked, nobody opens it there."""
    with ScriptedService([[SMALL]]) as service:
        reporter = start(service)
        wait_for(lambda: reporter.has_command)
        with reporter._inbox._changed, reporter._command_lock:
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a hang ends in another way
                reporter.put(Event("drift", None, 1, ""))
                command = reporter.take_command()
                reporter.close(60.0)
                reporter.finish()
                os._exit(0 if command is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert command_of(reporter)["trial"] == 0
        assert [kind for kind, _ in service.requests] == ["PUT"]
