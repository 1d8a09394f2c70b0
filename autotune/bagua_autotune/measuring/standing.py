"""How fast each configuration of a job is: the default, the best, the lowest.

Decisions look at trials one by one: the first of the default, the one of the lowest cost. The
luckiest of many measurements is too good to be true, so of what is shown the trials of one
configuration are pooled: its standing, and the best. Only trials of one round are compared: between
two rounds the machine changed. A round that is called ``shown`` is the one that is spoken of; see
Round.shown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bagua_autotune.measuring.against_default import Comparison
from bagua_autotune.measuring.rounds import Round, is_settled
from bagua_autotune.model.job import Trial
from bagua_autotune.model.received import Memory, fullest
from bagua_autotune.model.statistics import Estimate, Interval, pooled
from bagua_wire.configuration import Configuration


def lowest(trials: Sequence[Trial]) -> Trial | None:
    """The measured trial of the lowest cost, lucky or not: what an open one is compared with."""
    measured = [(t.estimate.center, t.index, t) for t in trials if t.estimate]
    return min(measured)[2] if measured else None


@dataclass(frozen=True)
class Standing:
    """A configuration, and what all its trials say of its cost."""

    configuration: Configuration
    estimate: Estimate


def standing(trials: Sequence[Trial], configuration: Configuration) -> Estimate | None:
    """Estimate a configuration's cost from its trials; None if none was measured.

    Args:
        trials: of one round.
    """
    found = [t.estimate for t in trials if t.configuration == configuration and t.estimate]
    return pooled(found) if found else None


def memory_of(trials: Sequence[Trial], configuration: Configuration | None) -> Memory | None:
    """The most memory that a configuration took in any of its trials; None where it is unknown."""
    own = (t for t in trials if t.configuration == configuration and t.estimate)
    return fullest(trial.memory for trial in own)


def best(round_: Round) -> Standing | None:
    """The configuration of the lowest cost; what failed is none, unless it is the default."""
    failed = {trial.configuration for trial in round_.trials if trial.is_given_up}
    failed.discard(round_.job.baseline)
    measured: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    for trial in round_.trials:
        if trial.estimate and trial.configuration not in failed:
            measured[trial.configuration].append(trial.estimate)
    standings = (Standing(tried, pooled(found)) for tried, found in measured.items())
    return min(standings, key=_cost, default=None)


def course(round_: Round) -> Iterator[tuple[Trial, Standing | None]]:
    """Yield each trial of a round with what was best after it.

    Its cost rises where a configuration turns out to be slower when it is measured again, or fails.
    """
    measured: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    standings: dict[Configuration, Standing] = {}
    failed: set[Configuration] = set()
    best_now: Standing | None = None
    for trial in round_.trials:
        tried = trial.configuration
        if trial.is_given_up and tried != round_.job.baseline:
            failed.add(tried)
            standings.pop(tried, None)
        elif trial.estimate and tried not in failed:
            measured[tried].append(trial.estimate)
            standings[tried] = Standing(tried, pooled(measured[tried]))
        if best_now is None or best_now.configuration == tried:
            best_now = min(standings.values(), key=_cost, default=None)
        elif tried in standings:
            best_now = min(best_now, standings[tried], key=_cost)
        yield trial, best_now


def _cost(found: Standing) -> float:
    return found.estimate.center


def best_configuration(shown: Round) -> Configuration | None:
    """Return what was kept, or else the best so far; None before something is measured."""
    job = shown.job
    if job.result and is_settled(job):
        return job.result.configuration
    if job.phase == "confirming" and (candidate := being_confirmed(shown)):
        return candidate
    found = best(shown)
    return found.configuration if found else None


def best_trial(shown: Round) -> Trial | None:
    """The first measured one of the best configuration."""
    wanted = best_configuration(shown)
    return next((t for t in shown.trials if t.estimate and t.configuration == wanted), None)


def speedup(shown: Round) -> Interval | None:
    """The speed-up of the result once there is one, else of the best so far over the default beside
    it.

    The latter is not confirmed: that of many configurations which seems the best is partly the
    luckiest. None, too, where it is noise.
    """
    found = _speedup(shown)
    return found and shown.believable(found)


def is_noise(shown: Round) -> bool:
    """Whether the best so far seems faster than is possible."""
    found = _speedup(shown)
    return found is not None and shown.believable(found) is None


def _speedup(shown: Round) -> Interval | None:
    job = shown.job
    if job.result and is_settled(job):
        return Interval(job.result.speedup, job.result.low, job.result.high)
    wanted = best_configuration(shown)
    if wanted == job.baseline:
        return Interval(1.0, 1.0, 1.0)
    found = compare(shown, wanted) if wanted is not None else None
    return found.speedup(shown.objective) if found else None


def being_confirmed(round_: Round) -> Configuration | None:
    """Return what the latest confirmation of a round is, or was, about; None before there is one,
    or where the ranks failed in it."""
    failed = {trial.configuration for trial in round_.trials if trial.is_given_up}
    excluded = failed | {round_.job.baseline}
    confirming = (trial for trial in reversed(round_.trials) if trial.purpose == "confirm")
    return next((t.configuration for t in confirming if t.configuration not in excluded), None)


def compare(round_: Round, configuration: Configuration) -> Comparison | None:
    """Compare all trials of a configuration with the default beside them; None while one of the
    two is not measured."""
    own = [trial for trial in round_.trials if trial.configuration == configuration]
    return round_.defaults.compare(own)


def fastest(
    round_: Round, is_wanted: Callable[[Configuration], bool]
) -> tuple[Configuration, Interval] | None:
    """The measured configuration that is wanted with the highest speed-up over the default beside
    it; None without one. What failed is left out, and what is noise."""
    failed = {trial.configuration for trial in round_.trials if trial.is_given_up}
    compared = (
        (each, faster)
        for each in dict.fromkeys(trial.configuration for trial in round_.trials if trial.estimate)
        if each not in failed
        and is_wanted(each)
        and (found := compare(round_, each))
        and (faster := round_.believable(found.speedup(round_.objective)))
    )
    return max(compared, key=lambda found: found[1].center, default=None)


class Closest(NamedTuple):
    """What came closest to the default where that stays, and how many times as fast it was;
    ``was_confirmed``: both were measured again, and not by trials of the search alone."""

    configuration: Configuration
    speedup: Interval
    was_confirmed: bool


def closest(round_: Round) -> Closest | None:
    """Return what came closest to the default; None where nothing else was measured."""
    confirmed, baseline = being_confirmed(round_), round_.job.baseline
    again = {t.configuration for t in round_.trials if t.purpose == "confirm" and t.estimate}
    found = fastest(round_, lambda configuration: configuration == confirmed) or fastest(
        round_, lambda configuration: configuration != baseline
    )
    return Closest(*found, was_confirmed={found[0], baseline} <= again) if found else None


def bounds(faster: Interval) -> tuple[float | None, float | None]:
    """The bounds that are known.

    Measurements that are alike to the last digit (rounded ones) do not tell how sure they are; only
    that the default is as fast as itself is sure.
    """
    if faster.low == faster.high != 1.0:
        return None, None
    low, high = (bound if math.isfinite(bound) else None for bound in (faster.low, faster.high))
    return low, high
