"""Trials: starting and closing them, and what follows, each in one transaction."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from bagua_autotune.model.job import GIVEN_UP, OVER, Result, Trial
from bagua_autotune.model.memory import Memory
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import rows
from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import TrialRow
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.store.rows import TRIALS, check_job, last_trial_row, locked, trial_row


@dataclass(frozen=True)
class Step:
    """One move of a job: its open trial, if there is one, closes, and something follows.

    Exactly one of ``estimate`` and ``failure`` is set when a trial closes, and one of
    ``next_trial`` and ``result`` follows, or neither if that is decided later. ``is_infeasible``:
    its failure is that it does not fit in the ranks' memory; ``memory`` is what it would take, if
    they told. ``leaves``: the trial that runs and stays unmeasured while its ranks go on to the
    next one. ``alike``: further trials that failed with the one that closes.
    """

    at: float
    closes: int | None = None
    estimate: Estimate | None = None
    failure: str | None = None
    next_trial: Trial | None = None
    result: Result | None = None
    is_infeasible: bool = False
    memory: Memory | None = None
    leaves: int | None = None
    alike: tuple[int, ...] = ()


class Trials:
    """The part of the store that keeps trials.

    Every method raises UnknownJob if there is no such job; those with an ``index`` raise
    UnknownTrial if the job has no such trial.
    """

    database: Database

    def trials(self, job_id: str) -> list[Trial]:
        """All trials of the job, by index."""
        found = [rows.trial_record(row[2:]) for row in self.database.ask(TRIALS, job_id=job_id)]
        if not found:
            with self.database.reading() as session:
                check_job(session, job_id)
        return found

    def trial(self, job_id: str, index: int) -> Trial:
        trials = self.trials(job_id)
        if index >= len(trials):
            raise UnknownTrial(index)
        return trials[index]

    def start_trial(self, job_id: str, index: int, at: float) -> None:
        """Note that the ranks run this trial now, if it is still proposed."""
        with locked(self.database, job_id) as (session, _):
            row = trial_row(session, job_id, index)
            if row.state == "proposed":
                row.state, row.started_at = "running", at

    def advance(self, job_id: str, step: Step) -> bool:
        """Make a move that was decided on an earlier view of the job.

        Returns:
            False, with nothing changed, if the job has moved on since that view.
        """
        with locked(self.database, job_id) as (session, row):
            last = last_trial_row(session, job_id)
            if row.phase in OVER:
                return False
            if step.failure is not None and not (step.next_trial or step.result):
                # Its ranks may have been told what follows, which stands.
                return _give_up(session, job_id, step)
            open_index = last.index if last and last.state in ("proposed", "running") else None
            if open_index != (step.closes if step.leaves is None else step.leaves):
                return False
            expected = last.index + 1 if last else 0
            if step.next_trial and step.next_trial.index != expected:
                return False
            if last and step.closes is not None:
                _close(last, step)
            if step.next_trial:
                session.add(rows.new_trial_row(job_id, step.next_trial))
                row.phase = "confirming" if step.next_trial.purpose == "confirm" else "tuning"
            if step.result:
                row.phase, row.finished_at = "finished", step.at
                row.result = rows.result_column(step.result)
            return True

    def update_estimate(self, job_id: str, index: int, measured: Estimate) -> None:
        """Replace a measured trial's estimate after late data."""
        with locked(self.database, job_id) as (session, _):
            row = trial_row(session, job_id, index)
            if row.state == "measured":
                rows.write_estimate(row, measured)

    def close_left(self, job_id: str, index: int, measured: Estimate, at: float) -> bool:
        """Close a trial that the ranks had left unmeasured; False if it was closed before."""
        with locked(self.database, job_id) as (session, _):
            return _close_left(trial_row(session, job_id, index), Step(at, index, measured))


def _give_up(session: Session, job_id: str, step: Step) -> bool:
    """Close what failed, even if it seemed to be measured; False if it was given up before."""
    if trial_row(session, job_id, step.closes or 0).state in GIVEN_UP:
        return False
    for index in (step.closes or 0, *step.alike):
        row = trial_row(session, job_id, index)
        if row.state in GIVEN_UP:
            continue
        row.cost = row.standard_error = None
        _close(row, step)
        if index != step.closes:
            row.failure = f"{step.failure} (in trial {step.closes})"
    return True


def _close_left(row: TrialRow, step: Step) -> bool:
    if row.state != "running":
        return False
    _close(row, step)
    return True


def _close(row: TrialRow, step: Step) -> None:
    row.ended_at = step.at
    row.failure = step.failure
    row.state = "measured"
    if step.failure is not None:
        row.state = "infeasible" if step.is_infeasible else "failed"
    if step.memory is not None:
        row.memory = rows.as_column(step.memory)
    if step.estimate is not None:
        rows.write_estimate(row, step.estimate)
