"""What a service of an earlier release does not know is left out, and no step is lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from bagua_client.service.client import JobState, StepTimes
from bagua_client.service.optional_fields import OptionalFields
from bagua_client.service.transport import ServiceRefused

MOST_REFUSALS = 3
STATE = JobState(0, {}, 0, 60, None, None)
MEMORY = {"peak_bytes": 5, "limit_bytes": 9, "device_bytes": 10}
STEP = StepTimes(1, [0.2, 0.2], [0.1, 0.2], 120.0)


class _Service:
    """Refuses steps with a field that it does not know."""

    def __init__(self, *unknown: str) -> None:
        self.unknown = unknown
        self.refused = 0
        self.taken: list[StepTimes] = []
        self.memory: Mapping[str, Any] | None = None

    def post(self, steps: list[StepTimes], memory: Mapping[str, Any] | None) -> JobState:
        for name in self.unknown:
            is_told = memory is not None
            if (
                is_told
                if name == "memory"
                else any(getattr(step, name) is not None for step in steps)
            ):
                self.refused += 1
                raise ServiceRefused(422, f"steps.0.{name}: Extra inputs are not permitted")
        self.taken += steps
        self.memory = memory
        return STATE


@pytest.mark.parametrize(
    ("unknown", "taken"),
    [
        ((), STEP),
        (("memory",), STEP),
        (("memory", "complexity"), STEP._replace(complexity=None)),
        (("memory", "complexity", "compute_seconds"), StepTimes(1, [0.2, 0.2])),
    ],
)
def test_a_service_is_told_all_that_it_knows(
    unknown: tuple[str, ...], taken: StepTimes, caplog: pytest.LogCaptureFixture
) -> None:
    service, fields = _Service(*unknown), OptionalFields(MOST_REFUSALS)
    for _ in range(MOST_REFUSALS + 4):
        assert fields.send([STEP], MEMORY, service.post) == STATE
    assert service.taken == [taken] * (MOST_REFUSALS + 4)
    assert service.memory == (None if unknown else MEMORY)
    # Then it is asked no more.
    assert service.refused == MOST_REFUSALS * len(unknown)
    said = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert len(said) == len(unknown)
    assert all(level == logging.WARNING and "does not accept" in text for level, text in said)


def test_only_refusals_in_a_row_count(caplog: pytest.LogCaptureFixture) -> None:
    service, fields = _Service(), OptionalFields(MOST_REFUSALS)
    for _ in range(2):
        service.unknown = ("compute_seconds",)
        for _ in range(MOST_REFUSALS - 1):
            fields.send([STEP], MEMORY, service.post)
        service.unknown = ()
        fields.send([STEP], MEMORY, service.post)
        assert service.taken[-1] == STEP
    assert caplog.records == []


def test_steps_that_are_refused_for_another_reason_are_refused() -> None:
    service, fields = _Service("seconds"), OptionalFields(MOST_REFUSALS)
    for _ in range(MOST_REFUSALS + 1):
        with pytest.raises(ServiceRefused):
            fields.send([STEP], MEMORY, service.post)
    service.unknown = ()
    fields.send([STEP], MEMORY, service.post)
    assert service.taken == [STEP]


def test_steps_that_tell_nothing_more_are_sent_once() -> None:
    service, fields = _Service("seconds"), OptionalFields(MOST_REFUSALS)
    with pytest.raises(ServiceRefused):
        fields.send([StepTimes(1, [0.2])], None, service.post)
    assert service.refused == 1
