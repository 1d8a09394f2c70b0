"""Trials: starting and closing them, and what follows, each in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagua_autotune.model.job import Result, Trial
from bagua_autotune.model.received import Memory
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import rows
from bagua_autotune.store.engine.database import Database, Run
from bagua_autotune.store.rows import TRIALS, locked


@dataclass(frozen=True)
class Move:
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


class StoredTrials:
    """Every method raises UnknownJob if there is no such job; those with an ``index`` raise
    UnknownTrial if the job has no such trial."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, job_id: str) -> list[Trial]:
        """All trials of the job, by index."""
        found = [rows.trial_record(row[2:]) for row in self._database.read(TRIALS, job_id=job_id)]
        if not found:
            rows.check(self._database.read, job_id)
        return found

    def get(self, job_id: str, index: int) -> Trial:
        return rows.the_trial(self._database.read, job_id, index)

    def start(self, job_id: str, index: int, at: float) -> None:
        """Note that the ranks run this trial now, if it is still proposed."""
        with locked(self._database, job_id) as (run, _):
            if rows.the_trial(run, job_id, index).state == "proposed":
                rows.change_trial(run, job_id, index, state="running", started_at=at)

    def advance(self, job_id: str, move: Move) -> bool:
        """Make a move that was decided on an earlier view of the job.

        Returns:
            False, with nothing changed, if the job has moved on since that view.
        """
        with locked(self._database, job_id) as (run, job):
            last = rows.last_trial(run, job_id)
            if job.is_over:
                return False
            if move.failure is not None and not (move.next_trial or move.result):
                # Its ranks may have been told what follows, which stands.
                return _give_up(run, job_id, move)
            open_index = last.index if last and last.is_open else None
            if open_index != (move.closes if move.leaves is None else move.leaves):
                return False
            expected = last.index + 1 if last else 0
            if move.next_trial and move.next_trial.index != expected:
                return False
            if last and move.closes is not None:
                _close(run, job_id, last.index, move)
            if move.next_trial:
                rows.add_trial(run, job_id, move.next_trial)
                is_confirmed = move.next_trial.purpose == "confirm"
                rows.change_job(run, job_id, phase="confirming" if is_confirmed else "tuning")
            if move.result:
                result = rows.result_column(move.result)
                finished = {"phase": "finished", "finished_at": move.at, "result": result}
                rows.change_job(run, job_id, **finished)
            return True

    def update_estimate(self, job_id: str, index: int, measured: Estimate) -> None:
        """Replace a measured trial's estimate after late data."""
        with locked(self._database, job_id) as (run, _):
            if rows.the_trial(run, job_id, index).state == "measured":
                rows.change_trial(run, job_id, index, **rows.estimate_columns(measured))

    def close_left(self, job_id: str, index: int, measured: Estimate, at: float) -> bool:
        """Close a trial that the ranks had left unmeasured; False if it was closed before."""
        with locked(self._database, job_id) as (run, _):
            if rows.the_trial(run, job_id, index).state != "running":
                return False
            _close(run, job_id, index, Move(at, index, measured))
            return True


def _give_up(run: Run, job_id: str, move: Move) -> bool:
    """Close what failed, even if it seemed to be measured; False if it was given up before."""
    failed = move.closes or 0
    if rows.the_trial(run, job_id, failed).is_given_up:
        return False
    for index in (failed, *move.alike):
        if rows.the_trial(run, job_id, index).is_given_up:
            continue
        in_which = "" if index == failed else f" (in trial {failed})"
        unmeasured = {"cost": None, "standard_error": None}
        _close(run, job_id, index, move, failure=f"{move.failure}{in_which}", **unmeasured)
    return True


def _close(run: Run, job_id: str, index: int, move: Move, **columns: Any) -> None:
    closed: dict[str, Any] = {"ended_at": move.at, "failure": move.failure, "state": "measured"}
    if move.failure is not None:
        closed["state"] = "infeasible" if move.is_infeasible else "failed"
    if move.memory is not None:
        closed["memory"] = rows.as_column(move.memory)
    if move.estimate is not None:
        closed |= rows.estimate_columns(move.estimate)
    rows.change_trial(run, job_id, index, **{**closed, **columns})
