"""The figures of a job: how fast it is, how sure that is, what the search cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.deciding.result import Bill, bill
from bagua_autotune.measuring.rounds import Round, is_settled
from bagua_autotune.measuring.standing import (
    best_configuration,
    bounds,
    compare,
    is_noise,
    memory_of,
    speedup,
    standing,
)
from bagua_autotune.model.job import RUNS
from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.view import View
from bagua_autotune.views.reading import Reading
from bagua_autotune.views.steps import exposed_seconds, rank_spread, step_seconds
from bagua_wire.profile import Profile


@dataclass(frozen=True)
class Spent:
    """``seconds``: from the first trial to the end of the last; ``bill``: its steps, and what they
    lost against the default."""

    seconds: float
    bill: Bill


def spent(reading: Reading, number: int) -> Spent:
    """Return what one round has cost so far."""
    round_ = Round.of(reading.job, reading.trials, number)
    return Spent(round_.seconds, bill(round_, reading.steps, reading.switch_seconds))


def saved_rank_seconds(reading: Reading) -> float | None:
    """How much time of its ranks tuning has saved the job, over all rounds: negative as long as
    the searches have cost more than the confirmed speed-ups have saved.

    A job of 8 ranks that has trained for an hour less saves 8 rank-hours, which are GPU-hours where
    each rank has a GPU. Only steps that its ranks told of count (see saved_until), so it lags by
    up to ten minutes. None where nothing is measured yet, where the ranks tell no seconds, and of
    a search with whole runs, which trains nothing.
    """
    job = reading.job
    has_seconds = reading.objective.seconds(0.0) is not None and job.protocol not in RUNS
    first = Round.of(job, reading.trials, 0)
    if not has_seconds or first.defaults.first is None:
        return None
    costs = (spent(reading, number).bill.cost_seconds for number in range(job.round + 1))
    return (job.saved.seconds - sum(costs)) * job.world_size


class Figures(View):
    """Null where not (yet) known. Seconds are per step, of the slowest rank.

    All are of one round: the result's own, or the latest while the job is being tuned.

    Attributes:
        baseline_seconds: of the default; see ``step_pair``.
        incumbent_seconds: of the best configuration so far, or once tuned of what was kept.
            ``baseline_seconds`` over this is ``speedup``, unless that is noise.
        current_seconds: median of the latest steps that were reported of what runs now.
        speedup: over the default; of the result once tuned, else of the best so far, which is not
            confirmed yet. None, too, where it is noise.
        speedup_low, speedup_high: the result's 95 % interval; before, the widest that those of the
            best and of the default allow, which does not count that the best of many is partly
            the luckiest. None without a spread to take it from.
        search_steps, search_seconds: from the round's first trial to the end of its last.
        cost_seconds, cost_steps: that the search lost in it against the default.
        payback_steps: after how many steps that is earned; before the end, if it ended now.
        ceiling: the most that ``speedup`` can be, if no communication were exposed and computing
            took as long as in the default's steps; the upper end of its 95 % interval. None, too,
            if the result is above it: computing takes less time then.
        is_noise: what seems the best is faster than that, and not confirmed.
        exposed_seconds: communication that computing does not hide, in the latest steps, which are
            of what runs now.
        default_exposed_seconds: the same of the default.
        rank_spread_ratio: what the slowest rank computes longer than the middle one, in parts
            of a step.
        slowest_rank: that was slowest most often in the latest steps.
        slowest_share: of them, in which it was.
        slow_rank: that rank if it is worth a warning: the spread is over 10 % of a step, and it is
            the slowest in at least half of these steps, which is more often than chance explains.
        default_peak_bytes, peak_bytes: the memory that the default and the best configuration, or
            what was kept, take at their peak on the fullest rank.
        device_bytes: what there is for that rank.
    """

    baseline_seconds: float | None
    incumbent_seconds: float | None
    current_seconds: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    search_steps: int
    search_seconds: float
    cost_seconds: float | None
    cost_steps: float | None
    payback_steps: int | None
    ceiling: float | None = None
    is_noise: bool = False
    exposed_seconds: float | None
    default_exposed_seconds: float | None = None
    rank_spread_ratio: float | None
    slowest_rank: int | None
    slowest_share: float | None
    slow_rank: int | None
    default_peak_bytes: int | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None


def make_figures(reading: Reading, profiles: Sequence[Profile]) -> Figures:
    """Sum a job up.

    Args:
        profiles: of its newest profiled trial, where the ranks do not tell what they compute.
    """
    job, objective = reading.job, reading.objective
    faster = speedup(reading.shown)
    before_seconds, best_seconds = step_pair(reading)
    has_seconds = objective.seconds(0.0) is not None
    latest = reading.latest if has_seconds else ()
    low, high = bounds(faster) if faster else (None, None)
    spread = rank_spread(latest)
    search = spent(reading, reading.shown.number)
    cost = search.bill
    default_memory = memory_of(reading.shown.trials, job.baseline)
    memory = memory_of(reading.shown.trials, best_configuration(reading.shown))
    told = memory or default_memory
    is_known, ceiling = before_seconds is not None, reading.shown.ceiling
    return Figures(
        baseline_seconds=before_seconds,
        incumbent_seconds=best_seconds,
        current_seconds=reading.drifted_seconds or step_seconds(latest),
        speedup=faster.center if faster else None,
        speedup_low=low,
        speedup_high=high,
        search_steps=cost.steps,
        search_seconds=search.seconds,
        cost_seconds=cost.cost_seconds if is_known else None,
        cost_steps=cost.cost_steps if is_known else None,
        payback_steps=_payback_steps(reading, cost, faster) if is_known else None,
        ceiling=reading.shown.most_speedup,
        is_noise=is_noise(reading.shown),
        exposed_seconds=exposed_seconds(latest, profiles) if job.world_size > 1 else None,
        default_exposed_seconds=ceiling.exposed_seconds if ceiling else None,
        rank_spread_ratio=spread.ratio if spread else None,
        slowest_rank=spread.slowest_rank if spread else None,
        slowest_share=spread.slowest_share if spread else None,
        slow_rank=spread.slow_rank if spread else None,
        default_peak_bytes=default_memory.peak_bytes if default_memory else None,
        peak_bytes=memory.peak_bytes if memory else None,
        device_bytes=told.device_bytes if told else None,
    )


def step_pair(reading: Reading) -> tuple[float | None, float | None]:
    """Seconds of a step, of the default and of the best or of what was kept: the one over the other
    is the speed-up. None where they are not known, or costs are no times.

    While the job is being tuned: what was measured of the best, and of the default beside it. Of a
    result: its speed-up comes from all trials, with a drift of the machine taken out; the two times
    lie around the middle of what the confirmation measured of both.
    """
    job, shown, objective = reading.job, reading.shown, reading.objective
    kept = best_configuration(shown)
    if objective.seconds(0.0) is None or kept is None:
        return None, None
    result = job.result if is_settled(job) else None
    if result is None:
        compared = compare(shown, kept)
        default = compared.default if compared else None
        best = compared.measured if compared else standing(shown.trials, kept)
    else:
        decisive = [t for t in shown.trials if t.purpose == "confirm" and t.estimate]
        if not {job.baseline, kept} <= {trial.configuration for trial in decisive}:
            decisive = [*shown.trials]
        default, best = standing(decisive, job.baseline), standing(decisive, kept)
    before = None if default is None else objective.seconds(default.center)
    after = None if best is None else objective.seconds(best.center)
    if result is None or before is None or after is None:
        return before, after
    middle, root = math.sqrt(before * after), math.sqrt(result.speedup)
    return middle * root, middle / root


def _payback_steps(reading: Reading, cost: Bill, faster: Interval | None) -> int | None:
    job = reading.job
    if job.result and is_settled(job) and job.result.kept == "baseline":
        return None
    return cost.payback_steps(faster.center) if faster else None
