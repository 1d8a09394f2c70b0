"""When a service that failed is asked again, and how often the user hears of it."""

from __future__ import annotations

import logging

import pytest

from bagua_client.service.breaker import (
    DENIED_PAUSE_SECONDS,
    EAGER_PAUSE_SECONDS,
    FIRST_PAUSE_SECONDS,
    LATE_PAUSE_SECONDS,
    OPENS_AFTER,
    Circuit,
)
from bagua_client.service.transport import ServiceDenied, ServiceUnavailable

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
