"""What is stored for Bagua's protocol: families of models (their state, their execution order,
their names), and the values of single ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from bagua_autotune.bagua.family import Family
from bagua_autotune.model.job import BEING_TUNED
from bagua_autotune.store import Store
from bagua_autotune.store.rows import locked_row, start, trial_row
from bagua_autotune.store.tables import AliasRow, FamilyRow, JobRow, ObservationRow


class UnknownFamily(Exception):
    """There is no family with this key."""


def register(store: Store, alias: str, key: str, new: Family) -> None:
    """Let the alias mean the family of this key, which is created as ``new`` if there is none."""
    try:
        with store.database.writing() as session:
            if session.get(FamilyRow, key) is None:
                session.add(FamilyRow(key=key, data=_column(new), ready_order=[]))
                session.flush()
            session.merge(AliasRow(alias=alias, family=key))
    except IntegrityError:  # another replica registered it at the same moment
        register(store, alias, key, new)


def resolve(store: Store, alias: str) -> str | None:
    """The key of the family that the alias means."""
    with store.database.reading() as session:
        row = session.get(AliasRow, alias)
        return row.family if row else None


def load(store: Store, key: str) -> tuple[Family, list[str]]:
    """A family and its ready order.

    Raises:
        UnknownFamily: there is none of this key.
    """
    with store.database.reading() as session:
        row = _row(session, key)
        return Family.model_validate(row.data), list(row.ready_order)


def update(store: Store, key: str, change: Callable[[Family], Family]) -> Family:
    """Replace a family by ``change`` of it, in one transaction.

    Raises:
        UnknownFamily: there is none of this key.
    """
    with store.database.writing() as session:
        row = _row(session, key, lock=True)
        changed = change(Family.model_validate(row.data))
        column = _column(changed)
        if column != row.data:
            row.data = column
        return changed


def extend_order(store: Store, key: str, names: Sequence[str]) -> None:
    """Append the names that a family's ready order does not hold yet."""
    with store.database.writing() as session:
        row = _row(session, key, lock=True)
        order = list(dict.fromkeys([*row.ready_order, *names]))
        if len(order) > len(row.ready_order):
            row.ready_order = order


def tuned(store: Store, since: float) -> dict[str, str]:
    """By family, one of its jobs, if it is still being tuned and has reported since then."""
    query = select(JobRow.data["family"].as_string(), JobRow.id).where(
        JobRow.protocol == "v1",
        JobRow.phase.in_(BEING_TUNED),
        JobRow.last_contact_at >= since,
    )
    with store.database.reading() as session:
        return dict(session.execute(query).all())


def put_value(
    store: Store, job_id: str, index: int, step: int, rank: int, value: float, at: float
) -> bool:
    """Store one rank's value of one step of a trial. False if that rank's is there already.

    Raises:
        UnknownTrial: the job has no such trial.
    """
    with store.database.writing() as session:
        locked_row(session, job_id).last_contact_at = at
        trial = trial_row(session, job_id, index)
        query = select(ObservationRow).where(
            ObservationRow.trial_id == trial.id, ObservationRow.step == step
        )
        row = session.scalar(query)
        if row is None:
            row = ObservationRow(trial_id=trial.id, step=step, values=[])
            session.add(row)
        values = [*row.values, *[None] * (rank + 1 - len(row.values))]
        if values[rank] is not None:
            return False
        values[rank] = value
        row.values = values  # a new list: SQLAlchemy does not see changes inside JSON
        start(trial, at)
        return True


def widen(store: Store, job_id: str, rank_count: int) -> None:
    """Note that the job has at least so many ranks, if no world size is known."""
    with store.database.writing() as session:
        row = locked_row(session, job_id)
        if row.spec["world_size"] < rank_count:
            row.spec = {**row.spec, "world_size": rank_count, "ranks_per_node": [rank_count]}


def _column(family: Family) -> dict[str, Any]:
    return family.model_dump(mode="json")


def _row(session: Session, key: str, lock: bool = False) -> FamilyRow:
    row = session.get(FamilyRow, key, with_for_update=lock)
    if row is None:
        raise UnknownFamily(key)
    return row
