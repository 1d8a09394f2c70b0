"""What the ranks report: checked against the job, and what it says that its speed-up saves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bagua_autotune.deciding.next_step import step_cost
from bagua_autotune.measuring.objective import OBJECTIVES
from bagua_autotune.model.job import RUNS, Job, Observation, Saved, Trial
from bagua_autotune.store.observations import Steps

OF_BAGUA = "The job belongs to /api/v1; only Bagua's own workers report to it."
OF_RUNS = "The job is a search of `bagua-autotune system`, which has no ranks that report."


class WrongStep(Exception):
    """A step does not have exactly one value of each rank, or a profile of each tensor."""


class OtherProtocol(Exception):
    """The job is one of a protocol whose ranks report in another way; says which."""


def check_protocol(job: Job) -> None:
    """Raise OtherProtocol if the job's ranks do not report like this."""
    if not OBJECTIVES[job.protocol].closes_itself:
        if job.protocol in RUNS:
            raise OtherProtocol(OF_RUNS)
        raise OtherProtocol(OF_BAGUA)


def weigh(observations: Sequence[Observation], job: Job, trial: Trial) -> list[float]:
    """What each of the steps cost; OtherProtocol or WrongStep if they cannot be the job's."""
    check_protocol(job)
    for observation in observations:
        for told in (observation.values, observation.compute):
            if told is not None and len(told) != job.world_size:
                raise WrongStep(
                    f"step {observation.step} has {len(told)} values, "
                    f"the world size is {job.world_size}"
                )
    return [step_cost(job, trial, observation) for observation in observations]


def saved_until(
    job: Job, step: int, step_seconds: float, observed: Collection[Steps]
) -> Saved | None:
    """What was saved since the job's steps were last counted; None if nothing is to be counted.
    Only confirmed gains count, and only steps that its ranks told of.

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
