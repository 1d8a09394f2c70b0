"""What disturbs the steps of a job: noise inside a block of steps, between blocks, and drift.

A block are the steps between two switches of the configuration. Machines differ from block to block
by more than the spread inside one says: memory lies elsewhere, other jobs come and go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

STRAGGLER_PROBABILITY, STRAGGLER_SHARES = 0.03, (0.2, 1.0)
# Of Student's t: the fewer, the heavier the tails; scaled to the same standard deviation.
HEAVY_DEGREES = 3


@dataclass(frozen=True)
class Climate:
    """Standard deviations are of the logarithm of a step's time.

    Attributes:
        inside: of steps inside a block.
        between: of blocks.
        autocorrelation: of a step's noise with that of the step before.
        is_heavy: noise inside a block has the tails of Student's t.
        drift: by which part steps are slower 300 steps later.
    """

    name: str
    inside: float = 0.03
    between: float = 0.0
    autocorrelation: float = 0.0
    is_heavy: bool = False
    drift: float = 0.0


CLIMATES = (
    Climate("0 % between blocks"),
    Climate("1 % between blocks", between=0.01),
    Climate("2 % between blocks", between=0.02),
    Climate("5 % between blocks", between=0.05),
    Climate("autocorrelation 0.8", autocorrelation=0.8),
    Climate("heavy tails", is_heavy=True),
    Climate("drift of 10 % in 300 steps", drift=0.1),
)
DRIFT_STEPS = 300


class Weather:
    """One job's; equal seeds give equal weather."""

    def __init__(self, climate: Climate, seed: int) -> None:
        self._climate = climate
        self._generator = np.random.default_rng((seed, 7))
        self._last = self._generator.standard_normal()
        self._block = 0.0
        self.new_block()

    def new_block(self) -> None:
        """The configuration was switched."""
        self._block = self._climate.between * self._generator.standard_normal()

    def factor(self, step: int) -> float:
        """What a step takes over what it would take undisturbed."""
        drift = self._climate.drift * step / DRIFT_STEPS
        late = 0.0
        if self._generator.random() < STRAGGLER_PROBABILITY:
            late = self._generator.uniform(*STRAGGLER_SHARES)
        noise = self._climate.inside * self._draw()
        return math.exp(noise + self._block) * (1 + drift) * (1 + late)

    def _draw(self) -> float:
        if self._climate.is_heavy:
            scale = math.sqrt(HEAVY_DEGREES / (HEAVY_DEGREES - 2))
            return float(self._generator.standard_t(HEAVY_DEGREES)) / scale
        share = self._climate.autocorrelation
        fresh = self._generator.standard_normal()
        self._last = share * self._last + math.sqrt(1 - share**2) * fresh
        return self._last
