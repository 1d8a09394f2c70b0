"""Observations: the step times that the ranks report for a trial."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    BindParameter,
    bindparam,
    case,
    column,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy import cast as sql_cast

from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.model.memory import Memory, fullest
from bagua_autotune.store import rows
from bagua_autotune.store.engine.database import Database, Run, Statement
from bagua_autotune.store.engine.tables import JobRow, ObservationRow, TrialRow
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.store.rows import TRIALS, check_job, the_row, trial_row

STEP = ("trial_id", "step", "values", "slowest", "cost", "compute", "complexity")
# The ranks go on with a closed trial until the next is chosen; those steps teach nothing new.
MOST_LATE_STEPS = 100
ALL = 2**31 - 1
OBSERVED = (
    ObservationRow.step,
    rows.as_text(ObservationRow.values),
    rows.as_text(ObservationRow.compute),
    ObservationRow.complexity,
)
JOB_ID: BindParameter[str] = bindparam("job_id")
TRIAL_ID: BindParameter[int] = bindparam("trial_id")
OF_TRIAL = (TrialRow.job_id == JOB_ID) & (TrialRow.index == bindparam("trial"))
# Writing the job's row locks it. A lost job keeps its last contact until it is resumed.
HEAR = Statement(
    update(JobRow)
    .where(JobRow.id == JOB_ID)
    .values(
        revision=JobRow.revision + 1,
        last_contact_at=case(
            (JobRow.ended_at > JobRow.last_contact_at, JobRow.last_contact_at),
            else_=bindparam("at"),
        ),
    )
    .returning(*rows.JOB_COLUMNS)
)
COSTS = select(ObservationRow.step, ObservationRow.cost, ObservationRow.complexity)
COSTS_OF_TRIAL = Statement(COSTS.where(ObservationRow.trial_id == TRIAL_ID))
COSTS_OF_INDEX = Statement(COSTS.join(TrialRow).where(OF_TRIAL).order_by(ObservationRow.step))
ADD_STEP = Statement(
    insert(ObservationRow).values({name: bindparam(f"of_{name}") for name in STEP})
)
# All steps of a report at once, as JSON; only PostgreSQL reads its numbers exactly.
TOLD = func.json_to_recordset(sql_cast(bindparam("steps"), JSON)).table_valued(
    *(column(name, ObservationRow.__table__.c[name].type) for name in STEP), name="told"
)
ADD_STEPS = Statement(
    insert(ObservationRow).from_select(STEP, select(*TOLD.render_derived(with_types=True).c))
)
OF_ID = update(TrialRow).where(TrialRow.id == TRIAL_ID)
LATE = Statement(OF_ID.values(late_steps=TrialRow.late_steps + bindparam("more")))
START = Statement(OF_ID.values(state="running", started_at=bindparam("at")))
MEMORY = Statement(OF_ID.values(memory=bindparam("told", type_=JSON)))
PLACE = TrialRow.index, ObservationRow.step
OBSERVATIONS = Statement(
    select(TrialRow.index, *OBSERVED)
    .join(ObservationRow)
    .where(
        TrialRow.job_id == JOB_ID,
        TrialRow.index <= bindparam("last"),
        tuple_(*PLACE) > tuple_(bindparam("trial"), bindparam("step")),
    )
    .order_by(*PLACE)
    .limit(bindparam("most"))
)
STEPS = Statement(
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
STEP_OF_TRIAL = Statement(
    select(TrialRow.id, TrialRow.state, rows.as_text(ObservationRow.values))
    .outerjoin(
        ObservationRow,
        (ObservationRow.trial_id == TrialRow.id) & (ObservationRow.step == bindparam("step")),
    )
    .where(OF_TRIAL)
)
SET_VALUES = Statement(
    update(ObservationRow)
    .where(ObservationRow.trial_id == TRIAL_ID, ObservationRow.step == bindparam("of_step"))
    .values(values=bindparam("told", type_=JSON))
)


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

        def add(run: Run) -> Reported:
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
            if told and not trial.is_open:
                run(LATE, trial_id=trial_id, more=len(told))
            elif told and trial.state == "proposed":
                run(START, trial_id=trial_id, at=at)
                trial = replace(trial, state="running", started_at=at)
            if memory is not None and (fuller := fullest([trial.memory, memory])) != trial.memory:
                run(MEMORY, trial_id=trial_id, told=fuller.model_dump_json() if fuller else None)
                trial = replace(trial, memory=fuller)
            trials[index] = trial
            costs.update((each.step, StepCost(cost, each.complexity)) for each, cost in told)
            in_order = [costs[step] for step in sorted(costs)]
            return Reported(job, trials, [each for each, _ in told], in_order)

        return self.database.transact(add)

    def _insert(self, run: Run, steps: list[dict[str, Any]]) -> None:
        if steps and not self.database.is_sqlite:
            run(ADD_STEPS, steps=json.dumps(steps))
            return
        for step in steps:
            compute = None if step["compute"] is None else json.dumps(step["compute"])
            told = {**step, "values": json.dumps(step["values"]), "compute": compute}
            run(ADD_STEP, **{f"of_{name}": value for name, value in told.items()})

    def add_value(
        self, job_id: str, index: int, step: int, rank: int, value: float, at: float
    ) -> bool:
        """Store one rank's value of one step of a trial. False if that rank's is there already."""

        def add(run: Run) -> bool:
            the_row(run(HEAR, job_id=job_id, at=at), job_id)
            found = run(STEP_OF_TRIAL, job_id=job_id, trial=index, step=step)
            if not found:
                raise UnknownTrial(index)
            trial_id, state, text = found[0]
            if state == "proposed":
                run(START, trial_id=trial_id, at=at)
            values = json.loads(text or "[]")
            values += [None] * (rank + 1 - len(values))
            if values[rank] is not None:
                return False
            values[rank] = value
            if text is None:
                new = _step_row(trial_id, Observation(step, tuple(values)), None)
                self._insert(run, [{**new, "slowest": None}])  # they are speeds
            else:
                run(SET_VALUES, trial_id=trial_id, of_step=step, told=json.dumps(values))
            return True

        return self.database.transact(add)

    def observations(
        self,
        job_id: str,
        index: int | None = None,
        after: tuple[int, int] | None = None,
        limit: int | None = None,
    ) -> list[tuple[int, Observation]]:
        """Pairs of trial index and observation, of one trial or all, in step order: all, or so many
        after this trial and step."""
        trial, step = max(after or (0, -1), (index or 0, -1))
        last, most = ALL if index is None else index, ALL if limit is None else limit
        behind = {"trial": trial, "step": step}
        found = self.database.ask(OBSERVATIONS, job_id=job_id, last=last, most=most, **behind)
        if not found:
            with self.database.reading() as session:
                check_job(session, job_id)
                if index is not None:
                    trial_row(session, job_id, index)
        return [(row[0], _observation(*row[1:])) for row in found]

    def observed_steps(self, job_id: str) -> dict[int, Steps]:
        """Return by trial index the observed steps; trials without any are left out."""
        found = self.database.ask(STEPS, job_id=job_id)
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
        found = self.database.ask(COSTS_OF_INDEX, job_id=job_id, trial=trial)
        return [StepCost(*cost) for _, *cost in found]

    def latest_observations(self, job_id: str, trial: int, count: int) -> list[Observation]:
        """The last steps of a trial, in step order."""
        query = select(*OBSERVED).join(TrialRow)
        query = query.where(TrialRow.job_id == job_id, TrialRow.index == trial)
        with self.database.reading() as session:
            found = session.execute(query.order_by(ObservationRow.step.desc()).limit(count)).all()
        return [_observation(*row) for row in reversed(found)]


def _observation(
    step: int, values: str, compute: str | None, complexity: float | None
) -> Observation:
    computed = None if compute is None else tuple(json.loads(compute))
    return Observation(step, tuple(json.loads(values)), computed, complexity)


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
