"""When a service that failed is asked again, and how often the user hears of it."""

from __future__ import annotations

import logging

import pytest

from bagua_client.service.breaker import (
    DENIED_PAUSE_SECONDS,
    EAGER_PAUSE_SECONDS,
    FIRST_PAUSE_SECONDS,
    FIRST_REST_SECONDS,
    FORGIVEN_SECONDS,
    LATE_PAUSE_SECONDS,
    MOST_REST_SECONDS,
    OPENS_AFTER,
    SILENT_REDUCTIONS,
    SILENT_SECONDS,
    Absence,
    Circuit,
)
from bagua_client.service.client import ServiceDenied, ServiceUnavailable

AWAY = ServiceUnavailable("nothing listens there")
DENIED = ServiceDenied("it needs a token")
EAGER_SECONDS = 300.0


class _Circuit(Circuit):
    """Draws the longest pause that there could be, and notes the shortest."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shortest: list[float] = []
        super().__init__(EAGER_SECONDS, self._longest, lambda: self.now)

    def _longest(self, low: float, high: float) -> float:
        self.shortest.append(low)
        return high

    def fail(self, error: ServiceUnavailable = AWAY) -> float:
        pause_seconds = self.failed("at http://host:8123", error)
        self.now += pause_seconds
        return pause_seconds


def _said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_pauses_are_drawn_from_all_below_a_limit_that_doubles() -> None:
    circuit = _Circuit()
    pauses = [circuit.fail() for _ in range(8)]
    assert pauses == [min(FIRST_PAUSE_SECONDS * 2**n, EAGER_PAUSE_SECONDS) for n in range(8)]
    assert set(circuit.shortest) == {0.0}
    circuit.answered()
    assert circuit.fail() == FIRST_PAUSE_SECONDS


def test_the_trainings_own_generator_is_left_alone() -> None:
    import random

    random.seed(3)
    before = random.getstate()
    Circuit(EAGER_SECONDS).failed("here", AWAY)
    assert random.getstate() == before


def test_a_service_that_stays_away_is_looked_for_now_and_then_for_months() -> None:
    circuit = _Circuit()
    assert not circuit.is_late
    while not circuit.is_late:
        circuit.fail()
    assert circuit.now <= EAGER_SECONDS + 2 * EAGER_PAUSE_SECONDS
    assert {circuit.fail() for _ in range(10_000)} == {LATE_PAUSE_SECONDS}
    circuit.answered()
    assert not circuit.is_late


def test_what_the_service_asks_for_comes_before_the_pause() -> None:
    circuit = _Circuit()
    pause_seconds = circuit.fail(ServiceUnavailable("it answered 503", 120.0))
    assert pause_seconds == 120.0 + FIRST_PAUSE_SECONDS


def test_the_user_hears_once_that_it_is_away_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "bagua_client")
    circuit = _Circuit()
    for _ in range(3):
        for _ in range(OPENS_AFTER - 1):  # a short failure is nobody's business
            circuit.fail()
        circuit.answered()
    assert _said(caplog) == []
    for _ in range(2):
        for _ in range(50):
            circuit.fail()
        for _ in range(50):
            circuit.answered()
    (level, line), back, *again = _said(caplog)
    assert level == logging.WARNING
    assert "at http://host:8123 cannot be used: nothing listens there" in line
    assert "Training continues" in line
    assert back == (logging.INFO, "autotune: the service answers again")
    assert again == [(level, line), back]


def test_a_wrong_token_is_said_at_once_and_once_and_tried_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "bagua_client")
    circuit = _Circuit()
    assert not circuit.is_late
    circuit.failed("here", DENIED)
    assert circuit.is_late
    circuit.answered()
    caplog.clear()
    circuit.shortest.clear()
    assert {circuit.fail(DENIED) for _ in range(5)} == {DENIED_PAUSE_SECONDS}
    assert set(circuit.shortest) == {DENIED_PAUSE_SECONDS / 2}
    circuit.answered()
    away, back = _said(caplog)
    assert "it needs a token" in away[1]
    assert back[1] == "autotune: the service answers again"


def test_a_service_that_comes_back_and_wants_a_token_is_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    circuit = _Circuit()
    for error in (AWAY, DENIED):
        for _ in range(2 * OPENS_AFTER):
            circuit.fail(error)
    assert ["nothing listens" in line for _, line in _said(caplog)] == [True, False]


class _Absence(Absence):
    """By a clock that only the test moves; counts how often a trial was left."""

    def __init__(self) -> None:
        self.now, self.reductions, self.left, self.is_trying = 0.0, 0, 0, True
        super().__init__(SILENT_SECONDS, self._left_one, lambda: self.now)

    def _left_one(self) -> bool:
        self.left += self.is_trying
        was, self.is_trying = self.is_trying, False
        return was

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.reductions += 1
        self.look(self.reductions)

    def steps_until_left(self, seconds: float) -> int:
        """Of a silence that begins now."""
        self.is_trying, before = True, self.reductions
        with self.asking():
            while self.is_trying:
                self.step(seconds)
        return self.reductions - before


@pytest.mark.parametrize(
    ("step_seconds", "steps"),
    [(0.01, 500), (1.0, 5), (SILENT_SECONDS / 2, 4), (10.0, 4), (1000.0, 4)],
)
def test_it_is_left_after_some_seconds_and_some_steps(step_seconds: float, steps: int) -> None:
    found = _Absence().steps_until_left(step_seconds)
    assert found == pytest.approx(steps, abs=1)
    assert found >= SILENT_REDUCTIONS


def test_while_nothing_is_asked_nothing_is_missed() -> None:
    absence = _Absence()
    for _ in range(10):  # each answered in time, as while the service decides
        with absence.asking():
            for _ in range(9):
                absence.step(SILENT_SECONDS / 10)
        absence.step(100 * SILENT_SECONDS)  # a long step, or an evaluation
    assert absence.left == 0
    assert not absence.rests


def test_an_error_ends_the_silence_too() -> None:
    absence = _Absence()
    with pytest.raises(ValueError, match="refused"), absence.asking():
        raise ValueError("refused")
    for _ in range(10):
        absence.step(SILENT_SECONDS)
    assert absence.left == 0


def test_where_there_is_no_trial_to_leave_none_rests() -> None:
    absence = _Absence()
    absence.is_trying = False
    with absence.asking():
        for _ in range(10):
            absence.step(SILENT_SECONDS)
    assert not absence.rests


def test_a_service_that_blinks_has_the_ranks_leave_ever_more_seldom() -> None:
    absence = _Absence()
    rests = []
    for _ in range(8):
        absence.steps_until_left(1.0)
        began = absence.now
        while absence.rests:
            absence.step(1.0)
        rests.append(absence.now - began)
    assert rests == [min(FIRST_REST_SECONDS * 2**n, MOST_REST_SECONDS) for n in range(8)]
    absence.now += FORGIVEN_SECONDS
    absence.steps_until_left(1.0)
    absence.now += FIRST_REST_SECONDS
    assert not absence.rests
