"""The result of a search, for people, for a shell and for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bagua_autotune.deciding.result import Bill
from bagua_autotune.model.job import Result
from bagua_autotune.model.reasons import NOTHING_FASTER, OTHER_CODE, REASON_CODES, WINNER_CODE
from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.text import clean, describe_seconds, describe_speedup
from bagua_runs.outcomes import Measure, Outcome, Run, costs_of
from bagua_runs.places import FileKey, Start
from bagua_runs.search import SystemSearch, Verdict
from bagua_runs.space import SearchSpace
from bagua_wire.configuration import Configuration

OWN = "your settings"
NOTHING_SUCCEEDED = "no run with other settings succeeded"
TIME_WAS_UP = "--minutes was over before anything was compared in turns"


def export_lines(start: Start) -> list[str]:
    """Lines with which a shell sets the variables."""
    return [f"export {name}={shlex.quote(text)}" for name, text in start.environment.items()]


def other_lines(space: SearchSpace, changes: Mapping[str, str], start: Start) -> list[str]:
    """Lines on what changes beside variables: keys of files, and the command to run.

    Args:
        space: of which the changes are.
        start: with them; without those in files if it has no copies.
    """
    lines = [f"kept: {path}, in the place of {own}" for own, (path, _) in start.copies.items()]
    if not lines:
        in_files = {s.name for s in space.settings if isinstance(s.place, FileKey)}
        lines = [f"in {name}={text}" for name, text in changes.items() if name in in_files]
    is_other = any(name not in start.environment for name in changes)
    return [*lines, f"run: {shlex.join(start.command)}"] if is_other else lines


def describe_changes(changes: Mapping[str, str]) -> str:
    """Other values of some settings in words."""
    return " ".join(f"{name}={text}" for name, text in changes.items()) or OWN


def describe_run(
    number: int, most: int, changes: Mapping[str, str], outcome: Outcome,
    own_costs: Sequence[float], measure: Measure,
) -> str:  # fmt: skip
    """Return one line on a run. ``own_costs``: of the user's own settings so far."""
    head = f"run {number:2} of at most {most}: {describe_changes(changes)}: "
    if outcome.is_out_of_memory:
        return head + outcome.failure
    if outcome.score is None or outcome.cost is None:
        return f"{head}failed: {outcome.failure}"
    speedup = math.exp(fmean(own_costs) - outcome.cost) if own_costs and changes else None
    gain = "" if speedup is None else f", {describe_speedup(speedup)}"
    return head + measure.describe(outcome.score) + gain


def last_lines(outcome: Outcome) -> list[str]:
    """What a failed run printed last, for people."""
    return [f"    {clean(line)}" for line in outcome.last_lines]


def summary(search: SystemSearch, verdict: Verdict) -> str:
    """The result in one line."""
    short = sum(run.outcome.is_out_of_memory for run in search.runs)
    failed = sum(run.cost is None for run in search.runs) - short
    seconds = sum(run.outcome.seconds for run in search.runs)
    outcomes = f"{failed} of them failed" + (f", {short} ran out of memory" if short else "")
    effort = f"{len(search.runs)} runs, {outcomes}, {describe_seconds(seconds)}"
    if verdict.is_out_of_time:
        return f"{OWN} stay: {TIME_WAS_UP}; {effort}"
    if failed_run := only_failures(search):
        what = describe_changes(search.space.changes(failed_run.configuration))
        last = f"the last, {what}, {failed_run.outcome.failure}"
        return f"{NOTHING_SUCCEEDED}; {last}; {effort}{_untried(search, verdict)}"
    if verdict.configuration == search.space.own:
        return f"nothing faster than {OWN}; {effort}{_untried(search, verdict)}"
    gain = verdict.gain
    assert gain is not None  # nothing is kept without a comparison
    words = describe_speedup(gain.center, gain.low, gain.high)
    return f"{words} over {OWN}, measured in turns; {effort}"


def _untried(search: SystemSearch, verdict: Verdict) -> str:
    """What was left out and why, behind a summary; empty: nothing was."""
    untried, all_of_them = search.untried, len(search.space.candidates)
    if not untried:
        return ""
    return f"; {untried} of {all_of_them} combinations were not tried: {verdict.ended}"


def only_failures(search: SystemSearch) -> Run | None:
    """The last run with other settings than the user's, where each of them failed, and not only for
    lack of memory; None: one succeeded."""
    others = [run for run in search.runs if run.configuration != search.space.own]
    has_other_failure = any(not run.outcome.is_out_of_memory for run in others)
    is_all = has_other_failure and all(run.cost is None for run in others)
    return others[-1] if is_all else None


def describe_price(seconds: float, gpus: int, gain: Interval | None) -> str:
    """Return one line: ``spent 34 GPU-minutes (17.0 min on 2 GPUs); pays after 3.1 h of training at
    1.09x (2.4 h to 5.0 h)``.

    Args:
        seconds: that the search took.
        gpus: on which it ran; 0: that is not known, or there are none.
        gain: of the settings that are kept, how many times as fast they are; None: the user's own
            settings stay, which pays nothing.
    """
    spent = describe_seconds(seconds)
    if gpus:
        minutes = gpus * seconds / 60
        number = f"{minutes:.3g}" if minutes < 100 else f"{minutes:.0f}"
        spent = f"{number} GPU-minutes ({spent} on {gpus} GPU{'s' if gpus > 1 else ''})"
    if gain is None:
        return f"spent {spent}"
    paid = [pays_after_seconds(seconds, times) for times in (gain.center, gain.high, gain.low)]
    center, soonest, latest = (
        "never" if math.isinf(each) else describe_seconds(each) for each in paid
    )
    between = f" ({soonest} to {latest})" if soonest != latest else ""
    return f"spent {spent}; pays after {center} of training at {gain.center:.2f}x{between}"


def pays_after_seconds(seconds: float, speedup: float) -> float:
    """How long it takes to train at this speed-up until it has saved so many seconds: in a second
    it does what took ``speedup`` seconds before."""
    return seconds / (speedup - 1) if speedup > 1 else math.inf


def job_result(search: SystemSearch, verdict: Verdict, price: str, spent_seconds: float,
               has_seconds: bool) -> Result:  # fmt: skip
    """The result as the store keeps it.

    Args:
        price: in words.
        spent_seconds: by the search, all of which is its cost.
        has_seconds: whether scores are seconds of a step.
    """
    own = search.space.own
    is_winner = verdict.configuration != own
    gain = verdict.gain if is_winner and verdict.gain else Interval(1.0, 1.0, 1.0)
    cost_steps = spent_seconds / math.exp(fmean(costs_of(search.runs, own))) if has_seconds else 0.0
    bill = Bill(len(search.runs), spent_seconds, cost_steps)
    reason = "" if is_winner else TIME_WAS_UP if verdict.is_out_of_time else NOTHING_FASTER
    if only_failures(search):
        reason = NOTHING_SUCCEEDED
    return Result(
        configuration=search.space.settings_of(verdict.configuration),
        kept="winner" if is_winner else "baseline",
        speedup=gain.center,
        low=gain.low,
        high=gain.high,
        trials=bill.steps,
        steps=bill.steps,
        seconds=spent_seconds,
        summary=f"{summary(search, verdict)}; {price}",
        cost_steps=cost_steps,
        cost_seconds=spent_seconds,
        payback_steps=bill.payback_steps(gain.center) if cost_steps and is_winner else None,
        reason=reason,
        reason_code=WINNER_CODE if is_winner else REASON_CODES.get(reason, OTHER_CODE),
    )


def failed_result(own: Configuration, runs: int, spent_seconds: float, failure: str) -> Result:
    """The result of a search that ended as the job failed with the user's own settings."""
    reason = f"the job failed with {OWN}: {failure}"
    return Result(own, "baseline", 1.0, 1.0, 1.0, runs, runs, spent_seconds, reason,
                  cost_seconds=spent_seconds, reason=reason, reason_code=OTHER_CODE)  # fmt: skip


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
    search: SystemSearch, command: Sequence[str], verdict: Verdict | None, start: Start | None
) -> dict[str, Any]:
    """Everything, for programs.

    Args:
        command: the user's.
        verdict: None if the search was interrupted.
        start: with the verdict's settings; None like ``verdict``.
    """
    gain = verdict.gain if verdict else None
    return {
        "command": list(command),
        "is_finished": verdict is not None,
        "settings": search.space.changes(verdict.configuration) if verdict else {},
        "environment": dict(start.environment) if start else {},
        "tuned_command": list(start.command) if start else None,
        "speedup": gain and {"center": gain.center, "low": gain.low, "high": gain.high},
        "runs": [_entry(search, run) for run in search.runs],
    }


def _entry(search: SystemSearch, run: Run) -> dict[str, Any]:
    return {
        "number": run.number,
        "purpose": run.purpose,
        "settings": search.space.changes(run.configuration),
        "score": run.outcome.score,
        "failure": run.outcome.failure or None,
        "is_out_of_memory": run.outcome.is_out_of_memory,
        "seconds": run.outcome.seconds,
    }
