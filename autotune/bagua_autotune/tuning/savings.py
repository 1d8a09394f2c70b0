"""What the speed-up of a tuned job saves: only confirmed gains count, and only steps that its ranks
told of."""

from __future__ import annotations

from collections.abc import Collection

from bagua_autotune.model.job import Job, Saved
from bagua_autotune.store.observations import Steps


def saved_until(
    job: Job, step: int, step_seconds: float, observed: Collection[Steps]
) -> Saved | None:
    """What was saved since the job's steps were last counted; None if nothing is to be counted.

    Each step since then, or since the last trial, would have taken ``step_seconds`` times the
    confirmed speed-up under the default. While a job is being tuned nothing is saved: its steps
    are part of what the search costs.

    Args:
        step: the last one that was made.
        step_seconds: what a step takes now.
        observed: the steps of all its trials.
    """
    counted = max([job.saved.step, *(steps.last for steps in observed)])
    if job.phase != "finished" or job.result is None or step <= counted:
        return None
    return Saved(step, (step - counted) * step_seconds * (job.result.speedup - 1))
