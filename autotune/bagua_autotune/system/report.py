"""The result of a search, for people, for a shell and for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.text import describe_seconds, describe_speedup
from bagua_autotune.system.measures import Measure
from bagua_autotune.system.runs import Outcome, Run, costs_of
from bagua_autotune.system.search import SystemSearch, Verdict

OWN = "your settings"


def export_lines(environment: Mapping[str, str]) -> list[str]:
    """Lines with which a shell sets the variables."""
    return [f"export {name}={shlex.quote(text)}" for name, text in environment.items()]


def describe_run(
    number: int, most: int, environment: Mapping[str, str], outcome: Outcome,
    own_costs: Sequence[float], measure: Measure,
) -> str:  # fmt: skip
    """Return one line on a run. ``own_costs``: of the user's own settings so far."""
    words = " ".join(f"{name}={text}" for name, text in environment.items()) or OWN
    head = f"run {number:2} of at most {most}: {words}: "
    if outcome.score is None or outcome.cost is None:
        return f"{head}failed: {outcome.failure}"
    speedup = math.exp(fmean(own_costs) - outcome.cost) if own_costs and environment else None
    gain = "" if speedup is None else f", {describe_speedup(speedup)}"
    return head + measure.describe(outcome.score) + gain


def summary(search: SystemSearch, verdict: Verdict) -> str:
    """The result in one line."""
    failed = sum(run.cost is None for run in search.runs)
    seconds = sum(run.outcome.seconds for run in search.runs)
    effort = f"{len(search.runs)} runs, {failed} of them failed, {describe_seconds(seconds)}"
    if verdict.configuration == search.space.own:
        return f"nothing faster than {OWN}; {effort}"
    gain = verdict.gain
    assert gain is not None  # nothing is kept without a comparison
    words = describe_speedup(gain.center, gain.low, gain.high)
    return f"{words} over {OWN}, measured in turns; {effort}"


def best_so_far(search: SystemSearch) -> tuple[Configuration, float] | None:
    """The fastest settings so far and their speed-up, not yet compared in turns; None: none are."""
    measured = {run.configuration for run in search.runs if run.cost is not None}
    own = costs_of(search.runs, search.space.own)
    others = measured - {search.space.own}
    if not own or not others:
        return None
    best = min(others, key=lambda c: (fmean(costs_of(search.runs, c)), str(c)))
    speedup = math.exp(fmean(own) - fmean(costs_of(search.runs, best)))
    return (best, speedup) if speedup > 1 else None


def document(
    search: SystemSearch, verdict: Verdict | None, command: Sequence[str]
) -> dict[str, Any]:
    """Everything, for programs. ``verdict``: None if the search was interrupted."""
    gain = verdict.gain if verdict else None
    return {
        "command": list(command),
        "is_finished": verdict is not None,
        "environment": search.space.environment(verdict.configuration) if verdict else {},
        "speedup": gain and {"center": gain.center, "low": gain.low, "high": gain.high},
        "runs": [_entry(search, run) for run in search.runs],
    }


def _entry(search: SystemSearch, run: Run) -> dict[str, Any]:
    return {
        "number": run.number,
        "purpose": run.purpose,
        "environment": search.space.environment(run.configuration),
        "score": run.outcome.score,
        "failure": run.outcome.failure or None,
        "seconds": run.outcome.seconds,
    }
