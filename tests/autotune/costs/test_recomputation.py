"""What recomputing takes of a step, from few trials, and what is predicted of others."""

from __future__ import annotations

import numpy as np
import pytest

from bagua_autotune.costs import Layouts, Recomputing, RecomputingModel, fit_model, kinds_of
from bagua_simulator import Cluster
from bagua_simulator.recomputation import Block, RecomputingSimulator, replicated
from bagua_simulator.workloads import load
from bagua_wire.configuration import Configuration
from tests.autotune.simulated_job import space_of
from tests.autotune.support import present

KNOB = "recomputed_blocks"


def of(count: int, **others: int) -> Configuration:
    return Configuration({KNOB: count, **others})


def test_the_share_is_about_known_and_after_one_trial_well() -> None:
    before = present(Recomputing.of(of(16), [(of(16), 0.5)]))
    assert (before.share, before.error) == (pytest.approx(0.2), pytest.approx(0.06))
    for seconds in (0.5, 0.45, 0.36):
        found = present(Recomputing.of(of(16), [(of(16), 0.5), (of(0), seconds)]))
        assert found.share == pytest.approx(1 - seconds / 0.5, abs=0.025)
        assert found.error < 0.02
        assert found.left(of(8)) == pytest.approx(1 - found.share / 2)
    assert Recomputing.of(Configuration(channels=1), []) is None


@pytest.mark.parametrize("bandwidth", [1e9, 1e11])
def test_a_number_of_blocks_is_predicted_together_with_all_else(bandwidth: float) -> None:
    """From the default and one trial, of which the buckets' cost is learned as well."""
    cluster = Cluster(4, 2, bandwidth, 50e-6)
    blocks = [Block(0.001, 0.0)] * 12
    simulator = RecomputingSimulator(replicated(load("bert-base"), cluster), blocks)
    knobs = ("bucket_bytes", "channels", KNOB)
    default = Configuration({knob: simulator.default[knob] for knob in knobs})
    tried = Configuration({**default, "bucket_bytes": 2**23, KNOB: 0})
    profiled = [(each, simulator.profile(each)) for each in (default, tried)]
    computed = [(each, simulator.computing_seconds(each)) for each in (default, tried)]
    line = present(Recomputing.of(default, computed))
    space = space_of(simulator, knobs)
    layouts = Layouts(simulator.tensors)
    fitted = fit_model(layouts, kinds_of(space, (default,)), line.by_default(profiled))
    model = RecomputingModel(line, fitted)
    others = [Configuration({**tried, **more}) for more in ({KNOB: 6}, {"bucket_bytes": 2**25})]
    configurations = [default, tried, *others]
    predicted = model.predict(configurations)
    truth = np.log([simulator.step_seconds(each) for each in configurations])
    assert np.abs(predicted - predicted[0] - (truth - truth[0])).max() < 0.05
    assert model.deviations(configurations).shape[1] == 4
    assert np.abs(model.deviations([tried])[-1]) < 0.05


def test_of_a_process_alone_only_the_line_is_known() -> None:
    line = Recomputing(4, [(4, 1.0), (0, 0.8)])
    model = RecomputingModel(line, None)
    found = model.predict([of(4), of(2), of(0)])
    assert found == pytest.approx(np.log([1, 1 - line.share / 2, 1 - line.share]))
