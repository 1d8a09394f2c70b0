"""Whether the store has everything that was acknowledged, and is whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select

from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from bagua_autotune.store.maintenance.checkup import examine
from bagua_autotune.store.observations import MOST_LATE_STEPS

from .proxy import Report


@dataclass(frozen=True)
class Books:
    """What was found once all was over.

    Attributes:
        acknowledged: steps and events whose client was told that they were taken.
        lost: those of them that are not in the store, in words.
        damage: the faults that ``bagua-autotune doctor`` finds.
    """

    acknowledged: int
    lost: list[str]
    damage: list[str]


def audit(url: str, reports: Iterable[Report]) -> Books:
    """Compare what was acknowledged with what is in the store; the service has ended."""
    store = Store(url)
    damage = [finding.words for finding in examine(store) if finding.is_fault]
    # A closed trial takes so many late steps; the rest is dropped on purpose.
    query = select(TrialRow.job_id, TrialRow.index).where(TrialRow.late_steps >= MOST_LATE_STEPS)
    with store.database.reading() as session:
        full = {tuple(row) for row in session.execute(query)}
    found: dict[str, set[object]] = {}
    acknowledged, lost = 0, []
    for report in reports:
        if report.job_id not in found:
            found[report.job_id] = _told_of(store, report.job_id)
        is_full = report.kind != "events" and (report.job_id, report.body["trial"]) in full
        for item in _items(report):
            acknowledged += 1
            if item not in found[report.job_id] and not is_full:
                lost.append(f"{report.job_id}: {item}")
    store.close()
    return Books(acknowledged, sorted(set(lost)), damage)


def _items(report: Report) -> list[object]:
    """Each step by its trial and times, each event by what it says."""
    body = report.body
    if report.kind == "events":
        return [(body["kind"], body["trial"], body["step"])]
    return [(body["trial"], step["step"], tuple(step["seconds"])) for step in body["steps"]]


def _told_of(store: Store, job_id: str) -> set[object]:
    steps = {(trial, step.step, step.values) for trial, step in store.observations(job_id)}
    return {*steps, *((event.kind, event.trial, event.step) for event in store.events(job_id))}
