"""Blocks that recompute their activations: a line of step times, and one of memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from bagua_simulator import Cluster
from bagua_simulator.recomputation import Block, RecomputingSimulator, Room, replicated, sharded
from bagua_simulator.sharded import Unit
from bagua_wire.configuration import Configuration
from tests.simulator.jobs import make_workload

ALONE, SLOW = Cluster(1, 1, 1e9, 0.0), Cluster(2, 1, 1e8, 0.0)
BLOCKS = [Block(0.01, 100.0)] * 4
KNOB = "recomputed_blocks"


def single(blocks: Sequence[Block] = BLOCKS, room: Room | None = None) -> RecomputingSimulator:
    return RecomputingSimulator(replicated(make_workload(), ALONE), blocks, room)


def test_a_process_alone_gains_what_the_blocks_recompute_and_has_no_other_knob() -> None:
    seconds = [single().step_seconds({KNOB: count}) for count in range(5)]
    assert [after - before for before, after in pairwise(seconds)] == pytest.approx([0.01] * 4)
    assert seconds[0] == pytest.approx(make_workload().compute_seconds)
    assert single().space == {KNOB: {"type": "categorical", "values": [4, 3, 2, 1, 0]}}
    assert single().default == Configuration({KNOB: 4})
    assert single().step_seconds({}) == seconds[4]
    with pytest.raises(ValueError, match="recomputes 4"):
        single().step_seconds({KNOB: 5})


def test_where_the_network_is_slow_less_recomputing_hides_less() -> None:
    slow = RecomputingSimulator(replicated(make_workload(), SLOW), BLOCKS)
    gained = slow.step_seconds({KNOB: 4}) - slow.step_seconds({KNOB: 0})
    assert 0 <= gained < 0.02
    assert {"bucket_bytes", "channels", KNOB} <= set(slow.space)


def test_blocks_take_memory_but_the_last_and_what_may_not_fit_is_not_tried() -> None:
    several = [Block(0.01, 100.0), Block(0.01, 300.0), Block(0.01, 100.0), Block(0.01, 100.0)]
    simulator = single(several, Room(400.0, 1000.0))
    peaks = [simulator.peak_bytes({KNOB: count}) for count in range(5)]
    assert peaks == [900.0, 800.0, 500.0, 400.0, 400.0]
    assert [simulator.fits({KNOB: count}) for count in range(5)] == [False, False, True, True, True]
    assert simulator.fits({KNOB: 1}, proven_bytes=600.0)
    full = single(several, Room(400.0, 600.0))
    assert full.space[KNOB]["values"] == [4, 3, 2]
    assert not full.fits({KNOB: 1}, proven_bytes=600.0)


def test_a_sharded_model_spends_the_same_memory_on_what_it_keeps_and_gathers_ahead() -> None:
    units = [Unit("root", 10, 0.01), *[Unit(f"{place}", 100, 0.01) for place in range(4)]]
    simulator = RecomputingSimulator(sharded(units, SLOW), BLOCKS, Room(400.0, 2000.0))
    default = simulator.default
    assert simulator.peak_bytes(default) == 400.0
    for knob, value, extra in (
        ("kept_units", 2, 2 * 100 * 2),
        ("prefetch", 2, 100 * 2),
        ("scatter_buffers", 2, 100 * 4),
        (KNOB, 2, 100),
    ):
        assert simulator.peak_bytes({**default, knob: value}) == 400.0 + extra, knob
    assert simulator.step_seconds({**default, KNOB: 0}) < simulator.step_seconds(default)
    assert simulator.computing_seconds(default) == pytest.approx(5 * 0.03 + 0.04)
