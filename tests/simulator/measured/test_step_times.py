"""Which measured steps go into a record, and what of them."""

from __future__ import annotations

import pytest

from bagua_simulator.measured.traffic import MOST_CONFIGURATIONS, step_times_of
from tests.simulator.jobs import MIB, Knobs

pytestmark = pytest.mark.slow

FLAT: Knobs = {"bucket_bytes": 25 * MIB, "hierarchical": "off", "channels": 1}


def test_steps_with_one_configuration_become_one_entry() -> None:
    """Also those of two visits, with others in between."""
    two: Knobs = {**FLAT, "channels": 2}
    found = step_times_of([(FLAT, 0.2), (FLAT, 0.9), (two, 0.1), (FLAT, 0.3)])
    assert [(each.configuration, each.steps) for each in found] == [(FLAT, 3), (two, 1)]
    first, single = found
    assert (first.seconds, first.low_seconds, first.high_seconds) == (0.3, 0.2, 0.9)
    assert (single.spread, single.uncertainty) == (0.0, 0.0)
    assert first.uncertainty == pytest.approx(first.spread / 3**0.5)


@pytest.mark.parametrize(
    "knobs",
    [
        {**FLAT, "wire_precision": "bf16"},
        {**FLAT, "algorithm": "bytegrad"},
        {"kept_units": 4, "channels": 1},
        {**FLAT, "hierarchical": "tree"},
    ],
    ids=["other bytes", "other algorithm", "sharded", "unknown way"],
)
def test_what_is_simulated_in_another_way_is_left_out(knobs: Knobs) -> None:
    found = step_times_of([(FLAT, 0.2), (knobs, 0.1)])
    assert [each.seconds for each in found] == [0.2]


def test_a_step_without_length_is_left_out() -> None:
    assert step_times_of([(FLAT, 0.0)]) == ()


def test_of_many_configurations_those_with_the_most_steps_stay() -> None:
    many = [({**FLAT, "bucket_bytes": size}, 0.1) for size in range(1, 100)]
    found = step_times_of([*many, (FLAT, 0.2), (FLAT, 0.2)])
    assert len(found) == MOST_CONFIGURATIONS
    assert found[0].configuration == FLAT
