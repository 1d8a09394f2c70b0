"""What a finished job's user reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bagua_autotune.model.job import Job, Result, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.text import UNUSED, describe, describe_bytes, describe_speedup
from bagua_autotune.tuning.bill import Bill
from bagua_autotune.tuning.decision import (
    REASON_CODES,
    WINNER_CODE,
    Keep,
    baseline_estimate,
)
from bagua_autotune.tuning.objective import Objective
from bagua_autotune.tuning.rounds import began_at


def make_result(
    job: Job, trials: Sequence[Trial], kept: Keep, objective: Objective, bill: Bill, at: float
) -> Result:
    """The final choice of a round as a result, with its summary line.

    Args:
        trials: of the round.
        bill: what it cost.
        at: when it ended, in seconds since the epoch.
    """
    baseline = baseline_estimate(job, trials)
    speedup = low = high = 1.0
    if kept.gain and baseline:
        gains = (kept.gain.center, kept.gain.low, kept.gain.high)
        speedup, low, high = (objective.speedup(gain, baseline.center) for gain in gains)
    is_winner = kept.configuration != job.baseline
    result = Result(
        configuration=kept.configuration,
        kept="winner" if is_winner else "baseline",
        speedup=speedup,
        low=low,
        high=high,
        trials=sum(trial.state == "measured" for trial in trials),
        steps=bill.steps,
        seconds=job.present_seconds(began_at(job, trials), at),
        summary="",
        cost_steps=bill.cost_steps,
        cost_seconds=bill.cost_seconds,
        payback_steps=bill.payback_steps(speedup) if is_winner else None,
        reason="" if is_winner else kept.reason,
        reason_code=WINNER_CODE if is_winner else REASON_CODES[kept.reason],
    )
    if not is_winner:
        return replace(result, summary=_name_kept(job.baseline, kept.reason, result))
    text = describe(kept.configuration)
    times = describe_speedup(speedup, low, high)
    summary = f"{text}: {times} over {_name_default(job.baseline)}; {_name_cost(result)}"
    return replace(result, summary=summary)


def revoke(result: Result, job: Job, reason: str, code: str) -> Result:
    """The result of a job whose ranks gave the winner up and run the baseline."""
    return replace(
        result,
        configuration=job.baseline,
        kept="baseline",
        speedup=1.0,
        low=1.0,
        high=1.0,
        payback_steps=None,
        reason=reason,
        reason_code=code,
        summary=_name_kept(job.baseline, reason, result),
    )


def _name_kept(baseline: Configuration, reason: str, result: Result) -> str:
    return f"{describe(baseline)} (the default) kept: {reason}; {_name_cost(result)}"


def _name_cost(result: Result) -> str:
    """Such as ``9 trials, 130 steps, 31 s; cost 4.1 steps, paid back after 18``."""
    parts = [f"{result.trials} {'trial' if result.trials == 1 else 'trials'}"]
    if result.steps:
        parts.append(f"{result.steps} steps")
    text = ", ".join([*parts, f"{result.seconds:.0f} s"])
    if result.cost_seconds:
        text += f"; cost {result.cost_steps:.1f} steps"
    if result.cost_seconds and result.payback_steps is not None:
        text += f", paid back after {result.payback_steps}"
    return text


def _name_default(baseline: Configuration) -> str:
    """``the 25 MiB default``, with its other knobs where they are not the usual ones."""
    usual = {**UNUSED, "bucket_bytes": baseline.get("bucket_bytes"), "hierarchical": "off"}
    if "bucket_bytes" in baseline and all(usual.get(k) == v for k, v in baseline.items()):
        return f"the {describe_bytes(baseline.number('bucket_bytes'))} default"
    return f"the default ({describe(baseline)})"
