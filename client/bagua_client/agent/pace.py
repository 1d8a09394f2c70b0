"""How many steps lie between two reports: few enough to act soon, enough to keep them cheap."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

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
