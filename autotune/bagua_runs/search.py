"""The search: which settings to run next, which are best, and whether they really are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from bagua_autotune.deciding.ending import GAIN_THAT_MATTERS
from bagua_autotune.deciding.room import needs_as_much
from bagua_autotune.model.statistics import Interval
from bagua_autotune.search.bayesian import spread
from bagua_autotune.search.process import Told, first_best, offered
from bagua_runs.outcomes import (
    BASELINE,
    CONFIRM,
    SEARCH,
    Outcome,
    Run,
    banned,
    costs_of,
    deviation,
    lead,
)
from bagua_runs.record import Record
from bagua_runs.space import SearchSpace, Setting
from bagua_wire.configuration import Configuration, Value

if TYPE_CHECKING:
    from bagua_runs.additive import AdditiveProcess

# What is not tried again after failed runs.
#
# A run that had no memory left says something of larger values, too; any other failure only of the
# values that it had.

# A value that never succeeded is not tried again after so many failures.
MOST_FAILURES = 2

Values = frozenset[tuple[str, Value]]
"""Some settings' values."""
Ranks = Mapping[str, float]
"""Of the values of settings that take memory."""


class Failures:
    """What the failed runs rule out.

    Args:
        runs: so far.
        settings: those that are varied.
    """

    def __init__(self, runs: Sequence[Run], settings: Sequence[Setting]) -> None:
        # By the name of a setting that takes memory: see ``Setting.memory_rank``.
        self._rank_of = {
            s.name: {level: s.memory_rank(level) for level in s.levels}
            for s in settings
            if s.takes_memory
        }
        self._failed = banned(runs)
        self._succeeded = {run.configuration for run in runs if run.cost is not None}
        short = [run for run in runs if run.outcome.is_out_of_memory and self._rank_of]
        self._bad = left_out([run for run in runs if run not in short])
        self._too_large = [run.configuration for run in short]
        self._causes = self._found_causes(runs)

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
        return any(needs_as_much(configuration, each, self._rank) for each in self._too_large)

    def _rank(self, name: str, level: Value) -> float:
        return self._rank_of.get(name, {}).get(level, math.nan)

    def _ranks(self, configuration: Configuration) -> Ranks:
        return {name: ranks[configuration[name]] for name, ranks in self._rank_of.items()}

    def _found_causes(self, runs: Sequence[Run]) -> list[Ranks]:
        """For each run that had no memory left: the values that take more than any that fitted.

        Where that is none, all its values together; none at all if something fitted with these or
        larger ones: then it was a setting that is not known to take memory.
        """
        fitted = [self._ranks(run.configuration) for run in runs if run.cost is not None]
        found = []
        for ranks in map(self._ranks, self._too_large):
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


FEWEST_RUNS = 6
# The user's own settings are run again after so many other runs, at first and later.
FIRST_REPEAT, REPEAT = 2, 8
# Of the comparison in turns at the end: so many pairs of runs, and those that are reserved for it.
FEWEST_PAIRS, MOST_PAIRS = 2, 6
KEPT_PAIRS = 3
MANY_RUNS = 15
# In standard deviations of one run.
CLEAR_GAIN = 5.0
# The search ends when the next run is expected to gain less than this part of a step.
ENOUGH = 0.002
# The least gain for which a setting is changed.
WORTH_CHANGING = 0.01
# Settings slower than the user's own by more than this count as just so much slower: the rest says
# nothing about the best.
MOST_COST = 0.7
# A run that takes so many times as long as one with the user's own settings is not the fastest.
PATIENCE = 3.0
LEAST_PATIENCE_SECONDS = 20.0
# Of the time that is left so many runs are spared while it is searched: some take longer.
SPARE_RUNS = 2

LITTLE_TO_GAIN = "none is expected to gain enough"

Runner = Callable[[Mapping[str, str], float], Outcome]
"""Runs the job with other values of some settings, by name, for at most so many seconds."""


class BaselineFailure(Exception):
    """The job fails with the user's own settings; the outcome says how."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.failure)
        self.outcome = outcome


@dataclass(frozen=True)
class Verdict:
    """The result of a search.

    Attributes:
        configuration: the fastest; the user's own settings if nothing was really faster.
        gain: how many times as fast it is; None: nothing was compared.
        is_out_of_time: nothing was compared since the time was over.
        ended: why nothing more was tried, in words.
    """

    configuration: Configuration
    gain: Interval | None = None
    is_out_of_time: bool = False
    ended: str = ""


class SystemSearch:
    """One search; equal outcomes give equal searches.

    Args:
        space: the settings that may be tried.
        run: runs the job.
        most_runs: of all kinds together, at least ``FEWEST_RUNS``.
        timeout_seconds: a run that takes longer counts as failed.
        on_run: called after every run that is made, and not recalled.
        runs: made before.
        record: knows those of an interrupted search, and keeps all further ones.
        most_seconds: the whole search may take, with the comparison in turns at its end.
    """

    def __init__(
        self,
        space: SearchSpace,
        run: Runner,
        most_runs: int = 25,
        timeout_seconds: float = 300.0,
        on_run: Callable[[Run], None] = lambda run: None,
        runs: tuple[Run, ...] = (),
        record: Record | None = None,
        most_seconds: float = math.inf,
    ) -> None:
        self.space = space
        self._knobs, self._numbered = space.numbered()
        self.runs: list[Run] = list(runs)
        self._run = run
        self._most_runs = most_runs
        self._timeout_seconds = timeout_seconds
        self._on_run = on_run
        self._record = record
        self._most_seconds = most_seconds

    def find(self) -> Verdict:
        """Search, then compare the best with the user's own settings in turns.

        Raises:
            BaselineFailure: the job fails with the user's own settings.
        """
        if not self.runs:
            self._run_own(BASELINE)
        while not (ended := self._end_of_search):
            if self._is_own_due:
                self._run_own(BASELINE)
                continue
            upcoming = self._upcoming()
            if upcoming is None:
                ended = LITTLE_TO_GAIN
                break
            self._measure(SEARCH, upcoming)
        while min(self._runs_left, self._timely_runs) >= 2 * FEWEST_PAIRS:
            winner = self.best()
            if winner == self.space.own:
                break
            gain = self._compare(winner)
            if gain is not None:
                is_faster = gain.low > 0
                shown = Interval(*(math.exp(value) for value in (gain.center, gain.low, gain.high)))
                kept = winner if is_faster else self.space.own
                return Verdict(kept, shown, ended=ended)
        is_out_of_time = self._timely_runs < 2 * FEWEST_PAIRS and self.best() != self.space.own
        return Verdict(self.space.own, is_out_of_time=is_out_of_time, ended=ended)

    def best(self) -> Configuration:
        """The fastest settings with the noise accounted for; the user's own if nothing is known."""
        seen = self._seen()
        if not seen:
            return self.space.own
        process = self._process()
        return min(
            self._candidates(),
            key=lambda c: process.mean(c) + WORTH_CHANGING * len(self.space.changes(c)),
        )

    @property
    def untried(self) -> int:
        """How many candidates were not run and are not ruled out by what failed."""
        return len({*self._candidates()} - {run.configuration for run in self.runs})

    @property
    def _end_of_search(self) -> str:
        """Why there is no further run but those of the comparison in turns; empty: there is."""
        kept = 2 * self._kept_pairs
        if self._runs_left <= kept:
            return (
                f"of --runs {self._most_runs} the last {kept} are for the comparison of the best "
                "with your settings in turns; a larger number tries more"
            )
        if self._timely_runs - SPARE_RUNS <= kept:
            return "--minutes leaves time for the comparison of the best in turns only"
        return ""

    @property
    def _runs_left(self) -> int:
        return self._most_runs - len(self.runs)

    @property
    def _seconds_left(self) -> float:
        """Before the next run."""
        spent = self._record.spent_seconds(len(self.runs) + 1) if self._record else 0.0
        return self._most_seconds - spent

    @property
    def _timely_runs(self) -> float:
        """How many runs the time that is left suffices for."""
        seconds, usual = self._seconds_left, self._own_seconds
        return math.inf if math.isinf(seconds) else seconds // max(usual, 1e-9)

    @property
    def _own_seconds(self) -> float:
        """How long a run with the user's own settings takes, at most so far."""
        own = [r.outcome.seconds for r in self.runs if r.configuration == self.space.own]
        return max(own, default=0.0)

    @property
    def _kept_pairs(self) -> int:
        """How many pairs are compared: few for a gain far beyond the difference between
        equal runs.
        """
        if self._most_runs < MANY_RUNS:
            return FEWEST_PAIRS
        process = self._process()
        gain = process.mean(self.space.own) - float(np.min(process.means))
        return FEWEST_PAIRS if gain > CLEAR_GAIN * deviation(self.runs) else KEPT_PAIRS

    @property
    def _is_own_due(self) -> bool:
        own = [i for i, run in enumerate(self.runs) if run.configuration == self.space.own]
        since = len(self.runs) - 1 - own[-1]
        return since >= (FIRST_REPEAT if len(own) == 1 else REPEAT)

    def _upcoming(self) -> Configuration | None:
        """The settings to run next; None: none is expected to gain enough."""
        candidates, seen = self._candidates(), self._seen()
        if len(candidates) == 1:
            return None
        numbered = [self._numbered[candidate] for candidate in candidates]
        offer = offered(self._knobs, numbered)
        first = spread(numbered, {knob: self._knobs[knob] for knob in offer}, offer)
        tried = {self._numbered[told.configuration] for told in seen}
        if len(tried) < len(first):
            return candidates[numbered.index(next(each for each in first if each not in tried))]
        gains = self._process().gains()
        found = first_best(gains)
        return candidates[found] if gains[found] >= ENOUGH else None

    def _process(self) -> AdditiveProcess:
        from bagua_runs.additive import AdditiveProcess  # here: takes long to import

        return AdditiveProcess(self.space.knobs, self._candidates(), self._seen())

    def _candidates(self) -> list[Configuration]:
        own, *others = self.space.candidates
        failures = Failures(self.runs, self.space.settings)
        return [own, *(other for other in others if not failures.rules_out(other))]

    def _seen(self) -> list[Told]:
        """The measured costs of settings that did not fail, with their errors."""
        limit = min(costs_of(self.runs, self.space.own), default=math.inf) + MOST_COST
        noise, failed = deviation(self.runs), banned(self.runs) - {self.space.own}
        found = []
        for run in self.runs:
            if run.cost is not None and run.configuration not in failed:
                within = run.outcome.standard_error
                error = max(noise, within) if math.isfinite(within) else noise
                found.append(Told(run.configuration, min(run.cost, limit), error))
        return found

    def _compare(self, winner: Configuration) -> Interval | None:
        """Run both in turns, until the difference is certain or no runs are left.

        Returns:
            What the winner saves, in logarithms; None: it failed.
        """
        blocks: list[Run] = []
        while self._runs_left or len(blocks) % 2 == 0:
            pairs, is_half = divmod(len(blocks), 2)
            if not is_half and pairs >= FEWEST_PAIRS:
                gain = self._gain(blocks)
                has_runs = min(self._runs_left, self._timely_runs) >= 2
                is_undecided = gain.low <= 0 and gain.high > GAIN_THAT_MATTERS
                if not is_undecided or pairs == MOST_PAIRS or not has_runs:
                    return gain
            if len(blocks) % 4 in (0, 3):
                blocks.append(self._measure(CONFIRM, winner))
                if blocks[-1].cost is None:
                    return None
            else:
                blocks.append(self._run_own(CONFIRM))
        return None

    def _gain(self, blocks: list[Run]) -> Interval:
        costs = [run.cost for run in blocks if run.cost is not None]
        sides = [run.configuration == self.space.own for run in blocks]
        return lead(costs, sides, deviation(self.runs))

    def _run_own(self, purpose: str) -> Run:
        """Run the user's own settings. If they ever succeeded, only a second failure counts."""
        has_run = any(run.configuration == self.space.own for run in self.runs)
        run = self._measure(purpose, self.space.own)
        if run.cost is None and has_run and self._runs_left:
            run = self._measure(purpose, self.space.own)
        if run.cost is None:
            raise BaselineFailure(run.outcome)
        return run

    def _measure(self, purpose: str, configuration: Configuration) -> Run:
        number, settings = len(self.runs) + 1, self.space.settings_of(configuration)
        known = self._record.recalled(number, purpose, settings) if self._record else None
        if known is None and self._record:
            self._record.begins(number, purpose, settings)
        outcome = known or self._run(self.space.changes(configuration), self._patience(purpose))
        if known is None and self._record:
            self._record.ends(number, outcome)
        run = Run(number, purpose, configuration, outcome)
        self.runs.append(run)
        if known is None:
            self._on_run(run)
        return run

    def _patience(self, purpose: str) -> float:
        usual = self._own_seconds
        if not usual:
            return self._timeout_seconds
        patience = min(self._timeout_seconds, max(PATIENCE * usual, LEAST_PATIENCE_SECONDS))
        if purpose == SEARCH:
            # The comparison at the end needs its time.
            patience = min(patience, self._seconds_left - (2 * FEWEST_PAIRS + 1) * usual)
        return patience
