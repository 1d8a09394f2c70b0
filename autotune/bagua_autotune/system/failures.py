"""What is not tried again after failed runs.

A run that had no memory left says something of larger values, too; any other failure only of the
values that it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

from bagua_autotune.model.knobs import Configuration, Value
from bagua_autotune.system.running.runs import Run, banned
from bagua_autotune.system.settings.setting import Setting

# A value that never succeeded is not tried again after so many failures.
MOST_FAILURES = 2

Values = frozenset[tuple[str, Value]]
"""Some settings' values."""
Ranks = Mapping[str, float]
"""Of settings that take memory: see ``Setting.memory_rank``."""


class Failures:
    """What the failed runs rule out.

    Args:
        runs: so far.
        settings: those that are varied.
    """

    def __init__(self, runs: Sequence[Run], settings: Sequence[Setting]) -> None:
        self._memory = [setting for setting in settings if setting.takes_memory]
        self._failed = banned(runs)
        self._succeeded = {run.configuration for run in runs if run.cost is not None}
        short = [run for run in runs if run.outcome.is_out_of_memory and self._memory]
        self._bad = left_out([run for run in runs if run not in short])
        self._too_large = {run.configuration: self._ranks(run.configuration) for run in short}
        self._causes = self._found_causes(runs, short)

    def rules_out(self, configuration: Configuration) -> bool:
        """Whether a configuration is not tried (again)."""
        if configuration in self._failed or configuration in self._succeeded:
            return configuration in self._failed
        if any(values <= configuration.items() for values in self._bad):
            return True
        if not self._too_large:
            return False
        ranks = self._ranks(configuration)
        if sum(_reaches(ranks, cause) for cause in self._causes) >= MOST_FAILURES:
            return True
        return any(
            _reaches(ranks, least) and all(
                configuration[name] == value for name, value in failed.items() if name not in least
            )
            for failed, least in self._too_large.items()
        )  # fmt: skip

    def _ranks(self, configuration: Configuration) -> Ranks:
        return {s.name: s.memory_rank(configuration[s.name]) for s in self._memory}

    def _found_causes(self, runs: Sequence[Run], short: Sequence[Run]) -> list[Ranks]:
        """For each run that had no memory left: the values that take more than any that fitted.

        Where that is none, all its values together; none at all if something fitted with these or
        larger ones: then it was a setting that is not known to take memory.
        """
        fitted = [self._ranks(run.configuration) for run in runs if run.cost is not None]
        found = []
        for run in short:
            ranks = self._ranks(run.configuration)
            beyond = {
                name: rank
                for name, rank in ranks.items()
                if not any(other[name] >= rank for other in fitted)
            }
            cause = beyond or ranks
            if not any(_reaches(other, cause) for other in fitted):
                found.append(cause)
        return found


def _reaches(ranks: Ranks, least: Ranks) -> bool:
    """Whether each value takes as much memory as another or more; what is not known does not."""
    return all(ranks[name] >= rank for name, rank in least.items())


def left_out(runs: Sequence[Run]) -> list[Values]:
    """Values, and pairs of values, that always fail.

    Each failure is blamed on values that never succeeded: first on the one that most failures have
    in common, a single value before a pair, then the same for the remaining failures.
    """
    succeeded = {part for run in runs if run.cost is not None for part in _parts(run)}
    unexplained = [_parts(run) - succeeded for run in runs if run.cost is None]
    found: list[Values] = []
    while True:
        counts = Counter(part for failure in unexplained for part in failure)
        if not counts or max(counts.values()) < MOST_FAILURES:
            return found
        # Among equals the choice must not depend on hashes.
        ranked = sorted(counts, key=lambda part: (-counts[part], len(part), sorted(map(str, part))))
        found.append(ranked[0])
        unexplained = [failure for failure in unexplained if ranked[0] not in failure]


def _parts(run: Run) -> set[Values]:
    values = run.configuration.items()
    return {frozenset(part) for size in (1, 2) for part in combinations(values, size)}
