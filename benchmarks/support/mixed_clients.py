"""What each client of the mixed jobs does: a job after the other is tuned, or many jobs watch."""

from __future__ import annotations

import heapq
import http.client
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua_client.agent.detail import DROPPED_STEPS
from benchmarks.support.load import Connection
from benchmarks.support.serving import DEFAULT, RANKS, registration

STEP_SECONDS = 2.0
"""The ranks of a job that is tuned report each step."""
LEASE_SECONDS = 45.0
"""As often a job that watches says that it runs."""
BEST_BYTES = 4 * 2**20
NOISE = 0.02


@dataclass(frozen=True)
class Slot:
    """A training that is tuned, one job after the other, from ``starts_at`` until ``ends_at``, on
    the monotonic clock; latencies count from ``counts_from`` on."""

    name: str
    port: int
    starts_at: float
    counts_from: float
    ends_at: float


@dataclass(frozen=True)
class Watchers:
    """Jobs that were tuned, on one replica; times as those of a slot."""

    job_ids: Sequence[str]
    port: int
    starts_at: float
    counts_from: float
    ends_at: float


@dataclass
class Answers:
    """Seconds from when each request was due until it was answered, how many were not, how many
    reports were answered before the end, and by job the steps until its winner was known."""

    reports: list[float] = field(default_factory=list)
    in_time: int = 0
    leases: list[float] = field(default_factory=list)
    errors: int = 0
    steps: dict[str, int] = field(default_factory=dict)


class Ranks:
    """The ranks of a job that is tuned: they run what they are told."""

    def __init__(self, job_id: str) -> None:
        self.steps = 0
        self.is_over = False
        self._draw = random.Random(job_id)
        self._bytes, self._trial, self._dropped = DEFAULT["bucket_bytes"], 0, 0

    def step(self) -> bytes | None:
        """The report of one step; None of one that is dropped."""
        self.steps += 1
        if self._dropped:
            self._dropped -= 1
            return None
        seconds = STEP_SECONDS * true_ratio(self._bytes) * self._draw.gauss(1, NOISE)
        times, computing = [seconds] * RANKS, [0.7 * STEP_SECONDS] * RANKS
        told = {"step": self.steps, "seconds": times, "compute_seconds": computing}
        return json.dumps({"trial": self._trial, "steps": [told]}).encode()

    def told(self, state: Mapping[str, Any]) -> None:
        """Run what the service answers."""
        trial = state["trial"]
        self.is_over = trial is None and state["result"] is not None
        if trial and trial["index"] != self._trial:
            self._trial, self._dropped = trial["index"], DROPPED_STEPS
            self._bytes = trial["configuration"]["bucket_bytes"]


def true_ratio(bucket_bytes: float) -> float:
    """A step's time over the best one's: the default's is 1.14."""
    return 1 + 0.02 * math.log2(bucket_bytes / BEST_BYTES) ** 2


def work(share: Slot | Watchers) -> Answers:
    return _tune(share) if isinstance(share, Slot) else _watch(share)


def _tune(slot: Slot) -> Answers:
    """Whatever becomes of a report, the next step is made at its time."""
    found, connection, due, number = Answers(), Connection(slot.port), slot.starts_at, -1
    ranks, job_id = None, ""
    while due < slot.ends_at:
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if ranks is None or ranks.is_over:
                number += 1
                job_id = f"{slot.name}-{number}"
                connection.put(f"/api/v2/jobs/{job_id}", body(job_id))
                ranks = Ranks(job_id)
            elif report(connection, job_id, ranks) and due >= slot.counts_from:
                answered = time.monotonic()
                found.reports.append(answered - due)
                found.in_time += answered <= slot.ends_at
            if ranks.is_over:
                found.steps[job_id] = ranks.steps
        except (OSError, http.client.HTTPException, RuntimeError):
            found.errors += 1
            connection = Connection(slot.port)
        due += STEP_SECONDS
    return found


def body(job_id: str) -> bytes:
    """Of a job that takes over nothing: all are of one model."""
    return json.dumps({**registration(job_id), "fresh": True}).encode()


def report(connection: Connection, job_id: str, ranks: Ranks) -> bool:
    """Make a step; whether it was reported."""
    content = ranks.step()
    if content is None:
        return False
    answer = connection.post(f"/api/v2/jobs/{job_id}/observations", content)
    ranks.told(json.loads(answer))
    return True


def _watch(watchers: Watchers) -> Answers:
    """Each says from time to time that it runs, over a connection of its own."""
    found, lease = Answers(), json.dumps({"trial": 0, "steps": []}).encode()
    connections = {job_id: Connection(watchers.port) for job_id in watchers.job_ids}
    draw = random.Random(watchers.job_ids[0])
    # All connect while the load settles.
    first = watchers.counts_from - watchers.starts_at
    dues = [(watchers.starts_at + draw.random() * first, job_id) for job_id in connections]
    heapq.heapify(dues)
    while dues[0][0] < watchers.ends_at:
        due, job_id = heapq.heappop(dues)
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            connections[job_id].post(f"/api/v2/jobs/{job_id}/observations", lease)
        except (OSError, http.client.HTTPException, RuntimeError):
            found.errors += 1
            connections[job_id] = Connection(watchers.port)
        else:
            if due >= watchers.counts_from:
                found.leases.append(time.monotonic() - due)
        heapq.heappush(dues, (due + LEASE_SECONDS * (0.9 + 0.2 * draw.random()), job_id))
    time.sleep(max(0.0, watchers.ends_at - time.monotonic()))  # and stays connected
    return found
