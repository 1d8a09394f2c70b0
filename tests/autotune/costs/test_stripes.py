"""What two numbers of channels tell of others, against the simulators, which know the truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bagua_autotune.costs import Layouts, Predictor, ShardedModel, fit_model, kinds_of
from bagua_simulator import Cluster, Simulator
from bagua_simulator.sharded import ShardedSimulator
from bagua_simulator.workloads import load
from bagua_wire.configuration import Configuration
from tests.autotune.simulated_job import space_of
from tests.simulator.test_sharded import made

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
    model = fit_model(layouts, kinds, profiled)
    assert model is not None
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


@pytest.mark.parametrize("flows", [0.9, 1.2, 1.5])
@pytest.mark.parametrize("gbit", [10, 40])
@pytest.mark.parametrize("model", ["vgg16", "resnet50", "bert-base"])
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
