"""What a finished job's user reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bagua_autotune.model.job import Job, Result, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.text import describe, describe_bytes
from bagua_autotune.tuning.decision import Keep, baseline_estimate
from bagua_autotune.tuning.objective import Objective


def make_result(
    job: Job, trials: Sequence[Trial], kept: Keep, objective: Objective, steps: int, at: float
) -> Result:
    """The final choice as a result, with its summary line.

    Args:
        steps: how many were observed.
        at: when tuning ended, in seconds since the epoch.
    """
    baseline = baseline_estimate(job, trials)
    speedup = low = high = 1.0
    if kept.gain and baseline:
        gains = (kept.gain.center, kept.gain.low, kept.gain.high)
        speedup, low, high = (objective.speedup(gain, baseline.center) for gain in gains)
    measured = sum(trial.state == "measured" for trial in trials)
    seconds = max(0.0, at - job.created_at)
    cost = _name_cost(measured, seconds)
    is_winner = kept.configuration != job.baseline
    if is_winner:
        times = f"{speedup:.2f}x ({low:.2f} to {high:.2f})"
        text = describe(kept.configuration)
        summary = f"{text}: {times} over {_name_default(job.baseline)}; {cost}"
    else:
        summary = _name_kept(job.baseline, kept.reason, cost)
    return Result(
        configuration=kept.configuration,
        kept="winner" if is_winner else "baseline",
        speedup=speedup,
        low=low,
        high=high,
        trials=measured,
        steps=steps,
        seconds=seconds,
        summary=summary,
    )


def revoke(result: Result, job: Job, reason: str) -> Result:
    """The result of a job whose ranks could not switch to the winner and run the baseline."""
    summary = _name_kept(job.baseline, reason, _name_cost(result.trials, result.seconds))
    return replace(
        result,
        configuration=job.baseline,
        kept="baseline",
        speedup=1.0,
        low=1.0,
        high=1.0,
        summary=summary,
    )


def _name_kept(baseline: Configuration, reason: str, cost: str) -> str:
    return f"{describe(baseline)} (the default) kept: {reason}; {cost}"


def _name_cost(trials: int, seconds: float) -> str:
    return f"{trials} {'trial' if trials == 1 else 'trials'}, {seconds:.0f} s"


def _name_default(baseline: Configuration) -> str:
    """``the 25 MiB default``, with its other knobs where they are not the usual ones."""
    usual = {"bucket_bytes": baseline.get("bucket_bytes"), "hierarchical": "off"}
    if "bucket_bytes" in baseline and all(usual.get(k) == v for k, v in baseline.items()):
        return f"the {describe_bytes(baseline.number('bucket_bytes'))} default"
    return f"the default ({describe(baseline)})"
