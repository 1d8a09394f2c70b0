"""On a GPU no step of a configuration with many channels is recorded: its marks would show buckets
that wait for one another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bagua_autotune.costs import Predictor, fit_model
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import load_record
from bagua_wire.configuration import Configuration
from benchmarks.support.searches.engines import OurEngine
from benchmarks.support.searches.landscape import MIB, SPACES, Landscape

pytestmark = pytest.mark.slow

RECORD = load_record(Path(__file__).parents[1] / "simulator/recorded/vgg16_two_hosts.json")
LINK_BYTES_PER_SECOND = 12.5e9  # 8 channels fill it, 4 do not.
FEWEST_UNRECORDED, TRIALS, NOISE = 8, 14, 0.1


class _Engine(OurEngine):
    """Has no recordings of many channels."""

    def _predictor(self) -> Predictor | None:
        recorded = [
            (configuration, told.profile)
            for configuration, told in self._told
            if configuration["channels"] < FEWEST_UNRECORDED
        ]
        return fit_model(self._layouts, self._kinds, recorded)


@pytest.fixture(scope="module")
def landscape() -> Landscape:
    cluster = replace(fit_record(RECORD).cluster, bandwidth_bytes_per_second=LINK_BYTES_PER_SECOND)
    space = {knob: SPACES["large"][knob] for knob in ("bucket_bytes", "channels")}
    return Landscape("vgg16", RECORD.simulator(cluster), space)


def test_eight_channels_are_the_fastest(landscape: Landscape) -> None:
    sizes = (4 * MIB, 25 * MIB, 100 * MIB)
    fastest = {
        channels: min(
            landscape.seconds(Configuration(bucket_bytes=size, channels=channels)) for size in sizes
        )
        for channels in (1, 4, 8)
    }
    assert fastest[8] < 0.9 * fastest[4] < 0.4 * fastest[1]


@pytest.mark.parametrize("seed", range(2))
def test_they_are_found_though_no_step_of_them_was_recorded(
    landscape: Landscape, seed: int
) -> None:
    engine, generator = _Engine("bayesian", landscape, seed), np.random.default_rng(seed)
    for _ in range(TRIALS):
        configuration = engine.ask()
        engine.tell(configuration, landscape.measure(configuration, NOISE, generator))
    found = engine.best()
    assert found["channels"] >= FEWEST_UNRECORDED
    assert landscape.excess(found) < 0.08
