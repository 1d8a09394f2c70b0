"""What a finished job's user reads: what was found, what that cost, and when it is earned; and
whether a job is tuned again after a change of its step times, by what all of that may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bagua_autotune.deciding.decision import Keep
from bagua_autotune.measuring.against_default import Objective
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import bounds, closest, memory_of, standing
from bagua_autotune.model.job import RUNS, Event, EventKind, Job, Result, Trial
from bagua_autotune.model.knobs import repeats_change
from bagua_autotune.model.reasons import (
    DIVERGED_CODE,
    GIVING_UP,
    LASTING_HARM,
    NOT_SHOWN,
    NOTHING_FASTER,
    NOTHING_FITS,
    ONE_SAMPLE,
    ONLY_DEFAULT,
    REASON_CODES,
    TIME_WAS_UP,
    WINNER_CODE,
)
from bagua_autotune.model.statistics import Estimate, Interval
from bagua_autotune.model.text import describe_count, describe_memory, describe_speedup
from bagua_autotune.store.observations import Steps
from bagua_wire.configuration import Configuration
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.words import describe, is_unused


@dataclass(frozen=True)
class Bill:
    """``steps`` ran from the first trial to the last; only time beyond the default's is cost.

    Of jobs that report the speed of many steps at once, ``steps`` are those between their reports.
    """

    steps: int
    cost_seconds: float
    cost_steps: float

    def payback_steps(self, speedup: float) -> int | None:
        """After how many steps at this speed-up the cost is earned; None if never."""
        if speedup <= 1:
            return None
        saved_share = 1 - 1 / speedup
        return math.ceil(self.cost_steps / saved_share)


def bill(round_: Round, observed: Mapping[int, Steps], switch_seconds: Mapping[int, float]) -> Bill:
    """Add up a round: what its steps took longer than the default did beside them, and in a later
    round than what was kept before if that is faster: it would have run. Of costs that stand for no
    seconds nothing can be added up.

    Args:
        round_: an open trial's steps count, and cost once it is closed.
        observed: by trial index the steps observed under it.
        switch_seconds: by trial index how long the ranks took to cut their buckets.
    """
    defaults, objective = round_.defaults, round_.objective
    default_seconds = _seconds(defaults.pooled, objective)
    if round_.job.protocol in RUNS:
        return _bill_of_runs(round_, default_seconds)
    ran = [trial for trial in round_.trials if trial.index in observed]
    kept_seconds = math.inf
    if round_.number > 0 and round_.trials:  # such a round begins with what was kept
        kept = standing(round_.trials, round_.trials[0].configuration)
        kept_seconds = _seconds(kept, objective) or math.inf
    are_single = objective.seconds(0.0) is not None
    steps = 0
    seconds = 0.0
    for place, trial in enumerate(ran):
        own = observed[trial.index]
        count = own.count if are_single else own.last - own.first
        if place + 1 < len(ran):
            # A trial's steps run until the next one's begin: those dropped at the switch count too.
            count = max(count, observed[ran[place + 1].index].first - own.first)
        steps += count
        own_seconds = _seconds(trial.estimate, objective)
        beside_seconds = _seconds(defaults.at(trial.index), objective)
        if own_seconds is not None and beside_seconds is not None:
            seconds += count * max(0.0, own_seconds - min(beside_seconds, kept_seconds))
    seconds += sum(switch_seconds.get(trial.index, 0.0) for trial in round_.trials)
    return Bill(steps, seconds, seconds / default_seconds if default_seconds else 0.0)


def _bill_of_runs(round_: Round, default_seconds: float | None) -> Bill:
    """All the time of a search with whole runs is its cost: nothing was trained in it."""
    job = round_.job
    seconds = job.present_seconds(job.created_at, job.finished_at or job.last_contact_at)
    runs = sum(not trial.is_open for trial in round_.trials)
    return Bill(runs, seconds, seconds / default_seconds if default_seconds else 0.0)


def _seconds(found: Estimate | None, objective: Objective) -> float | None:
    return None if found is None else objective.seconds(found.center)


def make_result(round_: Round, kept: Keep, bill: Bill, at: float) -> Result:
    """The final choice of a round as a result, with its summary line.

    Args:
        bill: what the round cost.
        at: when it ended, in seconds since the epoch.
    """
    job, baseline = round_.job, round_.defaults.first
    speedup = low = high = 1.0
    if kept.gain and baseline:
        gains = (kept.gain.center, kept.gain.low, kept.gain.high)
        speedup, low, high = (round_.objective.speedup(gain, baseline.center) for gain in gains)
        told = round_.believable(Interval(speedup, low, high))
        high = told.high if told else high
    is_winner = kept.configuration != job.baseline
    default_memory = memory_of(round_.trials, job.baseline)
    memory = memory_of(round_.trials, kept.configuration)
    code, reason = (WINNER_CODE, "") if is_winner else _reason(round_, kept)
    result = Result(
        configuration=kept.configuration,
        kept="winner" if is_winner else "baseline",
        speedup=speedup,
        low=low,
        high=high,
        trials=sum(trial.state == "measured" for trial in round_.trials),
        steps=bill.steps,
        seconds=job.present_seconds(round_.began_at, at),
        summary="",
        cost_steps=bill.cost_steps,
        cost_seconds=bill.cost_seconds,
        payback_steps=bill.payback_steps(speedup) if is_winner else None,
        reason=reason,
        reason_code=code,
        default_peak_bytes=default_memory.peak_bytes if default_memory else None,
        peak_bytes=memory.peak_bytes if memory else None,
        device_bytes=memory.device_bytes if memory else None,
    )
    if not is_winner:
        if code == REASON_CODES[NOTHING_FASTER]:
            reason += _name_closest(round_)
        return replace(result, summary=_name_kept(job.baseline, reason, result))
    text = describe(kept.configuration)
    times = describe_speedup(speedup, low, high)
    cost = _name_cost(result) + _name_memory(result)
    summary = f"{text}: {times} over {_name_default(job.baseline)}; {cost}"
    if _was_cut_short(round_):
        summary += f"; the search ended when {TIME_WAS_UP}"
    return replace(result, summary=summary)


def _was_cut_short(round_: Round) -> bool:
    return round_.has_searched_long or round_.is_out_of_time


def _reason(round_: Round, kept: Keep) -> tuple[str, str]:
    """Why the default is kept, with the limit that left no room for more: for programs, and in
    words."""
    reason = kept.reason
    if reason == NOTHING_FASTER and _was_cut_short(round_):
        has_others = any(t.configuration != round_.job.baseline for t in round_.trials)
        reason = f"{NOTHING_FASTER if has_others else ONLY_DEFAULT} before {TIME_WAS_UP}"
    elif reason == NOTHING_FASTER and round_.job.limits.max_samples == 1:
        reason = ONE_SAMPLE
    code = REASON_CODES[reason]
    if reason == NOTHING_FITS:
        words = [trial.failure for trial in round_.trials if trial.state == "infeasible"]
        reason = f"{NOTHING_FITS} ({words[-1]})" if words else reason
    if reason == NOT_SHOWN:
        spread = round_.visits.step_spread / round_.scale
        most = f"at most {math.exp(round_.most_gain):.2f}x is possible"
        reason = f"{most} and this job's steps vary by {100 * spread:.2g} %, so {NOT_SHOWN}"
    return code, reason


def is_about_winner(result: Result, job: Job, event: Event, trials: Sequence[Trial]) -> bool:
    """Whether the ranks gave up the winner, or a trial that harmed the training as it would."""
    if event.trial is None:
        return True
    is_harm = GIVING_UP[event.kind][1] == DIVERGED_CODE
    tried = trials[event.trial].configuration
    return is_harm and repeats_change(result.configuration, tried, job.baseline)


def winner_tried_again(job: Job, trials: Sequence[Trial]) -> int | None:
    """The open trial of what was kept before: the ranks run it as what was kept until they are told
    of the trial, and then tell its harm without a number."""
    last = trials[-1] if trials else None
    if last is None or not last.is_open or job.result is None or job.result.kept != "winner":
        return None
    return last.index if last.configuration == job.result.configuration else None


def give_up(
    result: Result, job: Job, kind: EventKind, reason: str, next_index: int
) -> tuple[Result, Trial | None]:
    """The result of a job whose ranks gave the winner up and run the default. If it harmed the
    training, its run was one more trial, which failed, and is not made again.

    Args:
        kind: of the event with which they did so; see GIVING_UP.
        next_index: of a trial.
    """
    what, code = GIVING_UP[kind]
    failed: Trial | None = None
    if code == DIVERGED_CODE:
        what = LASTING_HARM
        # It took none of the tuning's time.
        failed = Trial(
            next_index, "search", result.configuration, "failed", failure=f"{what}: {reason}",
            started_at=job.finished_at, ended_at=job.finished_at, round=job.round,
        )  # fmt: skip
    reason = f"{what}: {reason}"
    revoked = replace(
        result, configuration=job.baseline, kept="baseline", speedup=1.0, low=1.0, high=1.0,
        payback_steps=None, peak_bytes=result.default_peak_bytes, reason=reason, reason_code=code,
    )  # fmt: skip
    return replace(revoked, summary=_name_kept(job.baseline, reason, revoked)), failed


def _name_kept(baseline: Configuration, reason: str, result: Result) -> str:
    return f"{describe(baseline)} (the default) kept: {reason}; {_name_cost(result)}"


def _name_memory(result: Result) -> str:
    """``; memory 12.1 GiB (15 %), by default 10.3 GiB (13 %)``; empty where it is not known."""
    device, own, default = result.device_bytes, result.peak_bytes, result.default_peak_bytes
    if device is None or own is None:
        return ""
    text = f"; memory {describe_memory(own, device)}"
    return text if default is None else f"{text}, by default {describe_memory(default, device)}"


def _name_closest(round_: Round) -> str:
    """``; the best of the others, bucket 1 MiB, was 1.01x (0.98 to 1.04), measured again``."""
    found = closest(round_)
    if found is None:
        return ""
    times = describe_speedup(found.speedup.center, *bounds(found.speedup))
    how = ", measured again" if found.was_confirmed else " in the search"
    return f"; the best of the others, {describe(found.configuration)}, was {times}{how}"


def _name_cost(result: Result) -> str:
    """Such as ``9 trials, 130 steps, 31 s; cost 4.1 steps, paid back after 18``."""
    parts = [describe_count(result.trials, "trial")]
    if result.steps:
        parts.append(describe_count(result.steps, "step"))
    text = ", ".join([*parts, f"{result.seconds:.0f} s"])
    if result.cost_seconds:
        text += f"; cost {result.cost_steps:.1f} steps"
    if result.cost_seconds and result.payback_steps is not None:
        text += f", paid back after {result.payback_steps}"
    return text


def _name_default(baseline: Configuration) -> str:
    """``the 25 MiB default``, with its other knobs where they are not the usual ones."""
    others = {item for item in baseline.items() if not is_unused(*item)}
    if {knob for knob, _ in others - {("hierarchical", "off")}} == {"bucket_bytes"}:
        return f"the {describe_bytes(baseline.number('bucket_bytes'))} default"
    return f"the default ({describe(baseline)})"


# All rounds after the first together cost at most so many steps, and this share of those that the
# training made: a machine that changes all the time is not worth following.
FREE_STEPS, COST_SHARE = 20.0, 0.02


def spent_steps(
    job: Job,
    trials: Sequence[Trial],
    observed: Mapping[int, Steps],
    switch_seconds: Mapping[int, float],
) -> float:
    """What the rounds after the first have cost so far.

    Args:
        trials: of all rounds.
        observed, switch_seconds: see ``bill``.
    """
    rounds = (Round.of(job, trials, number) for number in range(1, job.round + 1))
    return sum(bill(each, observed, switch_seconds).cost_steps for each in rounds)


def allowed_steps(observed: Mapping[int, Steps], until: int | None = None) -> float:
    """What they may cost in all.

    Args:
        until: the training's step; None: the last one that was observed.
    """
    if not observed:
        return FREE_STEPS
    last = max(steps.last for steps in observed.values())
    made = max(last, until or 0) - min(steps.first for steps in observed.values())
    return FREE_STEPS + COST_SHARE * made


def refusal(job: Job, spent: float, allowed: float) -> str | None:
    """Why no new round is opened; None if one is. Steps that became faster are as good a reason as
    slower ones: on a faster network what was kept may be slower than the default.

    Args:
        job: finished.
        spent, allowed: see ``spent_steps`` and ``allowed_steps``.
    """
    if job.round + 1 >= job.limits.max_rounds:
        return f"it has been tuned {job.limits.max_rounds} times, which is the limit"
    next_one = spent / max(1, job.round)
    if spent + next_one > allowed:
        return (
            f"that has cost {spent:.3g} steps so far, and with another round may cost "
            f"{allowed:.3g} at most"
        )
    return None
