"""What disturbs the steps of a job: noise of steps, of visits and of blocks, bad moments, drift,
settings that are unsteady.

A visit are the steps between two switches of the configuration. Machines differ from visit to visit
by more than the spread inside one says: memory lies elsewhere, other jobs come and go. A block are
40 steps, whatever the tuner does meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

STRAGGLER_PROBABILITY, STRAGGLER_SHARES = 0.03, (0.2, 1.0)
# Of Student's t: the fewer, the heavier the tails; scaled to the same standard deviation.
HEAVY_DEGREES = 3
BLOCK_STEPS = 40
DRIFT_STEPS = 300
# A bad moment: so many steps take so much longer; the next begins so many steps later on average.
BAD_STEPS, BAD_FACTOR, GOOD_STEPS = 10, 2.0, 40
# With so many channels and more, this share of the steps is slower than the mean by one factor, and
# the others faster by another: as two hosts on one GPU were seen to be.
UNSTEADY_CHANNELS, SLOW_SHARE, SLOW_FACTOR, FAST_FACTOR = 8, 0.4, 1.3, 0.8


@dataclass(frozen=True)
class Climate:
    """Standard deviations are of the logarithm of a step's time.

    Attributes:
        inside: of steps inside a visit.
        by_visit: of visits.
        by_block: of blocks.
        autocorrelation: of a step's noise with that of the step before.
        is_heavy: noise inside a visit has the tails of Student's t.
        has_bad_moments: now and then some steps take twice the time.
        drift: by which part steps are slower 300 steps later.
        is_unsteady: steps with many channels are fast and slow by turns, at random.
    """

    name: str
    inside: float = 0.03
    by_visit: float = 0.0
    by_block: float = 0.0
    autocorrelation: float = 0.0
    is_heavy: bool = False
    has_bad_moments: bool = False
    drift: float = 0.0
    is_unsteady: bool = False


CLIMATES = (
    Climate("steady"),
    Climate("2 % by visit", by_visit=0.02),
    Climate("10 % by visit", by_visit=0.10),
    Climate(f"5 % by block of {BLOCK_STEPS} steps", by_block=0.05),
    Climate("autocorrelation 0.8", autocorrelation=0.8),
    Climate("heavy tails", is_heavy=True),
    Climate(f"bad moments of {BAD_STEPS} steps", has_bad_moments=True),
    Climate(f"drift of 10 % in {DRIFT_STEPS} steps", drift=0.1),
    Climate(f"unsteady from {UNSTEADY_CHANNELS} channels on", is_unsteady=True),
)


class Weather:
    """One job's; equal seeds give equal weather, whatever is visited when.

    But for the noise by visit, which is that of the first, the second visit and so on, and for
    what is unsteady, which the channels say.
    """

    def __init__(self, climate: Climate, seed: int) -> None:
        self._climate = climate
        # Of each kind its own, so that one draws the same whatever the others do.
        self._steps, self._visits, self._blocks, self._moments, self._modes = (
            np.random.default_rng((seed, 7, kind)) for kind in range(5)
        )
        self._last = self._steps.standard_normal()
        self._visit = self._block = 0.0
        self._block_ends_at = int(self._blocks.integers(1, BLOCK_STEPS + 1))
        self._bad_from = self._good_until(0)
        self.new_visit()
        self._new_block()

    def new_visit(self) -> None:
        """The configuration was switched."""
        self._visit = self._climate.by_visit * self._visits.standard_normal()

    def factor(self, step: int, channels: int = 1) -> float:
        """What a step with so many channels takes over what it would take undisturbed; steps must
        ascend."""
        drift = self._climate.drift * step / DRIFT_STEPS
        late = 0.0
        if self._steps.random() < STRAGGLER_PROBABILITY:
            late = self._steps.uniform(*STRAGGLER_SHARES)
        while step >= self._block_ends_at:
            self._block_ends_at += BLOCK_STEPS
            self._new_block()
        noise = self._climate.inside * self._draw() + self._visit + self._block
        return (
            math.exp(noise) * (1 + drift) * (1 + late) * self._moment(step) * self._mode(channels)
        )

    def _new_block(self) -> None:
        self._block = self._climate.by_block * self._blocks.standard_normal()

    def _moment(self, step: int) -> float:
        while step >= self._bad_from + BAD_STEPS:
            self._bad_from = self._good_until(self._bad_from + BAD_STEPS)
        is_bad = self._climate.has_bad_moments and step >= self._bad_from
        return BAD_FACTOR if is_bad else 1.0

    def _mode(self, channels: int) -> float:
        is_slow = self._modes.random() < SLOW_SHARE
        if not self._climate.is_unsteady or channels < UNSTEADY_CHANNELS:
            return 1.0
        return SLOW_FACTOR if is_slow else FAST_FACTOR

    def _good_until(self, step: int) -> int:
        return step + int(self._moments.geometric(1 / GOOD_STEPS))

    def _draw(self) -> float:
        if self._climate.is_heavy:
            scale = math.sqrt(HEAVY_DEGREES / (HEAVY_DEGREES - 2))
            return float(self._steps.standard_t(HEAVY_DEGREES)) / scale
        share = self._climate.autocorrelation
        fresh = self._steps.standard_normal()
        self._last = share * self._last + math.sqrt(1 - share**2) * fresh
        return self._last
