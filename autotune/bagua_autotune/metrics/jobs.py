"""The jobs' part of ``/metrics``: each job's text is made once per revision, and kept.

A scrape reads one short row of each job that was heard of lately; what did not change since it was
last summed up, for a scrape or for a list, is not read again. The steps that this process was told
of are counted in a histogram for each job that is shown.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Histogram
from prometheus_client.core import Metric

from bagua_autotune.measuring.against_default import OBJECTIVES
from bagua_autotune.metrics import families, text
from bagua_autotune.model.job import SILENT_SECONDS, Job, Observation
from bagua_autotune.store import Store
from bagua_autotune.store.jobs import Contact, read_each
from bagua_autotune.views.summary import Summaries
from bagua_wire.messages import BEING_TUNED

NAME = "bagua_autotune_step_seconds"
HELP = "Step time of the slowest rank, of the steps reported to this process."
# Few: a job's share of the exposition is mostly these.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A service that nobody scrapes forgets the jobs it heard of longest ago.
MOST_JOBS = 5000


class _Steps:
    def __init__(self, job_name: str, label: bytes) -> None:
        self._template = text.Template([_family(job_name)])
        self._label = label
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self._samples: bytes | None = None

    def add(self, seconds: float) -> None:
        self._samples = None
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds

    def samples(self) -> bytes:
        if self._samples is None:
            up_to = list(accumulate(self.counts))
            (samples,) = self._template.fill([*up_to, up_to[-1], self.seconds])
            self._samples = text.labelled(samples, self._label)
        return self._samples


class StepHistograms:
    """Histograms by job id, so that a new job of the same name begins anew. Thread-safe.

    Args:
        label: of all samples; none if empty.
    """

    def __init__(self, label: bytes = b"") -> None:
        self._label = label
        self._jobs: OrderedDict[str, _Steps] = OrderedDict()
        self._guard = threading.Lock()

    def observe(self, job: Job, observations: Sequence[Observation]) -> None:
        """Count the steps of a job; none under a protocol without step times."""
        objective = OBJECTIVES[job.protocol]
        found = [objective.seconds(objective.cost(each.values)) for each in observations]
        seconds = [value for value in found if value is not None]
        if not seconds:
            return
        with self._guard:
            if job.id not in self._jobs:
                self._jobs[job.id] = _Steps(job.name, self._label)
            for value in seconds:
                self._jobs[job.id].add(value)
            self._jobs.move_to_end(job.id)
            if len(self._jobs) > MOST_JOBS:
                self._jobs.popitem(last=False)

    def samples(self, job_ids: Iterable[str]) -> dict[str, bytes]:
        """The jobs' histograms as text, as they are now."""
        with self._guard:
            known = [job_id for job_id in job_ids if job_id in self._jobs]
            return {job_id: self._jobs[job_id].samples() for job_id in known}

    def job_ids(self) -> set[str]:
        with self._guard:
            return set(self._jobs)

    def forget(self, job_ids: Collection[str]) -> None:
        with self._guard:
            for job_id in job_ids:
                self._jobs.pop(job_id, None)


def _family(job_name: str) -> Metric:
    """The family of a job without steps."""
    empty = Histogram(NAME, HELP, [families.JOB], buckets=BUCKETS, registry=None)
    empty.labels(job_name)
    return next(iter(empty.collect()))


# How long a job is shown after its last word: if it ended; and once it is tuned, from when on it
# says nothing. One that is being tuned, or lost, is shown for an hour of silence.
ENDED_SECONDS = 900.0
TUNED_SECONDS = 24 * 3600.0
# A job that is tuned is heard of every few seconds; so long after its last word it may be gone.
HEARD_SECONDS = 300.0
# A scrape makes texts for so long; what is left is shown as it was, and comes first next time.
# Jobs that have no text yet are given more: after a start all of them have none.
CHANGED_BUDGET_SECONDS = 0.1
NEW_BUDGET_SECONDS = 2.0


@dataclass(frozen=True)
class _Made:
    """A job's samples by family, and of what they were made; none if it cannot be read."""

    version: tuple[float, int]
    pieces: Sequence[bytes]
    at: float


class _State(NamedTuple):
    """What is told of a job without reading it, by family."""

    contact: Contact
    template: text.Template
    pieces: Sequence[bytes]


class Jobs:
    """The jobs of a store as text. Thread-safe.

    Args:
        clock: seconds since the epoch.
        stopwatch: seconds, for the budgets.
    """

    def __init__(
        self,
        store: Store,
        summaries: Summaries,
        steps: StepHistograms,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._summaries = summaries
        self._steps = steps
        self._clock = clock
        self._stopwatch = stopwatch
        self._states: dict[str, _State] = {}
        self._made: dict[str, _Made] = {}
        self._one_scrape = threading.Lock()

    def exposition(self, others: Sequence[Mapping[str, bytes]] = ()) -> bytes:
        """The families of all jobs that are shown, of several with one name one (``preferred``).

        Args:
            others: steps that other processes were told of, by job id.

        Raises:
            SQLAlchemyError: the store failed.
        """
        with self._one_scrape:
            counted = self._steps.job_ids()  # before the jobs are read: none is forgotten too soon
            shown = self._shown()
            self._states = {contact.id: self._state(contact) for contact in shown}
            self._made = {key: made for key, made in self._made.items() if key in self._states}
            self._steps.forget(counted - self._states.keys())
            self._refresh(shown)
            states, made = self._states, list(self._made.items())
        broken = {job_id for job_id, found in made if not found.pieces}
        whole = {job_id: state for job_id, state in states.items() if job_id not in broken}
        told = [state.pieces for state in whole.values()]
        pieces = [found.pieces for _, found in made if found.pieces]
        # These never wait for the rest: they are counted here, and cost next to nothing.
        counted_steps = [
            [told_steps[job_id]]
            for told_steps in (self._steps.samples(whole), *others)
            for job_id in whole
            if job_id in told_steps
        ]
        return (
            text.join(STATE_HEADERS, told)
            + text.join(HEADERS, pieces)
            + text.join(STEP_HEADERS, counted_steps)
        )

    def _shown(self) -> list[Contact]:
        now = self._clock()
        found: dict[str, Contact] = {}
        for contact in self._store.jobs.contacts_since(now - TUNED_SECONDS, now - ENDED_SECONDS):
            if is_shown(contact, now):
                other = found.get(contact.name)
                found[contact.name] = preferred(contact, other, now) if other else contact
        return list(found.values())

    def _state(self, contact: Contact) -> _State:
        known = self._states.get(contact.id)
        if known and known.contact == contact:
            return known
        template = known.template if known and known.contact.name == contact.name else None
        template = template or text.Template(families.state_families(contact.name))
        return _State(contact, template, template.fill(families.state_values(contact)))

    def _refresh(self, shown: Sequence[Contact]) -> None:
        """Make the texts of what changed: those never made first, then the oldest."""
        changed = [
            contact
            for contact in shown
            if contact.id not in self._made or self._made[contact.id].version != contact.version
        ]
        changed.sort(key=lambda c: self._made[c.id].at if c.id in self._made else -1.0)
        started = self._stopwatch()
        for contact in changed:
            spent_seconds = self._stopwatch() - started
            is_new = contact.id not in self._made
            if spent_seconds > (NEW_BUDGET_SECONDS if is_new else CHANGED_BUDGET_SECONDS):
                break
            pieces = next(read_each([contact], self._read), [])
            self._made[contact.id] = _Made(contact.version, pieces, self._stopwatch())

    def _read(self, contact: Contact) -> Sequence[bytes]:
        return text.pieces(families.job_families(self._summaries.of(contact)))


def preferred(one: Contact, other: Contact, now: float) -> Contact:
    """Return which of two jobs with one name is shown: not ended, else being tuned, else newer."""

    def rank(contact: Contact) -> tuple[bool, bool, float]:
        is_heard_of = contact.last_contact_at >= now - HEARD_SECONDS
        is_tuned = contact.phase in BEING_TUNED and is_heard_of
        return contact.ended_at is None, is_tuned, contact.created_at

    return max(other, one, key=rank)


def is_shown(contact: Contact, now: float) -> bool:
    """Whether the job still matters to whoever looks at the metrics."""
    kept_seconds = TUNED_SECONDS if contact.phase == "finished" else SILENT_SECONDS
    if contact.ended_at is not None and contact.phase != "lost":
        kept_seconds = ENDED_SECONDS
    return contact.last_contact_at >= now - kept_seconds


# The same of every job, and there without any.
STATE_HEADERS = text.headers(families.state_families(None))
HEADERS = text.headers(families.job_families(None))
STEP_HEADERS = text.headers([_family("")])
