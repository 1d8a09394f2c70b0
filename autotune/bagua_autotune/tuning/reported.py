"""What the ranks report, checked against the job."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_autotune.deciding.next_step import step_cost
from bagua_autotune.measuring.objective import OBJECTIVES
from bagua_autotune.model.job import RUNS, Job, Observation, Trial

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
