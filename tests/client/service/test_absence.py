"""When a silent service counts as away, and how seldom one that blinks has the ranks re-cut."""

from __future__ import annotations

import pytest

from bagua_client.service.absence import (
    FIRST_REST_SECONDS,
    FORGIVEN_SECONDS,
    MOST_REST_SECONDS,
    SILENT_REDUCTIONS,
    SILENT_SECONDS,
    Absence,
)


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
