"""What the cost model expects of a sharded job, against the simulator, which knows the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bagua_autotune.costs import Layouts, ShardedModel
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator.sharded import ShardedSimulator
from bagua_wire.configuration import Configuration
from tests.autotune.simulated_job import SimulatedJob, truth
from tests.simulator.test_sharded import LAYERS, made

KNOBS = ("bucket_bytes", "channels", "kept_units", "prefetch", "scatter_group")


def _fitted(simulator: ShardedSimulator, changes: Sequence[dict[str, Any]]) -> ShardedModel:
    configurations = [Configuration({**simulator.default, **each}) for each in changes]
    profiled = [(c, simulator.profile(c)) for c in configurations]
    return ShardedModel(Layouts(simulator.tensors), profiled)


def _errors(simulator: ShardedSimulator, model: ShardedModel, changes: dict[str, Any]) -> float:
    """By how much the model is wrong about a change from the default, as a logarithm."""
    default = simulator.default
    pair = [default, Configuration({**default, **changes})]
    expected = np.diff(model.predict(pair))[0]
    actual = np.log(simulator.step_seconds(pair[1]) / simulator.step_seconds(pair[0]))
    return float(abs(expected - actual))


def test_a_profile_of_the_default_tells_what_keeping_merging_and_16_bits_save() -> None:
    simulator = made()
    model = _fitted(simulator, [{}])
    assert model.misfit < 0.02
    for changes in (
        {"kept_units": 3},
        {"kept_units": LAYERS},
        {"wire_precision": "bf16"},
        {"bucket_bytes": 56_000_000},
        {"algorithm": "quantized"},
        {"algorithm": "quantized_weights", "wire_precision": "bf16"},
        {"algorithm": "quantized_gradients", "kept_units": LAYERS},
    ):
        assert _errors(simulator, model, changes) < 0.05, changes


def test_what_computing_hides_is_not_promised() -> None:
    simulator = made(flow=20e9, link=20e9, layer_seconds=0.05)
    model = _fitted(simulator, [{}])
    assert _errors(simulator, model, {"kept_units": LAYERS}) < 0.05


def test_channels_are_known_once_they_are_profiled_and_doubtful_before() -> None:
    simulator = made()
    four = Configuration({**simulator.default, "channels": 4})
    before, after = _fitted(simulator, [{}]), _fitted(simulator, [{}, {"channels": 4}])
    assert _errors(simulator, after, {"channels": 4, "kept_units": LAYERS}) < 0.06
    doubt = [np.abs(m.deviations([simulator.default, four])[:, 1]).max() for m in (before, after)]
    assert doubt[0] > 0.2 > doubt[1]


def test_another_algorithm_is_doubted_until_it_is_profiled() -> None:
    simulator, quantized = made(), {"algorithm": "quantized"}
    default, other = simulator.default, Configuration({**simulator.default, **quantized})
    before, after = _fitted(simulator, [{}]), _fitted(simulator, [{}, quantized])
    doubt = [np.abs(m.deviations([default, other])[:, 1]).max() for m in (before, after)]
    assert doubt[0] > 0.15 > doubt[1]
    assert _errors(simulator, after, {"kept_units": LAYERS, **quantized}) < 0.05


def test_a_copy_in_each_node_saves_what_keeping_saves_and_is_doubted() -> None:
    simulator = made()
    model, default = _fitted(simulator, [{}]), simulator.default
    copies = Configuration({**default, "node_copy": "on"})
    kept = Configuration({**default, "kept_units": LAYERS})
    assert model.traffic(copies) == model.traffic(kept)
    doubts = [np.abs(model.deviations([default, each])[:, 1]).max() for each in (copies, kept)]
    assert doubts[0] > 0.15 > doubts[1]


def test_a_round_may_begin_with_merged_and_kept_units() -> None:
    simulator, both = made(), {"bucket_bytes": 56_000_000, "kept_units": 2}
    model = _fitted(simulator, [both])
    assert _errors(simulator, model, both) < 0.05
    usual = _fitted(simulator, [{}]).traffic(simulator.default)
    assert model.traffic(simulator.default) == pytest.approx(usual)


def test_micro_batches_gather_more_and_keep_as_much() -> None:
    simulator = made()
    (profile,) = (simulator.profile(simulator.default),)
    again = [replace(g) for g in profile.gathers]
    twice = replace(profile, gathers=(*profile.gathers, *again))
    model = ShardedModel(Layouts(simulator.tensors), [(simulator.default, twice)])
    kept = Configuration({**simulator.default, "kept_units": LAYERS})
    once = model.traffic(kept).gathered_bytes / model.traffic(simulator.default).gathered_bytes
    layers, root = 2 * LAYERS * 7.0, 40.0
    assert once == pytest.approx((layers / 2 + root) / (layers + root))


def test_what_micro_batches_send_is_known_from_the_default_and_the_other_way_round() -> None:
    simulator = made(micro_batches=4)
    on, deferred = {"kept_over_micro_batches": "on"}, {"deferred_reduction": "on"}
    everything = {"kept_units": LAYERS, **on}
    model = _fitted(simulator, [{}])
    for changes in (on, {"kept_units": 3, **on}, everything, deferred):
        assert _errors(simulator, model, changes) < 0.05, changes
    # Then computing hides much of what is left, and a line says too little.
    assert _errors(simulator, model, {**everything, **deferred}) < 0.3
    for begun in (everything, {"kept_units": 3, **on}, {**deferred, "kept_units": 3}):
        again = _fitted(simulator, [begun])
        for changes in ({}, everything, deferred, {"kept_units": 3, **on}, {"kept_units": LAYERS}):
            configuration = Configuration({**simulator.default, **changes})
            assert again.traffic(configuration) == model.traffic(configuration)


def test_a_tuning_with_micro_batches_keeps_over_them() -> None:
    simulator = made(micro_batches=4, flow=1.1e9)
    over = "kept_over_micro_batches", "deferred_reduction"
    knobs = ("bucket_bytes", "channels", "kept_units", *over)
    low = simulator.default["bucket_bytes"]
    known = truth(simulator, knobs=knobs)
    best = min(s for c, s in known.items() if c["bucket_bytes"] == low)
    for seed in range(3):
        job = SimulatedJob(Tuner(Store("sqlite://")), simulator, "job", seed, 0.03, knobs=knobs)
        job.run(600, until_finished=True)
        assert job.is_finished
        assert job.step <= 100
        assert job.true_seconds(job.configuration) <= 1.05 * best


@pytest.mark.parametrize("link", [4e9, 1.2e9], ids=["shared", "full"])
def test_a_tuning_finds_the_best_in_few_steps(link: float) -> None:
    simulator = made(flow=1.1e9, link=link)
    low = simulator.default["bucket_bytes"]
    best = min(s for c, s in truth(simulator, knobs=KNOBS).items() if c["bucket_bytes"] == low)
    for seed in range(3):
        job = SimulatedJob(Tuner(Store("sqlite://")), simulator, "job", seed, 0.03, knobs=KNOBS)
        job.run(600, until_finished=True)
        assert job.is_finished
        assert job.step <= 300
        assert job.true_seconds(job.configuration) <= 1.05 * best
