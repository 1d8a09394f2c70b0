"""In whatever moment the service fails, and however: the ranks are soon back at what is confirmed,
stay there, and the tuning goes on when it is back. Steps take the time of a clock of the test's
own, which stands still while the service works; the reporter, its requests and the server are real.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from bagua_client.environment import Environment
from bagua_client.reporter import conversation
from bagua_client.reporter.inbox import Event, GatheredTimes, RankTimes
from bagua_client.reporter.lasting_change import BLOCK_STEPS, LASTING_BLOCKS, REFERENCE_BLOCKS
from bagua_client.reporter.reporter import Reporter
from bagua_client.service import breaker
from bagua_client.service.breaker import FIRST_REST_SECONDS, SILENT_REDUCTIONS, SILENT_SECONDS
from tests.client.reporter.failing_service import WAYS, FailingService

DEFAULT, SLOW, WINNER, OTHER = ({"bucket_bytes": size} for size in (512, 1024, 2048, 4096))
# Trials 0 to 4; the last three confirm the winner and the default. Then another round.
ROUNDS = [[DEFAULT, SLOW, WINNER, DEFAULT, WINNER], [WINNER, OTHER, SLOW, OTHER]]
LAST, SECOND = len(ROUNDS[0]) - 1, len(ROUNDS[0])
DESCRIPTION = {"name": "job", "world_size": 2, "default_configuration": DEFAULT}
SWITCH_REDUCTIONS = 2
"""Of the agent: from a command to the step before which the ranks re-cut."""
WATCHED = BLOCK_STEPS * (REFERENCE_BLOCKS + LASTING_BLOCKS)
AFTERWARDS = 200
"""Steps of the ranks while the service stays away."""

DECIDING_ANSWERS = 4
"""More than there may be reports that were on their way when a trial ended."""

Begins = Callable[[str, Any], bool]


class _Training:
    """A training's ranks, which follow the reporter's commands as the agent does."""

    def __init__(self, url: str) -> None:
        self.now, self.step = 0.0, 0
        self.reporter = Reporter(Environment(url=url), DESCRIPTION, clock=lambda: self.now)
        self.trial: int | None = None
        self.configuration: Mapping[str, int] = DEFAULT
        self.is_tuned = False
        self.rounds_ended = 0
        self.commands: list[Mapping[str, Any]] = []
        self._coming: tuple[int, Mapping[str, Any]] | None = None

    def make_step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.step += 1
        if self._coming is None:
            self.reporter.look(self.step)
            if (command := self.reporter.take_command()) is not None:
                self.commands.append(json.loads(zlib.decompress(command)))
                self._coming = self.step + SWITCH_REDUCTIONS, self.commands[-1]
        elif self.step == self._coming[0]:
            self._switch(self._coming[1])
        if self.trial is not None or self.is_tuned:
            slow = 0.1 if self.rounds_ended != 1 or self.step < self._steps_change else 0.3
            times = [RankTimes(self.step, [slow])] * 2
            self.reporter.put(GatheredTimes(self.trial, times))

    def _switch(self, command: Mapping[str, Any]) -> None:
        self._coming = None
        self.configuration, self.trial = command["configuration"], command["trial"]
        self.is_tuned = self.trial is None and "waits" not in command
        if self.is_tuned:
            self.rounds_ended += 1
            self._steps_change = self.step + WATCHED
        if self.trial is not None:
            self.reporter.put(Event("switched", self.trial, self.step, ""))

    def run_until(self, condition: Callable[[], Any]) -> None:
        """Make steps for which the clock stands still; the deadline is only to find a hang."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.commands[-1:]
            # So that few steps go in one request, and the service is polled while it decides.
            if self.reporter._inbox.is_empty and self.reporter._conversation._poll_seconds is None:
                self.make_step()
            time.sleep(0.0002)


@contextmanager
def _training(url: str) -> Iterator[_Training]:
    training = _Training(url)
    try:
        yield training
    finally:
        training.reporter.finish()


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bagua_client")
    for name in ("FIRST_PAUSE", "EAGER_PAUSE", "DENIED_PAUSE"):
        monkeypatch.setattr(breaker, f"{name}_SECONDS", 0.01)
    for name in ("FIRST_POLL", "LAST_POLL"):
        monkeypatch.setattr(conversation, f"{name}_SECONDS", 0.005)


def _request(kind: str, number: int = 1) -> Begins:
    counted = itertools.count(1)
    return lambda found, _: found == kind and next(counted) == number


def _report(trial: int, number: int = 1) -> Begins:
    """A report of a trial's steps; the first comes when its ranks have just switched."""
    counted = itertools.count(1)

    def begins(kind: str, body: Any) -> bool:
        return kind == "observations" and body["trial"] == trial and next(counted) == number

    return begins


def _switched(trial: int) -> Begins:
    return lambda kind, body: kind == "switched" and body["trial"] == trial


def _decides_after(trial: int) -> Begins:
    """The first poll after the trial has begun."""
    begun = threading.Event()

    def begins(kind: str, body: Any) -> bool:
        if _switched(trial)(kind, body):
            begun.set()
        return kind == "state" and begun.is_set()

    return begins


# By moment: how it begins, whether the ranks are in a trial then, and what is confirmed.
MOMENTS: dict[str, tuple[Callable[[], Begins], bool, Mapping[str, int]]] = {
    "registering": (lambda: _request("PUT"), False, DEFAULT),
    "as the ranks have switched": (lambda: _switched(1), True, DEFAULT),
    "before the first report": (lambda: _report(1), True, DEFAULT),
    "in the middle of measuring": (lambda: _report(1, 2), True, DEFAULT),
    "while it decides": (lambda: _decides_after(1), True, DEFAULT),
    "while the winner is confirmed": (lambda: _report(LAST), True, DEFAULT),
    "in the second round": (lambda: _report(SECOND + 1), True, WINNER),
    "after the tuning": (lambda: _request("drift"), False, WINNER),
}


def _most_steps(step_seconds: float) -> int:
    """From the request that is not answered until the ranks have re-cut."""
    patience = max(math.ceil(SILENT_SECONDS / step_seconds), SILENT_REDUCTIONS + 1)
    return patience + SWITCH_REDUCTIONS + 1


@pytest.mark.parametrize(
    ("moment", "way"),
    [
        *zip(MOMENTS, itertools.cycle(WAYS)),
        ("in the middle of measuring", "killed"),
        ("registering", "hangs"),
    ],
)
def test_the_ranks_are_soon_back_at_what_is_confirmed_and_the_tuning_goes_on(
    moment: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    begins, is_trying, confirmed = MOMENTS[moment]
    # Not each with each: short steps or long ones, on the same database or an empty one.
    place, index = list(MOMENTS).index(moment), WAYS.index(way)
    step_seconds, forgets = (0.01, 10.0)[(place + index) % 2], (place // 2 + index) % 2 == 1
    decides = DECIDING_ANSWERS if moment == "while it decides" else 0
    made = FailingService(ROUNDS, way, begins(), steps=4, deciding=decides)
    with made as service, _training(service.url) as training:
        training.run_until(service.fails.is_set)
        service.stop_listening()
        before = training.commands[:]
        if is_trying:
            assert training.trial is not None
        for _ in range(_most_steps(step_seconds)):
            training.make_step(step_seconds)
        assert training.configuration == confirmed
        assert training.trial is None
        for _ in range(AFTERWARDS):
            training.make_step(step_seconds)
            assert training.configuration == confirmed
        # Once, and whoever reads the log is told.
        assert len(training.commands) == len(before) + is_trying
        assert caplog.text.count("until the service answers again") == is_trying
        told = "their default configuration" if confirmed == DEFAULT else "what was confirmed"
        assert (f"the ranks use {told}" in caplog.text) is is_trying

        # The request in hand is answered, or repeated, before time goes on.
        service.come_back(forgets=forgets)
        ended = training.rounds_ended
        if is_trying and AFTERWARDS * step_seconds < FIRST_REST_SECONDS:
            training.run_until(lambda: training.reporter._conversation._poll_seconds is not None)
            assert training.trial is None, "it may blink"
            training.now += FIRST_REST_SECONDS
        training.run_until(lambda: training.rounds_ended > ended)
        last = ROUNDS[1][-1] if training.rounds_ended > 1 and not forgets else ROUNDS[0][-1]
        assert training.configuration == last
        trials = [command["trial"] for command in training.commands[len(before) + is_trying :]]
        assert trials[-1] is None
        assert trials[:-1] == list(range(trials[0], trials[0] + len(trials) - 1))
        if forgets:
            assert trials[0] == 0
