"""How often the ranks report, and which steps of a trial are observed in detail: both take the host
time, which they would not take once the configuration is kept."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from statistics import median

from bagua_client.agent.report import Report
from bagua_client.layout import Layout
from bagua_client.measuring.profiler import PROFILED_STEPS
from bagua_client.measuring.rank_measurement import RankMeasurement
from bagua_client.tunable.tunable import Tunable

# How many steps lie between two reports: few enough to act soon, enough to keep them cheap.

SHORTEST_SECONDS = 0.1
"""A report wakes the reporter's thread, which then competes for the interpreter."""
LARGEST_SHARE = 0.004
"""The largest share of the step time for reports on the training thread; 0.5 % may be spent in
all."""
MOST_REDUCTIONS = 16
MOST_FOR_COST = 3
"""Most steps between reports where a report is dear: where the gradients fill the link it waits
behind them, and a trial that goes on unread for longer costs more.
"""
COSTS_REMEMBERED = 5
REPORTS_REMEMBERED = 8
"""Reports over which a step's time is averaged: a training thread that runs ahead of its GPU makes
several steps in no time, then waits for it.
"""
WATCHING_REDUCTIONS = 24
SUSPICIOUS_REDUCTIONS = 4


class Pace:
    """Rank 0's choice of the pace, from what it sees of its own steps and messages."""

    def __init__(self) -> None:
        self._reports = deque([(0, time.monotonic())], maxlen=REPORTS_REMEMBERED)
        # The median: one report that waited long says nothing of the next.
        self._costs_seconds = deque([0.0], maxlen=COSTS_REMEMBERED)

    def took(self, seconds: float) -> None:
        """A report cost the training thread so long."""
        self._costs_seconds.append(seconds)

    def until_next(self, reductions: int, suspects: bool | None = None) -> int:
        """The reductions until the next report; one starts now, after ``reductions`` in all.

        Args:
            suspects: after the tuning, whether step times may be changing; None: while tuning.
        """
        if suspects is None:
            return self._frequent(reductions)
        frequent = max(SUSPICIOUS_REDUCTIONS, self._frequent(reductions))
        return frequent if suspects else WATCHING_REDUCTIONS

    def _frequent(self, reductions: int) -> int:
        (before, then), now = self._reports[0], time.monotonic()
        self._reports.append((reductions, now))
        if reductions == before:
            return 1
        step_seconds = max((now - then) / (reductions - before), 1e-9)
        rare = min(SHORTEST_SECONDS / step_seconds, MOST_REDUCTIONS)
        cheap = median(self._costs_seconds) / LARGEST_SHARE / step_seconds
        return max(1, math.ceil(max(rare, min(cheap, MOST_FOR_COST))))


HOOK_SECONDS = 50e-6
"""What the hook takes for a bucket where the host has little time to spare; where it has, 10 to 20
us. 200 us were seen."""
MOST_SHARE = 0.02
"""Of a step, for the hook; configurations with which it may take more are measured without it."""
MOST_WAITED_STEPS = 100
"""So many steps a job that waits to be tuned has the hook, from which the order of its gradients is
known: others may be tuned first, or the service may never come."""
DROPPED_STEPS = 2
"""Steps after a switch that are not measured: the re-cut itself, and the caches it emptied."""


class Detail:
    """What one model's trials are observed by. All ranks decide the same, in the same step.

    A configuration under which torch can carry the buckets by itself is observed in detail when it
    is tried first: while it is measured, or before that if it has many buckets for its step. Tried
    again, as the winner and the default are in the end, it is measured as it would be kept. All
    others need our hook, and are observed by it.
    """

    def __init__(self, tunable: Tunable, measurement: RankMeasurement) -> None:
        self._tunable = tunable
        self._measurement = measurement
        self._known: set[int] = set()
        self._left = -1
        self._waited = 0
        self._step_seconds = math.inf
        self.is_on = True
        """Whether the steps that are measured are."""

    def begin(self, layout: Layout) -> None:
        """A trial of ``layout`` begins, which is scheduled."""
        is_torchs = self._tunable.is_carried_by_torch(layout)
        is_new = not is_torchs or layout.digest not in self._known
        hook_seconds = len(layout.partition) * HOOK_SECONDS
        comes_before = is_torchs and is_new and hook_seconds > MOST_SHARE * self._step_seconds
        self._known.add(layout.digest)
        self._left = PROFILED_STEPS if comes_before else -1
        self.is_on = is_new and not comes_before
        self._tunable.attach(is_new)  # The end of the round before may not have been settled.

    def wait(self, trial: int | None) -> None:
        """A step of a job that is not tuned yet, or is in a trial, has ended."""
        self._waited = self._waited + 1 if trial is None else 0
        now = self._tunable.layout
        if self._waited == MOST_WAITED_STEPS and self._tunable.is_carried_by_torch(now):
            self._tunable.attach(in_detail=False)

    def forget(self) -> None:
        """The round is over; the next one learns anew."""
        self._known.clear()

    def told(self, reports: Iterable[Report]) -> None:
        """The ranks have told one another the times of some steps."""
        if seconds := [each for report in reports for each in report.times.seconds]:
            self._step_seconds = median(seconds)

    @property
    def dropped_steps(self) -> int:
        """The first steps of the trial that began last, which are not measured."""
        before = self._left + DROPPED_STEPS if self._left > 0 else 0
        return before + DROPPED_STEPS

    def step_ends(self, trial: int | None) -> bool:
        """A step ends after a switch. Returns whether steps are measured from the next one on."""
        if not self._tunable.is_settled:
            return False
        if trial is None or self._left < 0:
            return True
        if self._left == PROFILED_STEPS:
            self._tunable.observers.call(self._measurement.begin_recording, trial)
        elif self._left == 0:
            self._tunable.attach(in_detail=False)
        self._left -= 1
        return False
