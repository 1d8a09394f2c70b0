"""What ours is compared with: other ways to spend the same steps on the same job.

Each block loses the steps that a live job drops after a switch, and nothing else: what switching
takes besides is ours alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import skopt

from bagua_autotune.model.knobs import Configuration
from bagua_client.agent.agent import DROPPED_STEPS
from bagua_simulator import Simulator
from bagua_simulator.simulator import CHANNELS
from noise.unseen import MIB
from noise.weather import Weather

SEARCHED_STEPS = 5  # of a trial of Bagua's optimiser
HALTON_TRIALS = 20  # its first ones


class Budget:
    """Steps of a job, and what they take.

    Args:
        steps: so many in all.
    """

    def __init__(self, simulator: Simulator, weather: Weather, steps: int) -> None:
        self._simulator = simulator
        self._weather = weather
        self.left = steps
        self._step = 0

    def block(self, configuration: Configuration, steps: int) -> list[float]:
        """Log seconds of so many steps, the dropped ones not counted; of at least one."""
        self._weather.new_block()
        self._step += DROPPED_STEPS
        count = max(1, steps)
        self.left -= DROPPED_STEPS + count
        truth = self._simulator.step_seconds(configuration)
        found = []
        for _ in range(count):
            self._step += 1
            found.append(math.log(truth * self._weather.factor(self._step)))
        return found


def settings(
    simulator: Simulator, sizes_mib: Sequence[int], channels: Sequence[int]
) -> list[Configuration]:
    """All combinations, flat and by leaders where there is a choice; else twice the channels."""
    ways = ("off", "leaders") if simulator.cluster.is_hierarchical else ("off",)
    if len(ways) == 1:
        channels = sorted({*channels, *(2 * count for count in channels)})
    return [
        Configuration(bucket_bytes=size * MIB, hierarchical=way, channels=count)
        for size, way, count in product(sizes_mib, ways, channels)
    ]


def grid(simulator: Simulator, budget: Budget, seed: int) -> Configuration:
    """Twelve settings, each measured once for as long."""
    tried = settings(simulator, (1, 5, 25), (1, 4))
    steps = budget.left // len(tried) - DROPPED_STEPS
    medians = {setting: median(budget.block(setting, steps)) for setting in tried}
    return min(medians, key=medians.__getitem__)


def successive_halving(simulator: Simulator, budget: Budget, seed: int) -> Configuration:
    """Sixteen settings, the better half goes on, with all its steps so far (Jamieson and Talwalkar
    2016)."""
    left = settings(simulator, (1, 5, 25, 100), (1, 4))
    rounds = round(math.log2(len(left)))
    share = budget.left // rounds
    known: dict[Configuration, list[float]] = {setting: [] for setting in left}
    for _ in range(rounds):
        steps = share // len(left) - DROPPED_STEPS
        for setting in left:
            known[setting] += budget.block(setting, steps)
        left.sort(key=lambda setting: median(known[setting]))
        left = left[: len(left) // 2]
    return left[0]


def bagua(simulator: Simulator, budget: Budget, seed: int) -> Configuration:
    """GP-EI after Halton points, on Bagua's terms: exponents of two and the highest score wins."""
    ways = ("off", "leaders", "shards") if simulator.cluster.is_hierarchical else ("off",) * 2
    optimizer = skopt.Optimizer(
        [(16, 30), (0, len(ways) - 1), (0, len(CHANNELS) - 1)],
        n_initial_points=HALTON_TRIALS,
        initial_point_generator="halton",
        acq_func="EI",
        random_state=seed,
    )
    best: tuple[float, Configuration] | None = None
    while budget.left >= SEARCHED_STEPS + DROPPED_STEPS:
        point = optimizer.ask()
        exponent, way, place = map(int, point)
        configuration = Configuration(
            bucket_bytes=2**exponent, hierarchical=ways[way], channels=CHANNELS[place]
        )
        seconds = budget.block(configuration, SEARCHED_STEPS)
        mean = sum(seconds) / len(seconds)
        optimizer.tell(point, mean)
        if best is None or mean < best[0]:
            best = mean, configuration
    assert best is not None
    return best[1]


Rival = Callable[[Simulator, Budget, int], Configuration]
RIVALS: dict[str, Rival] = {
    "grid of 12": grid,
    "successive halving over 16": successive_halving,
    "GP-EI, Halton": bagua,
}
