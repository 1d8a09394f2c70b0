"""How fast each configuration is, from all its trials of a round: what is shown of a job.

The luckiest of many measurements is too good to be true, so the trials of one configuration are
pooled. The decisions themselves look at trials one by one (see decision, confirmation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate, pooled


@dataclass(frozen=True)
class Standing:
    """A configuration, and what all its trials say of its cost."""

    configuration: Configuration
    estimate: Estimate


def standing(trials: Sequence[Trial], configuration: Configuration) -> Estimate | None:
    """What the trials of a configuration say of its cost; None if none was measured.

    Args:
        trials: of one round.
    """
    found = [t.estimate for t in trials if t.configuration == configuration and t.estimate]
    return pooled(found) if found else None


def best(job: Job, trials: Sequence[Trial]) -> Standing | None:
    """The configuration of the lowest cost; what failed is none, unless it is the baseline.

    Args:
        trials: of one round.
    """
    failed = {trial.configuration for trial in trials if trial.state == "failed"} - {job.baseline}
    measured: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    for trial in trials:
        if trial.estimate and trial.configuration not in failed:
            measured[trial.configuration].append(trial.estimate)
    standings = (Standing(tried, pooled(found)) for tried, found in measured.items())
    return min(standings, key=_cost, default=None)


def course(job: Job, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Standing | None]]:
    """What was best after each trial of a round.

    Its cost rises where a configuration turns out to be slower when it is measured again, or fails.
    """
    measured: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    standings: dict[Configuration, Standing] = {}
    failed: set[Configuration] = set()
    leader: Standing | None = None
    for trial in trials:
        tried = trial.configuration
        if trial.state == "failed" and tried != job.baseline:
            failed.add(tried)
            standings.pop(tried, None)
        elif trial.estimate and tried not in failed:
            measured[tried].append(trial.estimate)
            standings[tried] = Standing(tried, pooled(measured[tried]))
        if leader is None or leader.configuration == tried:
            leader = min(standings.values(), key=_cost, default=None)
        elif tried in standings:
            leader = min(leader, standings[tried], key=_cost)
        yield trial, leader


def _cost(found: Standing) -> float:
    return found.estimate.center
