"""The jobs' part of ``/metrics``: each job's text is made once per revision, and kept.

A scrape reads one short row of each job that was heard of lately; what did not change since the
last scrape is not read again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua_autotune.metrics import contact_families, job_families, text, view
from bagua_autotune.metrics.steps import StepHistograms
from bagua_autotune.store import contacts, read_each
from bagua_autotune.store.contacts import Contact
from bagua_autotune.tuning.tuner import Tuner

# How long a job is shown: after its end; after its last word while it is being tuned; and after
# its last word once it is tuned, from when on it says nothing.
ENDED_SECONDS = 900.0
SILENT_SECONDS = 3600.0
TUNED_SECONDS = 24 * 3600.0
# A scrape makes texts for so long; what is left is shown as it was, and comes first next time.
# Jobs that have no text yet are given more: after a start all of them have none.
CHANGED_BUDGET_SECONDS = 0.1
NEW_BUDGET_SECONDS = 2.0


@dataclass(frozen=True)
class _Made:
    """A job's samples by family, and of what they were made; none if it cannot be read."""

    version: tuple[int, int]
    pieces: Sequence[bytes]
    at: float


class Jobs:
    """The jobs of a store as text. Thread-safe.

    Args:
        clock: seconds since the epoch.
        stopwatch: seconds, for the budgets.
    """

    def __init__(
        self,
        tuner: Tuner,
        steps: StepHistograms,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tuner = tuner
        self._steps = steps
        self._clock = clock
        self._stopwatch = stopwatch
        self._made: dict[str, _Made] = {}
        self._one_scrape = threading.Lock()

    def exposition(self) -> bytes:
        """The families of all jobs that are shown; of several with one name the newest.

        Raises:
            SQLAlchemyError: the store failed.
        """
        with self._one_scrape:
            counted = self._steps.job_ids()  # before the jobs are read: none is forgotten too soon
            shown = self._shown()
            job_ids = {contact.id for contact in shown}
            self._made = {key: made for key, made in self._made.items() if key in job_ids}
            self._steps.forget(counted - job_ids)
            self._refresh(shown)
            made = self._made
        told = [contact for contact in shown if not _is_broken(made.get(contact.id))]
        pieces = [made[contact.id].pieces for contact in told if contact.id in made]
        return text.generate(contact_families.families(told)) + text.join(HEADERS, pieces)

    def _shown(self) -> list[Contact]:
        now = self._clock()
        newest: dict[str, Contact] = {}
        for contact in contacts.since(self._tuner.store, now - TUNED_SECONDS):
            if is_shown(contact, now):
                newest.setdefault(contact.name, contact)
        return list(newest.values())

    def _refresh(self, shown: Sequence[Contact]) -> None:
        """Make the texts of what changed: those never made first, then the oldest."""
        changed = [
            contact
            for contact in shown
            if contact.id not in self._made
            or self._made[contact.id].version != self._version(contact)
        ]
        changed.sort(key=lambda c: self._made[c.id].at if c.id in self._made else -1.0)
        started = self._stopwatch()
        for contact in changed:
            spent_seconds = self._stopwatch() - started
            is_new = contact.id not in self._made
            if spent_seconds > (NEW_BUDGET_SECONDS if is_new else CHANGED_BUDGET_SECONDS):
                break
            version = self._version(contact)
            pieces = next(read_each([contact], self._read), [])
            self._made[contact.id] = _Made(version, pieces, self._stopwatch())

    def _read(self, contact: Contact) -> Sequence[bytes]:
        families = job_families.families(view.read(self._tuner, contact.id))
        return text.pieces([*families, self._steps.family(contact.id)])

    def _version(self, contact: Contact) -> tuple[int, int]:
        return contact.revision, self._steps.count(contact.id)


def _is_broken(made: _Made | None) -> bool:
    return made is not None and not made.pieces


def is_shown(contact: Contact, now: float) -> bool:
    """Whether the job still matters to whoever looks at the metrics."""
    if contact.ended_at is not None:
        return contact.ended_at >= now - ENDED_SECONDS
    kept_seconds = TUNED_SECONDS if contact.phase == "finished" else SILENT_SECONDS
    return contact.last_contact_at >= now - kept_seconds


# The same of every job, and there without any.
HEADERS = text.headers([*job_families.families(None), StepHistograms().family("")])
