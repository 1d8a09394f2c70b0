"""What it takes of a step that blocks recompute their activations.

Recomputing is a block's forward pass once more, so computing takes as much less time as blocks keep
their activations: a line over their number. Its slope is known roughly, and from one trial well: a
forward pass takes half as long as the backward pass, so recomputing all of a model takes a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import TypeVar

import numpy as np

from bagua_autotune.costs.layouts import Floats
from bagua_autotune.costs.model import CostModel
from bagua_autotune.costs.sharded import MOST_REMEMBERED, ShardedModel
from bagua_wire.configuration import Configuration
from bagua_wire.knobs import RECOMPUTED_KNOB
from bagua_wire.profile import BucketTiming, GatherTiming, Profile

USUAL_SHARE, SHARE_ERROR = 0.2, 0.06
"""Of computing, for all blocks: a quarter without what stands outside of them."""
OTHERS_ERROR = 0.02
"""By which the computing of two trials differs otherwise, as a part of it."""
MOST_SHARE = 0.5

Timing = TypeVar("Timing", BucketTiming, GatherTiming)


class Recomputing:
    """The line of one job.

    Args:
        total: how many blocks are recomputed by default.
        seconds: that computing took, by the number of recomputed blocks, in several trials.

    Attributes:
        share: of computing, that recomputing all blocks takes.
        error: of it.
    """

    def __init__(self, total: int, seconds: Sequence[tuple[int, float]]) -> None:
        self._total = max(total, 1)
        usual = [each for count, each in seconds if count == total]
        products, precision = USUAL_SHARE / SHARE_ERROR**2, SHARE_ERROR**-2
        for count, each in seconds if usual else ():
            # By least squares, with a normal prior.
            kept = 1 - count / self._total
            products += kept * (1 - each / median(usual)) / OTHERS_ERROR**2
            precision += kept**2 / OTHERS_ERROR**2
        self.share = min(max(products / precision, 0.0), MOST_SHARE)
        self.error = precision**-0.5

    @classmethod
    def of(
        cls, baseline: Configuration, computed: Sequence[tuple[Configuration, float]]
    ) -> Recomputing | None:
        """The line of a job; None where the knob is not tuned.

        Args:
            computed: the seconds that its trials' steps computed.
        """
        if RECOMPUTED_KNOB not in baseline:
            return None
        counts = [(each.number(RECOMPUTED_KNOB), seconds) for each, seconds in computed]
        return cls(baseline.number(RECOMPUTED_KNOB), counts)

    def left(self, configuration: Configuration, share: float | None = None) -> float:
        """The part of the default's computing that is left under a configuration.

        Args:
            share: another one than was found.
        """
        kept = 1 - configuration.number(RECOMPUTED_KNOB) / self._total
        return 1 - (self.share if share is None else share) * kept

    def by_default(
        self, profiled: Sequence[tuple[Configuration, Profile]]
    ) -> list[tuple[Configuration, Profile]]:
        """The steps as they would have been with all blocks recomputed: what travels begins later
        by as much, and takes as long."""
        return [(c, _stretched(profile, 1 / self.left(c))) for c, profile in profiled]


def _stretched(profile: Profile, factor: float) -> Profile:
    def moved(timings: Sequence[Timing]) -> tuple[Timing, ...]:
        return tuple(
            replace(
                each,
                started_seconds=each.started_seconds * factor,
                ended_seconds=each.ended_seconds + each.started_seconds * (factor - 1),
            )
            for each in timings
        )

    return replace(
        profile,
        step_seconds=profile.step_seconds * factor,
        ready_seconds=tuple(each * factor for each in profile.ready_seconds),
        buckets=moved(profile.buckets),
        gathers=moved(profile.gathers),
    )


class RecomputingModel:
    """See Predictor; of a job whose blocks recompute their activations.

    Args:
        line: what that takes.
        model: of what travels, fitted to steps as they would have been by default; None: nothing
            does, or that is not known.
    """

    def __init__(self, line: Recomputing, model: CostModel | ShardedModel | None) -> None:
        self._line, self.model = line, model
        self.misfit = model.misfit if model else 0.0
        self._latest: tuple[Sequence[Configuration], Floats] | None = None

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor."""
        found: Floats = self._log_seconds(configurations)[0]
        return found

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        """See Predictor."""
        found: Floats = self._log_seconds(configurations)[1:]
        return found

    def _log_seconds(self, configurations: Sequence[Configuration]) -> Floats:
        """Of a step, and the deviations: shape (1 + deviations, configurations)."""
        if self._latest is not None and self._latest[0] is configurations:
            return self._latest[1]
        line = self._line
        left = np.array([line.left(each) for each in configurations])
        doubted = np.array([line.left(each, line.share + line.error) for each in configurations])
        found = np.vstack([self._without_doubt(configurations, left), np.log(doubted / left)])
        self._latest = configurations, found
        return found

    def _without_doubt(self, configurations: Sequence[Configuration], left: Floats) -> Floats:
        """The logarithms of step times, and their deviations, as if the line's slope were exact."""
        if self.model is None:
            return np.log(left)[None]
        # The candidates are the same ones for each number of blocks.
        others: dict[Configuration, int] = {}
        places = [others.setdefault(_others(each), len(others)) for each in configurations]
        found, every = [], [*others]
        for part in (parts := np.unique(left)):
            model = self.model.computing(float(part))
            found.append(np.vstack([model.predict(every), model.deviations(every)]))
        which = np.searchsorted(parts, left)
        gathered: Floats = np.array(found)[which, :, places].T
        return gathered


@lru_cache(maxsize=MOST_REMEMBERED)
def _others(configuration: Configuration) -> Configuration:
    """Without the knob."""
    return Configuration({k: v for k, v in configuration.items() if k != RECOMPUTED_KNOB})
