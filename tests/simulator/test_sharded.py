"""What a simulated sharded model gathers, and how long its steps take."""

from __future__ import annotations

from typing import Any

import pytest

from bagua_simulator.cluster import Cluster
from bagua_simulator.sharded import ShardedSimulator, Unit
from bagua_wire.configuration import Configuration

pytestmark = pytest.mark.slow

LAYERS = 6


def made(
    flow: float = 1e9, link: float = 4e9, layer_seconds: float = 1e-3, micro_batches: int = 1
) -> ShardedSimulator:
    """A root and its layers on two hosts, of whose link a connection takes a part."""
    layers = [Unit(f"layers.{at}", 7_000_000, layer_seconds) for at in range(LAYERS)]
    cluster = Cluster(2, 1, link, 20e-6, flow_bytes_per_second=flow)
    root = Unit("root", 40_000_000, 1e-3, "root")
    return ShardedSimulator([root, *layers], cluster, micro_batches)


def seconds(simulator: ShardedSimulator, **changes: Any) -> float:
    return simulator.step_seconds(Configuration({**simulator.default, **changes}))


def test_what_is_kept_is_gathered_once_and_merged_units_travel_as_one() -> None:
    simulator = made()
    expected = {(): 13, (("kept_units", 2),): 11, (("bucket_bytes", 56_000_000),): 7}
    for changes, gathers in expected.items():
        configuration = Configuration({**simulator.default, **dict(changes)})
        profile = simulator.profile(configuration)
        assert len(profile.gathers) == gathers
        assert sum(bucket.bytes for bucket in profile.buckets) == 4 * (82_000_000)
        assert max(g.ended_seconds for g in profile.gathers) <= profile.step_seconds


def test_what_is_kept_over_micro_batches_is_gathered_once_in_a_step() -> None:
    simulator = made(micro_batches=4)
    for kept, on, gathers in ((0, "off", 4 * 13), (0, "on", 4 * 12 + 1), (LAYERS, "on", 7)):
        changes = {"kept_units": kept, "kept_over_micro_batches": on}
        profile = simulator.profile(Configuration({**simulator.default, **changes}))
        assert len(profile.gathers) == gathers
        assert len(profile.buckets) == 4 * 7


def test_what_is_deferred_is_reduced_once_in_a_step() -> None:
    simulator = made(micro_batches=4)
    deferred = Configuration({**simulator.default, "deferred_reduction": "on"})
    assert len(simulator.profile(deferred).buckets) == 7
    assert simulator.step_seconds(deferred) < simulator.step_seconds(simulator.default)


def test_less_to_send_is_faster_where_the_link_decides_and_nothing_is_where_it_does_not() -> None:
    slow, fast = made(), made(flow=1e12, link=1e12, layer_seconds=0.05)
    usual = seconds(slow)
    assert seconds(slow, kept_units=LAYERS) < 0.9 * usual
    assert seconds(slow, wire_precision="bf16") < 0.8 * usual
    assert seconds(slow, channels=4) < 0.5 * usual
    everything = {"kept_units": LAYERS, "channels": 4, "scatter_group": "own"}
    assert seconds(fast, **everything) == pytest.approx(seconds(fast), rel=0.05)


def test_more_connections_help_only_as_far_as_the_link_goes() -> None:
    full = made(flow=1e9, link=1e9)
    assert seconds(full, channels=4) == pytest.approx(seconds(full), rel=0.02)


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="channels is 'two'"):
        seconds(made(), channels="two")
