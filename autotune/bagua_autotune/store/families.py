"""Families: models of Bagua's protocol that look alike (see bagua.family), and the names that
ranks use for them. What is known of a family is the protocol's own; here it is JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from bagua_autotune.model.job import BEING_TUNED
from bagua_autotune.store.database import Database
from bagua_autotune.store.errors import UnknownFamily
from bagua_autotune.store.tables import AliasRow, FamilyRow, JobRow

Content = dict[str, Any]


class Families:
    """The part of the store that keeps families.

    Methods that read or change one raise UnknownFamily if there is none of this key.
    """

    database: Database

    def add_family(self, alias: str, key: str, content: Content) -> None:
        """Bind the alias to the family of this key, which is created if there is none."""
        named = update(AliasRow).where(AliasRow.alias == alias).values(family=key)
        try:
            with self.database.writing() as session:
                if session.scalar(select(FamilyRow.key).where(FamilyRow.key == key)) is None:
                    new = insert(FamilyRow).values(key=key, data=content, ready_order=[])
                    session.execute(new)
                if session.scalar(named.returning(AliasRow.alias)) is None:
                    session.execute(insert(AliasRow).values(alias=alias, family=key))
        except IntegrityError:  # another replica registered it at the same moment
            self.add_family(alias, key, content)

    def family_of(self, alias: str) -> str | None:
        """The key of the family that the alias means."""
        with self.database.reading() as session:
            return session.scalar(select(AliasRow.family).where(AliasRow.alias == alias))

    def family(self, key: str) -> tuple[Content, list[str]]:
        """What is known of a family, and its ready order."""
        with self.database.reading() as session:
            return _read(session, key)

    def change_family(self, key: str, change: Callable[[Content], Content]) -> Content:
        """Replace what is known of a family by ``change`` of it, in one transaction; what that
        is."""
        with self.database.writing() as session:
            before, _ = _read(session, key, lock=True)
            changed = change(before)
            if changed != before:
                session.execute(_update(key).values(data=changed))
            return changed

    def extend_order(self, key: str, names: Sequence[str]) -> None:
        """Append the names that a family's ready order does not hold yet."""
        with self.database.writing() as session:
            _, known = _read(session, key, lock=True)
            order = list(dict.fromkeys([*known, *names]))
            if len(order) > len(known):
                session.execute(_update(key).values(ready_order=order))

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


def _update(key: str) -> Any:
    return update(FamilyRow).where(FamilyRow.key == key)


def _read(session: Session, key: str, lock: bool = False) -> tuple[Content, list[str]]:
    query = select(FamilyRow.data, FamilyRow.ready_order).where(FamilyRow.key == key)
    row = session.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise UnknownFamily(key)
    return row.data, row.ready_order
