"""What client and service tell each other of a job as it goes: how far it is, what happened to its
ranks, and that its training lives."""

from __future__ import annotations

from typing import Literal

JobPhase = Literal["tuning", "confirming", "finished", "ended", "lost"]
BEING_TUNED: tuple[JobPhase, ...] = ("tuning", "confirming")
"""There is a next trial, even if the service is still choosing it."""
ToldKind = Literal["switched", "disagreement", "diverged", "infeasible", "ended", "note", "drift"]
"""Kinds of events that ranks tell; that a job is lost, only the service can."""
GIVING_UP: tuple[ToldKind, ...] = ("diverged", "infeasible")
"""What was in force is in force no more: the ranks are at the default."""
VOIDING: tuple[ToldKind, ...] = ("disagreement", *GIVING_UP)
"""No command of before holds."""
DISAGREED = "the ranks disagreed too often"
RENEWAL_SECONDS = 45.0
"""So often the client says that its training lives, also while it has nothing else to say: the page
warns of a minute's silence."""
LEASE_SECONDS = 300.0
"""So long after its last word a job is lost: one such request may take two minutes, and the pause
before it another."""
