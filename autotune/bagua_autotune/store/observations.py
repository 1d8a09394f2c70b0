"""Observations: the step times that the ranks report for a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import JSON, bindparam, case, column, func, insert, select, tuple_, update
from sqlalchemy import cast as sql_cast

from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.model.received import Memory, fullest
from bagua_autotune.store import rows
from bagua_autotune.store.engine.database import Database, Run
from bagua_autotune.store.engine.tables import JobRow, ObservationRow, TrialRow
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.store.rows import OF_ID, OF_JOB, OF_TRIAL, TRIALS, the_row

STEP = ("trial_id", "step", "values", "slowest", "cost", "compute", "complexity")
# The ranks go on with a closed trial until the next is chosen; those steps teach nothing new.
MOST_LATE_STEPS = 100
OBSERVED = (
    *(ObservationRow.step, ObservationRow.values),
    *(ObservationRow.compute, ObservationRow.complexity),
)
# Writing the job's row locks it. A lost job keeps its last contact until it is resumed.
HEAR = (
    update(JobRow)
    .where(OF_ID)
    .values(
        revision=JobRow.revision + 1,
        last_contact_at=case(
            (JobRow.ended_at > JobRow.last_contact_at, JobRow.last_contact_at),
            else_=bindparam("at"),
        ),
    )
    .returning(*rows.JOB_COLUMNS)
)
OF_TRIAL_ID = ObservationRow.trial_id == bindparam("trial_id")
COSTS = select(ObservationRow.step, ObservationRow.cost, ObservationRow.complexity)
COSTS_OF_TRIAL = COSTS.where(OF_TRIAL_ID)
COSTS_OF_INDEX = COSTS.join(TrialRow).where(OF_TRIAL).order_by(ObservationRow.step)
# All steps of a report at once, as JSON; only PostgreSQL reads its numbers exactly.
TOLD = func.json_to_recordset(sql_cast(bindparam("steps", type_=JSON), JSON)).table_valued(
    *(column(name, ObservationRow.__table__.c[name].type) for name in STEP), name="told"
)
ADD_STEPS = insert(ObservationRow).from_select(
    STEP, select(*TOLD.render_derived(with_types=True).c)
)
PLACE = TrialRow.index, ObservationRow.step
OBSERVATIONS = (
    select(TrialRow.index, *OBSERVED)
    .join(ObservationRow)
    .where(
        OF_JOB,
        TrialRow.index <= bindparam("last"),
        tuple_(*PLACE) > tuple_(bindparam("trial"), bindparam("step")),
    )
    .order_by(*PLACE)
    .limit(bindparam("most"))
)
LATEST = (
    select(*OBSERVED)
    .join(TrialRow)
    .where(OF_TRIAL)
    .order_by(ObservationRow.step.desc())
    .limit(bindparam("most"))
)
SLOWEST = select(*PLACE, ObservationRow.slowest).join(ObservationRow).where(OF_JOB).order_by(*PLACE)
STEPS = (
    select(
        TrialRow.index,
        func.min(ObservationRow.step),
        func.max(ObservationRow.step),
        func.count(ObservationRow.step) + TrialRow.thinned_steps,
    )
    .join(ObservationRow)
    .where(OF_JOB)
    .group_by(TrialRow.id)
    .order_by(TrialRow.index)
)
STEP_OF_TRIAL = (
    select(TrialRow.id, TrialRow.state, ObservationRow.values)
    .outerjoin(
        ObservationRow,
        (ObservationRow.trial_id == TrialRow.id) & (ObservationRow.step == bindparam("step")),
    )
    .where(OF_TRIAL)
)
SET_VALUES = (
    update(ObservationRow)
    .where(OF_TRIAL_ID, ObservationRow.step == bindparam("of_step"))
    .values(values=bindparam("told", type_=ObservationRow.values.type))
)


@dataclass(frozen=True)
class Steps:
    """The first and the last step observed under a trial, and how many there are."""

    first: int
    last: int
    count: int


class SlowestTime(NamedTuple):
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


class StoredObservations:
    """Methods with an ``index`` raise UnknownJob if there is no such job and UnknownTrial if it has
    no such trial; the others then return nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
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
        with self._database.writing() as run:
            job = rows.job_record(the_row(run(HEAR, job_id=job_id, at=at), job_id))
            trial_rows = run(TRIALS, job_id=job_id)
            trials = [rows.trial_record(row[2:]) for row in trial_rows]
            if index >= len(trials):
                raise UnknownTrial(index)
            weighed = weigh(job, trials[index]) if weigh else [None] * len(observations)
            trial_id, trial = trial_rows[index].id, trials[index]
            known = run(COSTS_OF_TRIAL, trial_id=trial_id)
            costs = {step: StepCost(*cost) for step, *cost in known}
            told = [
                (each, cost)
                for each, cost in zip(observations, weighed, strict=True)
                if each.step not in costs and not _is_absence(job, each, at)
            ]
            if not trial.is_open:
                told = told[: max(0, MOST_LATE_STEPS - trial_rows[index].late_steps)]
            self._insert(run, [_step_row(trial_id, *each) for each in told])
            changes: dict[str, Any] = {}
            if told and not trial.is_open:
                changes["late_steps"] = trial_rows[index].late_steps + len(told)
            elif told and trial.state == "proposed":
                changes |= {"state": "running", "started_at": at}
                trial = replace(trial, state="running", started_at=at)
            if memory is not None and (fuller := fullest([trial.memory, memory])) != trial.memory:
                changes["memory"] = rows.as_column(fuller)
                trial = replace(trial, memory=fuller)
            if changes:
                rows.change_trial(run, job_id, index, **changes)
            trials[index] = trial
            costs.update((each.step, StepCost(cost, each.complexity)) for each, cost in told)
            in_order = [costs[step] for step in sorted(costs)]
            return Reported(job, trials, [each for each, _ in told], in_order)

    def _insert(self, run: Run, steps: list[dict[str, Any]]) -> None:
        if steps and not self._database.is_sqlite:
            run(ADD_STEPS, steps=steps)
            return
        for step in steps:
            rows.add(run, ObservationRow, **step)

    def add_value(
        self, job_id: str, index: int, step: int, rank: int, value: float, at: float
    ) -> bool:
        """Store one rank's value of one step of a trial. False if that rank's is there already."""
        with self._database.writing() as run:
            the_row(run(HEAR, job_id=job_id, at=at), job_id)
            found = run(STEP_OF_TRIAL, job_id=job_id, trial=index, step=step)
            if not found:
                raise UnknownTrial(index)
            trial_id, state, before = found[0]
            if state == "proposed":
                rows.change_trial(run, job_id, index, state="running", started_at=at)
            values = [*(before or ()), *[None] * (rank + 1 - len(before or ()))]
            if values[rank] is not None:
                return False
            values[rank] = value
            if before is None:
                new = _step_row(trial_id, Observation(step, tuple(values)), None)
                self._insert(run, [{**new, "slowest": None}])  # they are speeds
            else:
                run(SET_VALUES, trial_id=trial_id, of_step=step, told=values)
            return True

    def of(
        self,
        job_id: str,
        index: int | None = None,
        after: tuple[int, int] | None = None,
        limit: int | None = None,
    ) -> list[tuple[int, Observation]]:
        """Pairs of trial index and observation, of one trial or all, in step order: all, or so many
        after this trial and step."""
        trial, step = max(after or (0, -1), (index or 0, -1))
        last, most = (rows.ALL if each is None else each for each in (index, limit))
        behind = {"trial": trial, "step": step}
        found = self._database.read(OBSERVATIONS, job_id=job_id, last=last, most=most, **behind)
        if not found:
            rows.check(self._database.read, job_id, index)
        return [(row[0], _observation(*row[1:])) for row in found]

    def steps(self, job_id: str) -> dict[int, Steps]:
        """Return by trial index the observed steps; trials without any are left out."""
        found = self._database.read(STEPS, job_id=job_id)
        return {index: Steps(first, last, count) for index, first, last, count in found}

    def step_times(self, job_id: str) -> list[SlowestTime]:
        """All steps in step order; none of a v1 job, whose ranks report speeds."""
        found = self._database.read(SLOWEST, job_id=job_id)
        return [SlowestTime(*row) for row in found if row.slowest is not None]

    def step_costs(self, job_id: str, trial: int) -> list[StepCost]:
        """The cost of each step of a trial, in step order."""
        found = self._database.read(COSTS_OF_INDEX, job_id=job_id, trial=trial)
        return [StepCost(*cost) for _, *cost in found]

    def latest(self, job_id: str, trial: int, count: int) -> list[Observation]:
        """The last steps of a trial, in step order."""
        found = self._database.read(LATEST, job_id=job_id, trial=trial, most=count)
        return [_observation(*row) for row in reversed(found)]


def _observation(
    step: int, values: list[Any], compute: list[Any] | None, complexity: float | None
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


def _step_row(trial_id: int, found: Observation, cost: float | None) -> dict[str, Any]:
    """The columns of STEP."""
    slowest = max((value for value in found.values if value is not None), default=None)
    told = trial_id, found.step, found.values, slowest, cost, found.compute, found.complexity
    return dict(zip(STEP, told, strict=True))
