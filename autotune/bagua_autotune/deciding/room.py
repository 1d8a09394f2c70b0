"""What is not tried for want of memory: what the ranks said does not fit, and what takes more.

A rank refuses what would not fit, and what it does not know enough of: twice what it takes beyond
all that was measured must fit on the device. It tells the peak that it predicts. From one peak that
was told follow those with other numbers of recomputed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import memory_of
from bagua_autotune.model.job import Trial
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import MEMORY_KNOBS, RECOMPUTED_KNOB

TOLERANCE = 0.01
"""What is predicted here may be off by this part of the device; then the ranks say so."""


def too_large(trials: Sequence[Trial]) -> list[Configuration]:
    """The configurations that do not fit, as far as is known by now.

    What was only too far from all that had been measured may be asked for again once a trial took
    more memory than all before it.

    Args:
        trials: in the order in which they were made.
    """
    return [
        trial.configuration
        for place, trial in enumerate(trials)
        if trial.state == "infeasible"
        and not (
            trial.memory is not None
            and trial.memory.is_unproven
            and _most_measured(trials[place:]) > _most_measured(trials[:place])
        )
    ]


def _memory_rank(knob: str, value: Value) -> float:
    """A number that is larger if a value takes more memory; NaN: that is not known."""
    return MEMORY_KNOBS.get(knob, math.nan) * value if isinstance(value, int) else math.nan


def needs_as_much(
    candidate: Configuration,
    other: Configuration,
    rank: Callable[[str, Value], float] = _memory_rank,
) -> bool:
    """Whether a configuration surely needs as much memory as another one: they differ only in knobs
    of which more costs more, and it has at least as much of each."""
    return candidate.keys() == other.keys() and all(
        value == other[knob] or rank(knob, value) >= rank(knob, other[knob])
        for knob, value in candidate.items()
    )


def _most_measured(trials: Sequence[Trial]) -> int:
    peaks = (trial.memory.peak_bytes for trial in trials if trial.estimate and trial.memory)
    return max(peaks, default=0)


def more_fits(round_: Round) -> bool:
    """Whether something that did not fit in the earlier run of the job would fit now, as more
    memory may be used."""
    before = round_.job.inherited.refused if round_.job.inherited else None
    now = memory_of(round_.trials, round_.job.baseline)
    if before is None or now is None:
        return False
    has_grown = now.limit_bytes > before.limit_bytes + TOLERANCE * before.device_bytes
    return has_grown and before.peak_bytes <= now.limit_bytes


class Room:
    """What recomputing fewer blocks takes, by the peaks that were told of others.

    Args:
        trials: in the order in which they were made.
        baseline: the job's default, with all blocks recomputed.
    """

    def __init__(self, trials: Sequence[Trial], baseline: Configuration) -> None:
        told = {t.configuration: t.memory for t in trials if t.memory is not None}
        self._total = baseline.get(RECOMPUTED_KNOB, 0)
        self._default, self._proven_bytes = told.get(baseline), _most_measured(trials)
        # What else is not as by default takes more, too.
        self._bytes_each = min(
            (
                (memory.peak_bytes - self._default.peak_bytes) / kept
                for each, memory in told.items()
                if self._default and (kept := self._kept(each))
            ),
            default=0.0,
        )

    def may_fit(self, configuration: Configuration) -> bool:
        """Whether it is worth asking the ranks for it."""
        default, kept = self._default, self._kept(configuration)
        if default is None or not kept:
            return True
        peak_bytes = default.peak_bytes + kept * self._bytes_each
        peak_bytes -= TOLERANCE * default.device_bytes
        twice_bytes = 2 * peak_bytes - self._proven_bytes
        is_safe = peak_bytes <= default.limit_bytes and twice_bytes <= default.device_bytes
        return is_safe or peak_bytes <= self._proven_bytes

    def _kept(self, configuration: Configuration) -> int:
        """How many blocks keep their activations."""
        count = configuration.get(RECOMPUTED_KNOB, self._total)
        return self._total - count if isinstance(count, int) and isinstance(self._total, int) else 0
