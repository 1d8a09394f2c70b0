"""The tables; no objects are made of their classes, which only name the columns and their types.

Times are seconds since the epoch.  Whoever changes a table raises ``SCHEMA_VERSION`` and adds what
leads there to ``revisions``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = 1
# SQLite numbers rows by itself only in a column of type INTEGER.
RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    type_annotation_map: ClassVar = {
        str: Text,
        float: Float(53),
        int: BigInteger,
        dict[str, Any]: JSON,
    }


class SchemaRow(Base):
    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_by_name", "name", "created_at"),
        # All columns of a contact, newest first: a list reads every job, and SQLite's rows hold the
        # tensors, too.
        Index(
            "jobs_by_creation",
            *("created_at", "id", "name", "phase", "revision", "last_contact_at", "ended_at"),
        ).ddl_if(dialect="sqlite"),
        # PostgreSQL keeps tensors outside the rows. A change of an indexed column makes it write to
        # all indices, so columns that every report changes stay out.
        Index("jobs_by_creation", "created_at", "id").ddl_if(dialect="postgresql"),
    )

    # The long column last: SQLite reads a row up to the last column that it needs.
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str]
    protocol: Mapped[str] = mapped_column(String(8))
    phase: Mapped[str] = mapped_column(String(16))
    # How often the job was written (see rows.lock).
    revision: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[float]
    last_contact_at: Mapped[float]
    ended_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    round: Mapped[int] = mapped_column(server_default="0")
    # Equal keys mark similar jobs; an empty key equals none.
    fingerprint: Mapped[str] = mapped_column(server_default="", index=True)
    model_key: Mapped[str] = mapped_column(server_default="", index=True)
    network_key: Mapped[str] = mapped_column(server_default="", index=True)
    # JobSpec without its tensors.
    spec: Mapped[dict[str, Any]]
    data: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    inherited: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Up to 100,000 of them, needed only when candidates are enumerated.
    tensors: Mapped[list[Any]] = mapped_column(JSON, server_default="[]")


class TrialRow(Base):
    __tablename__ = "trials"
    # Unique: of two replicas that propose the next trial one fails and reads again.
    __table_args__ = (Unique("job_id", "index"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    index: Mapped[int]
    purpose: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    configuration: Mapped[dict[str, Any]]
    cost: Mapped[float | None]
    # NULL for a trial measured by a single observation: its error is not known.
    standard_error: Mapped[float | None]
    steps: Mapped[int]
    outliers: Mapped[int]
    failure: Mapped[str | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    round: Mapped[int] = mapped_column(server_default="0")
    # Numbers of its observations that came after it was closed, and that were deleted since.
    late_steps: Mapped[int] = mapped_column(server_default="0")
    thinned_steps: Mapped[int] = mapped_column(server_default="0")
    # A model.received.Memory, where the ranks told any.
    memory: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class ObservationRow(Base):
    __tablename__ = "observations"
    __table_args__ = (Unique("trial_id", "step"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id", ondelete="CASCADE"))
    step: Mapped[int]
    # Of a v2 job the slowest rank's value: a thousand ranks' need not be read to draw a line.
    slowest: Mapped[float | None]
    # As the job's objective has it, for what decides; NULL of Bagua's protocol.
    cost: Mapped[float | None]
    values: Mapped[list[float | None]] = mapped_column(JSON)
    # The ranks' computing seconds, where they reported them.
    compute: Mapped[list[float | None] | None] = mapped_column(JSON(none_as_null=True))
    # Of the largest batch of a rank, where they reported it.
    complexity: Mapped[float | None]


class ProfileRow(Base):
    __tablename__ = "profiles"
    __table_args__ = (Unique("trial_id", "step"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id", ondelete="CASCADE"))
    step: Mapped[int]
    # A bagua_wire.profile.Profile.
    content: Mapped[dict[str, Any]]


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (Index("events_by_key", "job_id", "key", unique=True),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    trial: Mapped[int | None]
    step: Mapped[int | None]
    message: Mapped[str]
    seconds: Mapped[float | None]
    at: Mapped[float]
    # By which an event is known that is sent again; NULL is like nothing (see events).
    key: Mapped[str | None] = mapped_column(String(64))


class ClaimRow(Base):
    """Which replica decides what follows in a job, and until when (see Claims)."""

    __tablename__ = "claims"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    owner: Mapped[str] = mapped_column(String(32))
    until: Mapped[float]


class LifeRow(Base):
    """The job of a later life of a training that was started again (see StoredLives)."""

    __tablename__ = "lives"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    # Both are older, so they may be deleted already.
    previous: Mapped[str] = mapped_column(String(64), unique=True)
    first: Mapped[str] = mapped_column(String(64), index=True)
    # The first life is number 1 and has no row.
    number: Mapped[int]


class FamilyRow(Base):
    """What is kept of the models of Bagua's protocol that look alike (see bagua_v1.family)."""

    __tablename__ = "families"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    data: Mapped[dict[str, Any]]
    # Names of tensors in the order in which their gradients became ready.
    ready_order: Mapped[list[Any]] = mapped_column(JSON)
    # Raised by whatever changes the row: replicas remember it.
    revision: Mapped[int] = mapped_column(server_default="0")


class ChoreRow(Base):
    """What the service does from time to time: when next, and how far it has got."""

    __tablename__ = "chores"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    due_at: Mapped[float]
    done_until: Mapped[float]


class AliasRow(Base):
    """A name that ranks use for a family's models (Bagua's names differ by process)."""

    __tablename__ = "aliases"

    alias: Mapped[str] = mapped_column(primary_key=True)
    family: Mapped[str] = mapped_column(ForeignKey("families.key", ondelete="CASCADE"))
