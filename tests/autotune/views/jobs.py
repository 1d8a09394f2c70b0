"""Jobs to look at: tuned for real by simulated ranks, or made up of a few records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bagua_autotune.measuring.rounds import Ceiling, Round
from bagua_autotune.model.job import Job, Observation, Result, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.observations import Steps
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.reading import Reading
from bagua_wire.configuration import Configuration
from tests.autotune.support import MIB, Ranks, make_spec

SPEC = make_spec()
DEFAULT = Configuration(SPEC.default_configuration)
FASTER = Configuration(bucket_bytes=MIB, hierarchical="leaders")
SLOWER = Configuration(bucket_bytes=64 * MIB, hierarchical="off")
# Computing hides all but 57 of the default's 921 ms.
HIDDEN = Ceiling(seconds=0.921, exposed_seconds=0.057, gain=math.log(921 / (921 - 57)))
RESULT = Result(FASTER, "winner", 1.56, 1.51, 1.6, 9, 90, 30.0, "", payback_steps=7)


def run(tuner: Tuner, ranks: Ranks, job_id: str = "job", trials: int = 100) -> None:
    """Register the job if need be, and run what it is told until so many trials are open."""
    tuner.register(job_id, SPEC)
    while (trial := tuner.open_trial(job_id)) and trial.index < trials:
        found = [
            Observation(step, tuple(seconds), tuple(0.8 * value for value in seconds))
            for step, seconds in ranks.run(trial.configuration, 10)
        ]
        tuner.observe(job_id, trial.index, found)


def trial(
    index: int,
    configuration: Configuration,
    seconds: float | None = None,
    *,
    round: int = 0,
    purpose: str = "search",
    count: int = 9,
) -> Trial:
    """Measured, or open without ``seconds``."""
    found = Estimate(math.log(seconds), 0.004, count) if seconds else None
    state = "measured" if found else "running"
    return Trial(index, purpose, configuration, state, found, started_at=5.0, round=round)  # type: ignore[arg-type]


def job(phase: str = "tuning", result: Result | None = None, round: int = 0) -> Job:
    return Job(
        id="job",
        name="digits",
        protocol="v2",
        phase=phase,  # type: ignore[arg-type]
        world_size=4,
        ranks_per_node=(2, 2),
        space=SPEC.knobs,
        baseline=DEFAULT,
        fingerprint="f",
        limits=SPEC.limits,
        software={},
        created_at=5.0,
        last_contact_at=45.0,
        finished_at=40.0 if phase == "finished" else None,
        result=result,
        round=round,
    )


def reading(
    of: Job,
    trials: Sequence[Trial] = (),
    latest: Sequence[Observation] = (),
    ceiling: Ceiling | None = None,
) -> Reading:
    """Ten steps of each trial."""
    steps = {found.index: Steps(10 * found.index, 10 * found.index + 9, 10) for found in trials}
    ceilings = {Round.shown(of, trials).number: ceiling}
    return Reading(of, trials, steps, {}, latest, ceilings=ceilings)
