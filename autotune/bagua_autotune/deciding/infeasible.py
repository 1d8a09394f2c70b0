"""What is not tried for want of memory: what the ranks said does not fit, and what is larger."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import MEMORY_KNOBS, Configuration, Value


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


def needs_as_much(candidate: Configuration, other: Configuration) -> bool:
    """Whether a configuration surely needs as much memory as another one: they differ only in knobs
    of which more costs more, and it has at least as much of each."""
    return candidate.keys() == other.keys() and all(
        _is_at_least(knob, candidate[knob], other[knob]) for knob in candidate
    )


def _is_at_least(knob: str, value: Value, other: Value) -> bool:
    if knob in MEMORY_KNOBS and isinstance(value, int) and isinstance(other, int):
        return value >= other
    return value == other


def _most_measured(trials: Sequence[Trial]) -> int:
    peaks = (trial.memory.peak_bytes for trial in trials if trial.estimate and trial.memory)
    return max(peaks, default=0)
