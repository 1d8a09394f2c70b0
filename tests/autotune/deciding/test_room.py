"""What does not fit in memory is not tried again, nor what needs as much."""

from __future__ import annotations

import pytest

from bagua_autotune.deciding.room import Room, needs_as_much, too_large
from bagua_autotune.model.job import Trial, TrialState
from bagua_autotune.model.received import Memory
from bagua_autotune.model.statistics import Estimate
from bagua_wire.configuration import Configuration

DEFAULT = Configuration(bucket_bytes=1000, channels=1, kept_units=0, wire_precision="as_is")


def changed(**values: int | str) -> Configuration:
    return Configuration({**DEFAULT, **values})


@pytest.mark.parametrize(
    ("values", "is_so"),
    [
        ({"kept_units": 4}, True),
        ({"kept_units": 8, "channels": 2, "bucket_bytes": 2000}, True),
        ({"kept_units": 2, "channels": 16}, False),
        ({"kept_units": 8, "wire_precision": "bf16"}, False),
    ],
)
def test_what_surely_needs_as_much(values: dict[str, int | str], is_so: bool) -> None:
    assert needs_as_much(changed(**values), changed(kept_units=4)) == is_so


def measured(index: int, peak_bytes: int, **values: int) -> Trial:
    memory = Memory(peak_bytes=peak_bytes, limit_bytes=90, device_bytes=100)
    found = Estimate(0.1, 0.01, 8, 0)
    return Trial(index, "search", changed(**values), "measured", found, memory=memory)


def refused(index: int, peak_bytes: int, is_predicted: bool = True, **values: int) -> Trial:
    memory = Memory(
        peak_bytes=peak_bytes, limit_bytes=90, device_bytes=100, is_predicted=is_predicted
    )
    return Trial(index, "search", changed(**values), "infeasible", failure="no", memory=memory)


def test_what_was_only_too_far_may_be_asked_for_again() -> None:
    first, too_far = measured(0, 50), refused(1, 85, kept_units=8)
    assert too_large([first, too_far]) == [changed(kept_units=8)]
    assert too_large([first, too_far, measured(2, 50, channels=2)]) == [changed(kept_units=8)]
    assert too_large([first, too_far, measured(2, 70, kept_units=4)]) == []


def test_what_does_not_fit_does_not() -> None:
    larger = measured(2, 70, kept_units=4)
    for never in (
        refused(1, 95, kept_units=8),
        refused(1, 85, is_predicted=False, kept_units=8),
        Trial(1, "search", changed(kept_units=8), "infeasible", failure="no"),
    ):
        assert too_large([measured(0, 50), never, larger]) == [changed(kept_units=8)]


def test_what_was_not_tried_is_no_sample() -> None:
    assert not refused(1, 95, kept_units=8).was_tried
    assert refused(1, 85, is_predicted=False, kept_units=8).was_tried
    assert measured(1, 50).was_tried


def blocks(count: int, **others: int) -> Configuration:
    return Configuration({"kept_units": 0, "recomputed_blocks": count, **others})


def told(index: int, count: int, gib: int, is_measured: bool = False, **others: int) -> Trial:
    memory = Memory(
        peak_bytes=gib, limit_bytes=900, device_bytes=1000, is_predicted=not is_measured
    )
    found = Estimate(0.1, 0.01, 8, 0) if is_measured else None
    state: TrialState = "measured" if is_measured else "infeasible"
    return Trial(index, "search", blocks(count, **others), state, found, memory=memory)


def test_from_a_peak_that_was_told_follow_those_with_other_numbers_of_blocks() -> None:
    """100 by default; a block takes 50 at most, as the kept units take some of it; twice what is
    beyond all that was measured must fit, too."""
    first, refused = told(0, 16, 100, is_measured=True), told(1, 0, 900, kept_units=8)
    room = Room([first, refused], blocks(16))
    fitting = [count for count in range(17) if room.may_fit(blocks(count))]
    assert fitting == list(range(7, 17))
    room = Room([first, refused, told(2, 8, 420, is_measured=True)], blocks(16))
    assert min(count for count in range(17) if room.may_fit(blocks(count))) == 1


def test_where_nothing_is_told_all_may_be_asked_for() -> None:
    for trials in ([], [Trial(0, "search", blocks(16))], [told(0, 0, 900)]):
        assert Room(trials, blocks(16)).may_fit(blocks(0))
    assert Room([measured(0, 50)], DEFAULT).may_fit(changed(kept_units=8))
