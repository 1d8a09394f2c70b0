"""What the cost model expects of sharded jobs and of more channels, against the simulators, which
know the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bagua_autotune.costs import Layouts, Predictor, ShardedModel, fit_model, kinds_of
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Cluster, Simulator
from bagua_simulator.sharded import ShardedSimulator
from bagua_simulator.workloads import load
from bagua_wire.configuration import Configuration
from tests.autotune.simulated_job import SimulatedJob, space_of, truth
from tests.autotune.support import present
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


OVER = "bucket_bytes", "channels", "kept_units", "kept_over_micro_batches", "deferred_reduction"


@pytest.mark.parametrize(
    ("link", "micro_batches", "knobs", "most_steps"),
    [(4e9, 1, KNOBS, 300), (1.2e9, 1, KNOBS, 300), (4e9, 4, OVER, 100)],
    ids=["shared", "full", "micro-batches"],
)
def test_a_tuning_finds_the_best_in_few_steps(
    link: float, micro_batches: int, knobs: tuple[str, ...], most_steps: int
) -> None:
    simulator = made(flow=1.1e9, link=link, micro_batches=micro_batches)
    low = simulator.default["bucket_bytes"]
    best = min(s for c, s in truth(simulator, knobs=knobs).items() if c["bucket_bytes"] == low)
    for seed in range(2):
        job = SimulatedJob(Tuner(Store("sqlite://")), simulator, "job", seed, 0.03, knobs=knobs)
        job.run(600, until_finished=True)
        assert job.is_finished
        assert job.step <= most_steps
        assert job.true_seconds(job.configuration) <= 1.05 * best


NUMBERS = (1, 2, 4, 8)


def replicated(model: str, gbit: float, flows: float) -> Simulator:
    """On four hosts; so many connections fill the link between them."""
    link = gbit * 1e9 / 8
    cluster = Cluster(4, 1, link, 100e-6, flow_bytes_per_second=link / flows)
    return Simulator(load(model), cluster)


def with_channels(simulator: Simulator | ShardedSimulator) -> list[Configuration]:
    return [Configuration({**simulator.default, "channels": count}) for count in NUMBERS]


def fitted(simulator: Simulator | ShardedSimulator, counts: Sequence[int]) -> Predictor:
    """To three noisy steps with each number of channels."""
    generator = np.random.default_rng(1)
    profiled = [
        (configuration, simulator.profile(configuration, step, generator, noise=0.05))
        for configuration in with_channels(simulator)
        for step in range(3)
        if configuration["channels"] in counts
    ]
    layouts = Layouts(simulator.tensors)
    if isinstance(simulator, ShardedSimulator):
        return ShardedModel(layouts, profiled)
    kinds = kinds_of(space_of(simulator, simulator.space), [simulator.default])
    model = present(fit_model(layouts, kinds, profiled))
    return model


def errors(simulator: Simulator | ShardedSimulator, model: Predictor) -> dict[int, float]:
    """By how much the model is wrong about what channels gain, as a logarithm."""
    configurations = with_channels(simulator)
    truth = np.log([simulator.step_seconds(each) for each in configurations])
    wrong = model.predict(configurations) - truth
    return dict(zip(NUMBERS, np.abs(wrong - wrong[0]).tolist(), strict=True))


def doubts(simulator: Simulator | ShardedSimulator, model: Predictor) -> dict[int, float]:
    """How wrong it may be, as far as it knows."""
    deviations = model.deviations(with_channels(simulator))
    apart = np.linalg.norm(deviations - deviations[:, :1], axis=0)
    return dict(zip(NUMBERS, apart.tolist(), strict=True))


@pytest.mark.parametrize(
    ("model", "gbit", "flows"),
    [("vgg16", 10, 0.9), ("resnet50", 40, 1.2), ("bert-base", 10, 1.5), ("vgg16", 40, 1.5)],
)
def test_two_channels_that_fill_the_link_tell_what_four_and_eight_gain(
    model: str, gbit: float, flows: float
) -> None:
    simulator = replicated(model, gbit, flows)
    found = errors(simulator, fitted(simulator, [1, 2]))
    assert max(found[4], found[8]) < 0.1


@pytest.mark.parametrize("flows", [1.8, 2.5])
def test_two_channels_that_nearly_fill_it_tell_that_roughly(flows: float) -> None:
    """A link of twice one connection's rate looks like one of a little more or less."""
    simulator = replicated("bert-base", 10, flows)
    model = fitted(simulator, [1, 2])
    found = errors(simulator, model)
    assert max(found[4], found[8]) < 0.2 < doubts(simulator, model)[8]


def test_where_two_channels_are_twice_as_fast_eight_are_promised_more_and_doubted() -> None:
    """Nothing tells yet how many connections fill the link; four of them do."""
    simulator = replicated("bert-base", 10, flows=4)
    two, four = fitted(simulator, [1, 2]), fitted(simulator, [1, 4])
    expected = two.predict(with_channels(simulator))
    assert expected[3] < expected[1] - 0.1
    assert doubts(simulator, two)[8] > 0.4
    assert errors(simulator, two)[8] < 1.5 * doubts(simulator, two)[8]
    assert errors(simulator, four)[8] < errors(simulator, two)[8] / 2


def test_one_number_of_channels_tells_nothing_of_others() -> None:
    simulator = replicated("vgg16", 10, 1.5)
    found = doubts(simulator, fitted(simulator, [1]))
    assert min(found[2], found[4], found[8]) > 0.3


@pytest.mark.parametrize(("flows", "most"), [(1.0, 0.02), (1.2, 0.06), (1.5, 0.15), (2.5, 0.1)])
def test_of_a_sharded_model_too(flows: float, most: float) -> None:
    simulator = made(flow=1e9, link=flows * 1e9)
    found = errors(simulator, fitted(simulator, [1, 2]))
    assert max(found[4], found[8]) < most


def test_of_a_sharded_model_a_full_link_is_hardly_doubted_and_another_one_is() -> None:
    full, wide = made(flow=1e9, link=1.1e9), made(flow=1e9, link=4e9)
    assert doubts(full, fitted(full, [1, 2]))[8] < 0.15 < doubts(wide, fitted(wide, [1, 2]))[8]
    assert doubts(full, fitted(full, [1]))[8] > 0.3
