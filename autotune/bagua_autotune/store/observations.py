"""Observations: the step times that the ranks report for a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import (
    BindParameter,
    Connection,
    bindparam,
    case,
    func,
    insert,
    select,
    tuple_,
    update,
)

from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.model.memory import Memory, fullest
from bagua_autotune.store import rows
from bagua_autotune.store.database import Database
from bagua_autotune.store.errors import UnknownJob, UnknownTrial
from bagua_autotune.store.rows import TRIALS, check_job, trial_row
from bagua_autotune.store.tables import JobRow, ObservationRow, TrialRow

# The ranks go on with a closed trial until the next is chosen; those steps teach nothing new.
MOST_LATE_STEPS = 100
OBSERVED = (ObservationRow.values, ObservationRow.compute, ObservationRow.complexity)
COST = (ObservationRow.cost, ObservationRow.complexity)
# Statements of every report, built once. Writing the job's row locks it. A lost job keeps its last
# contact until it is resumed.
HEAR = (
    update(JobRow)
    .where(JobRow.id == bindparam("of_job"))
    .values(
        revision=JobRow.revision + 1,
        last_contact_at=case(
            (JobRow.ended_at > JobRow.last_contact_at, JobRow.last_contact_at),
            else_=bindparam("at"),
        ),
    )
    .returning(*rows.JOB_COLUMNS)
)
KNOWN_COSTS = select(ObservationRow.step, *COST)
KNOWN_COSTS = KNOWN_COSTS.where(ObservationRow.trial_id == bindparam("trial_id"))
JOB_ID: BindParameter[str] = bindparam("job_id")
STEPS = (
    select(
        TrialRow.index,
        func.min(ObservationRow.step),
        func.max(ObservationRow.step),
        func.count(ObservationRow.step) + TrialRow.thinned_steps,
    )
    .join(ObservationRow)
    .where(TrialRow.job_id == JOB_ID)
    .group_by(TrialRow.id)
    .order_by(TrialRow.index)
)
LATEST_OBSERVATIONS = (
    select(ObservationRow.step, *OBSERVED)
    .where(
        ObservationRow.trial_id
        == select(TrialRow.id)
        .where(TrialRow.job_id == JOB_ID, TrialRow.index == bindparam("trial"))
        .scalar_subquery()
    )
    .order_by(ObservationRow.step.desc())
    .limit(bindparam("count"))
)
COSTS = (
    select(*COST)
    .join(TrialRow)
    .where(TrialRow.job_id == JOB_ID, TrialRow.index == bindparam("trial"))
    .order_by(ObservationRow.step)
)


class ObservationKey(NamedTuple):
    """Observations are listed in this order."""

    trial: int
    step: int


@dataclass(frozen=True)
class Steps:
    """The first and the last step observed under a trial, and how many there are."""

    first: int
    last: int
    count: int


class StepTime(NamedTuple):
    """A step of a trial with the slowest rank's value."""

    trial: int
    step: int
    slowest: float


class StepCost(NamedTuple):
    """What a step cost; None where it is not stored. And the complexity of its largest batch; None
    where it was not reported."""

    cost: float | None
    complexity: float | None = None


@dataclass(frozen=True)
class Reported:
    """A job after a report.

    Attributes:
        trials: all of the job.
        new: the steps that were not stored before.
        costs: of every step of the trial, in step order.
    """

    job: Job
    trials: list[Trial]
    new: list[Observation]
    costs: list[StepCost]


class Observations:
    """The part of the store that keeps observations.

    Methods with an ``index`` raise UnknownJob if there is no such job and UnknownTrial if it has no
    such trial; the others then return nothing.
    """

    database: Database

    def add_observations(
        self,
        job_id: str,
        index: int,
        observations: Sequence[Observation],
        at: float,
        weigh: Callable[[Job, Trial], Sequence[float | None]] | None = None,
        memory: Memory | None = None,
    ) -> Reported:
        """Store the steps that are new to the trial.

        Of steps that come after it was closed at most MOST_LATE_STEPS are stored, and never the
        step in which a lost job stood still. The trial counts as running from now on, unless the
        ranks have reported their switch to it before.

        Args:
            weigh: gives the cost of each observation, which is stored with it; if it raises,
                nothing is stored.
            memory: that the trial took so far; of all reports the fullest counts.
        """
        with self.database.writing() as session:
            connection = session.connection()
            job_row = connection.execute(HEAR, {"of_job": job_id, "at": at}).one_or_none()
            if job_row is None:
                raise UnknownJob(job_id)
            job = rows.job_record(job_row)
            trial_rows = connection.execute(TRIALS, {"job_id": job_id}).all()
            trials = [rows.trial_record(row[2:]) for row in trial_rows]
            if index >= len(trials):
                raise UnknownTrial(index)
            weighed = weigh(job, trials[index]) if weigh else [None] * len(observations)
            trial_id = trial_rows[index].id
            known = connection.execute(KNOWN_COSTS, {"trial_id": trial_id}).all()
            costs = {step: StepCost(*cost) for step, *cost in known}
            pairs = zip(observations, weighed, strict=True)
            told = [
                (each, cost)
                for each, cost in pairs
                if each.step not in costs and not _is_absence(job, each, at)
            ]
            if not trials[index].is_open:
                told = told[: max(0, MOST_LATE_STEPS - trial_rows[index].late_steps)]
                _count_late(connection, trial_id, len(told))
            new = [each for each, _ in told]
            if new:
                costs.update((each.step, StepCost(cost, each.complexity)) for each, cost in told)
                rows_of = [_observation_row(trial_id, *each) for each in told]
                connection.execute(insert(ObservationRow), rows_of)
                if trials[index].state == "proposed":
                    trials[index] = _start(connection, trial_id, trials[index], at)
            if memory is not None:
                trials[index] = _take_memory(connection, trial_id, trials[index], memory)
        return Reported(job, trials, new, [costs[step] for step in sorted(costs)])

    def add_value(
        self, job_id: str, index: int, step: int, rank: int, value: float, at: float
    ) -> bool:
        """Store one rank's value of one step of a trial. False if that rank's is there already."""
        with self.database.writing() as session:
            rows.locked_row(session, job_id).last_contact_at = at
            trial = trial_row(session, job_id, index)
            rows.start(trial, at)
            of_step = ObservationRow.trial_id == trial.id, ObservationRow.step == step
            known = session.scalar(select(ObservationRow.values).where(*of_step))
            values = [*(known or ()), *[None] * (rank + 1 - len(known or ()))]
            if values[rank] is not None:
                return False
            values[rank] = value
            if known is None:
                new = insert(ObservationRow).values(trial_id=trial.id, step=step, values=values)
                session.execute(new)
            else:
                session.execute(update(ObservationRow).where(*of_step).values(values=values))
            return True

    def observations(
        self,
        job_id: str,
        index: int | None = None,
        after: ObservationKey | None = None,
        limit: int | None = None,
    ) -> list[tuple[int, Observation]]:
        """Pairs of trial index and observation, of one trial or all, in step order: all, or so many
        after ``after``."""
        query = (
            select(TrialRow.index, ObservationRow.step, *OBSERVED)
            .join(ObservationRow, ObservationRow.trial_id == TrialRow.id)
            .where(TrialRow.job_id == job_id)
            .order_by(TrialRow.index, ObservationRow.step)
            .limit(limit)
        )
        if after is not None:
            query = query.where(tuple_(TrialRow.index, ObservationRow.step) > tuple_(*after))
        with self.database.reading() as session:
            check_job(session, job_id)
            if index is not None:
                query = query.where(TrialRow.id == trial_row(session, job_id, index).id)
            return [
                (trial, _observation(step, values, compute, complexity))
                for trial, step, values, compute, complexity in session.execute(query)
            ]

    def count_observations(self, job_id: str) -> int:
        """The number of observations of all trials; 0 if there is no such job."""
        query = select(func.count()).select_from(ObservationRow).join(TrialRow)
        with self.database.reading() as session:
            return session.scalar(query.where(TrialRow.job_id == job_id)) or 0

    def observed_steps(self, job_id: str) -> dict[int, Steps]:
        """Return by trial index the observed steps; trials without any are left out."""
        with self.database.reading() as session:
            found = session.connection().execute(STEPS, {"job_id": job_id}).all()
            return {index: Steps(first, last, count) for index, first, last, count in found}

    def step_times(self, job_id: str) -> list[StepTime]:
        """All steps in step order; none of a v1 job, whose ranks report speeds."""
        columns = (TrialRow.index, ObservationRow.step, ObservationRow.slowest)
        query = select(*columns).join(ObservationRow).where(TrialRow.job_id == job_id)
        with self.database.reading() as session:
            found = session.execute(query.order_by(TrialRow.index, ObservationRow.step))
            return [StepTime(trial, step, slow) for trial, step, slow in found if slow is not None]

    def step_costs(self, job_id: str, trial: int) -> list[StepCost]:
        """The cost of each step of a trial, in step order."""
        with self.database.reading() as session:
            given = {"job_id": job_id, "trial": trial}
            return [StepCost(*row) for row in session.connection().execute(COSTS, given)]

    def latest_observations(self, job_id: str, trial: int, count: int) -> list[Observation]:
        """The last steps of a trial, in step order."""
        given = {"job_id": job_id, "trial": trial, "count": count}
        with self.database.reading() as session:
            found = session.connection().execute(LATEST_OBSERVATIONS, given).all()
            return [_observation(*row) for row in reversed(found)]


def _observation(
    step: int,
    values: list[float | None],
    compute: list[float | None] | None,
    complexity: float | None,
) -> Observation:
    computed = None if compute is None else tuple(compute)
    return Observation(step, tuple(values), computed, complexity)


def _is_absence(job: Job, told: Observation, at: float) -> bool:
    """Whether this is the step in which a lost job stood still: it measures nothing."""
    silent_seconds = at - job.last_contact_at
    return (
        job.is_lost
        and job.protocol == "v2"  # others report speeds
        and max(value or 0.0 for value in told.values) > silent_seconds / 2
    )


def _count_late(connection: Connection, trial_id: int, steps: int) -> None:
    if steps:
        late = TrialRow.late_steps + steps
        connection.execute(update(TrialRow).where(TrialRow.id == trial_id).values(late_steps=late))


def _start(connection: Connection, trial_id: int, trial: Trial, at: float) -> Trial:
    statement = update(TrialRow).where(TrialRow.id == trial_id)
    connection.execute(statement.values(state="running", started_at=at))
    return replace(trial, state="running", started_at=at)


def _take_memory(connection: Connection, trial_id: int, trial: Trial, told: Memory) -> Trial:
    memory = fullest([trial.memory, told])
    if memory is trial.memory:
        return trial
    statement = update(TrialRow).where(TrialRow.id == trial_id)
    connection.execute(statement.values(memory=rows.memory_column(memory)))
    return replace(trial, memory=memory)


def _observation_row(trial_id: int, found: Observation, cost: float | None) -> dict[str, Any]:
    told = [value for value in found.values if value is not None]
    return {
        "trial_id": trial_id,
        "step": found.step,
        "values": list(found.values),
        "slowest": max(told, default=None),
        "cost": cost,
        "compute": list(found.compute) if found.compute is not None else None,
        "complexity": found.complexity,
    }
