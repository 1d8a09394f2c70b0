"""Families: models of Bagua's protocol that look alike (see bagua_v1.family), and the names that
ranks use for them. What is known of a family is the protocol's own; here it is JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import JSON, Dialect, TypeDecorator, bindparam, delete, exists, select, update
from sqlalchemy.dialects.postgresql import insert  # its ON CONFLICT is SQLite's, too

from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import AliasRow, FamilyRow, JobRow
from bagua_autotune.store.rows import OF_ID, add_new, as_text
from bagua_wire.messages import BEING_TUNED


class JsonText(TypeDecorator[str]):
    """JSON that is given as text."""

    impl, cache_ok = JSON, True

    def bind_processor(self, dialect: Dialect) -> None:
        return None


class StoredFamily(NamedTuple):
    """A family's row; what is known of it, and its ready order, are JSON."""

    key: str
    revision: int
    data: str
    ready_order: str


class Heard(NamedTuple):
    """Of a family's job, if it is stored: its version, and when it was last heard of."""

    created_at: float | None
    revision: int | None
    last_contact_at: float | None


NAMING = insert(AliasRow).values(alias=bindparam("alias"), family=bindparam("family"))
NAME = NAMING.on_conflict_do_update(
    index_elements=["alias"], set_={"family": NAMING.excluded.family}
)
FAMILY = FamilyRow.key, FamilyRow.revision, as_text(FamilyRow.data), as_text(FamilyRow.ready_order)
BY_ALIAS = select(*FAMILY).join(AliasRow).where(AliasRow.alias == bindparam("alias"))
NAMED = exists().where(AliasRow.alias == bindparam("alias"), AliasRow.family == FamilyRow.key)
REPLACE = (
    update(FamilyRow)
    .where(FamilyRow.key == bindparam("of_key"), FamilyRow.revision == bindparam("known"), NAMED)
    .values(data=bindparam("content", type_=JsonText), revision=FamilyRow.revision + 1)
    .returning(
        *(
            select(getattr(JobRow, name)).where(OF_ID).scalar_subquery().label(f"job_{name}")
            for name in Heard._fields
        )
    )
)
OF_BAGUA, FAMILY_OF_JOB = JobRow.protocol == "v1", JobRow.data["family"].as_string()
TUNED = select(FAMILY_OF_JOB, JobRow.id).where(OF_BAGUA, JobRow.phase.in_(BEING_TUNED))
FORGET = delete(FamilyRow).where(FamilyRow.key.not_in(select(FAMILY_OF_JOB).where(OF_BAGUA)))


class StoredFamilies:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, alias: str, key: str, content: Any) -> None:
        """Bind the alias to the family of this key, which is created if there is none."""
        with self._database.writing() as run:
            add_new(run, FamilyRow, key=key, data=content, ready_order=[])
            run(NAME, alias=alias, family=key)

    def named(self, alias: str) -> StoredFamily | None:
        """The family that the alias means."""
        found = self._database.read(BY_ALIAS, alias=alias)
        return StoredFamily(*found[0]) if found else None

    def replace(
        self, alias: str, key: str, revision: int, content: str, job_id: str
    ) -> Heard | None:
        """Replace what is known of a family, whose revision rises by one, if it still has this
        revision and the alias still means it.

        Returns:
            What is stored of the job; None, with nothing changed, if something else came first.
        """
        found = self._database.write(
            REPLACE, alias=alias, of_key=key, known=revision, content=content, job_id=job_id
        )
        return Heard(*found[0]) if found else None

    def extend_order(self, key: str, names: Sequence[str]) -> None:
        """Append the names that a family's ready order does not hold yet."""
        is_it = FamilyRow.key == key
        with self._database.writing() as run:
            found = run(select(FamilyRow.ready_order).where(is_it).with_for_update())
            for (before,) in found:  # none, if it was deleted meanwhile
                order = list(dict.fromkeys([*before, *names]))
                if len(order) > len(before):
                    later = update(FamilyRow).where(is_it).values(ready_order=order)
                    run(later.values(revision=FamilyRow.revision + 1))

    def being_tuned(self, since: float) -> dict[str, str]:
        """Return by family one of its jobs that is being tuned and has reported since then."""
        return dict(self._database.read(TUNED.where(JobRow.last_contact_at >= since)))

    def forget(self) -> None:
        """Delete the families of which no job is left, with their names."""
        self._database.write(FORGET)
