"""Families: models of Bagua's protocol that look alike (see bagua_v1.family), and the names that
ranks use for them. What is known of a family is the protocol's own; here it is JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, exists, select, text, update

from bagua_autotune.store.engine.database import Database, Statement
from bagua_autotune.store.engine.tables import AliasRow, FamilyRow, JobRow
from bagua_autotune.store.rows import as_text
from bagua_wire.messages import BEING_TUNED


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


ADD = text(
    "INSERT INTO families (key, data, ready_order) VALUES (:key, :data, '[]') "
    "ON CONFLICT DO NOTHING"
)
NAME = text(
    "INSERT INTO aliases (alias, family) VALUES (:alias, :key) "
    "ON CONFLICT (alias) DO UPDATE SET family = excluded.family"
)
FAMILY = FamilyRow.key, FamilyRow.revision, as_text(FamilyRow.data), as_text(FamilyRow.ready_order)
BY_ALIAS = Statement(select(*FAMILY).join(AliasRow).where(AliasRow.alias == bindparam("alias")))
NAMED = exists().where(AliasRow.alias == bindparam("alias"), AliasRow.family == FamilyRow.key)
OF_JOB = JobRow.id == bindparam("job_id")
REPLACE = Statement(
    update(FamilyRow)
    .where(FamilyRow.key == bindparam("of_key"), FamilyRow.revision == bindparam("known"), NAMED)
    .values(data=bindparam("content", type_=FamilyRow.data.type), revision=FamilyRow.revision + 1)
    .returning(
        *(
            select(getattr(JobRow, name)).where(OF_JOB).scalar_subquery().label(f"job_{name}")
            for name in Heard._fields
        )
    )
)


class Families:
    """The part of the store that keeps families."""

    database: Database

    def add_family(self, alias: str, key: str, content: Any) -> None:
        """Bind the alias to the family of this key, which is created if there is none."""
        with self.database.writing() as session:
            session.execute(ADD, {"key": key, "data": json.dumps(content)})
            session.execute(NAME, {"alias": alias, "key": key})

    def family_of(self, alias: str) -> StoredFamily | None:
        """The family that the alias means."""
        found = self.database.ask(BY_ALIAS, alias=alias)
        return StoredFamily(*found[0]) if found else None

    def replace_family(
        self, alias: str, key: str, revision: int, content: str, job_id: str
    ) -> Heard | None:
        """Replace what is known of a family, whose revision rises by one, if it still has this
        revision and the alias still means it.

        Returns:
            What is stored of the job; None, with nothing changed, if something else came first.
        """
        found = self.database.tell(
            REPLACE, alias=alias, of_key=key, known=revision, content=content, job_id=job_id
        )
        return Heard(*found[0]) if found else None

    def extend_order(self, key: str, names: Sequence[str]) -> None:
        """Append the names that a family's ready order does not hold yet."""
        query = select(FamilyRow).where(FamilyRow.key == key).with_for_update()
        with self.database.writing() as session:
            row = session.scalar(query)
            if row is None:  # deleted meanwhile
                return
            order = list(dict.fromkeys([*row.ready_order, *names]))
            if len(order) > len(row.ready_order):
                row.ready_order, row.revision = order, row.revision + 1

    def families_being_tuned(self, since: float) -> dict[str, str]:
        """Return by family one of its jobs that is being tuned and has reported since then."""
        query = select(JobRow.data["family"].as_string(), JobRow.id).where(
            JobRow.protocol == "v1",
            JobRow.phase.in_(BEING_TUNED),
            JobRow.last_contact_at >= since,
        )
        with self.database.reading() as session:
            return {row[0]: row[1] for row in session.execute(query)}

    def forget_families(self) -> None:
        """Delete the families of which no job is left, with their names."""
        left = select(JobRow.data["family"].as_string()).where(JobRow.protocol == "v1")
        with self.database.writing() as session:
            session.execute(delete(FamilyRow).where(FamilyRow.key.not_in(left)))
