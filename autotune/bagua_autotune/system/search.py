"""The search: which settings to run next, which are best, and whether they really are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate, Interval, difference
from bagua_autotune.search import Problem, make_searcher
from bagua_autotune.search.points import first_best
from bagua_autotune.system.additive import AdditiveProcess, Seen
from bagua_autotune.system.failures import Failures
from bagua_autotune.system.log import Log, NoLog
from bagua_autotune.system.running.runs import (
    BASELINE,
    CONFIRM,
    SEARCH,
    Outcome,
    Run,
    banned,
    costs_of,
    deviation,
)
from bagua_autotune.system.space import SearchSpace

FEWEST_RUNS = 6
# The user's own settings are run again after so many other runs, at first and later.
FIRST_REPEAT, REPEAT = 2, 8
FEWEST_PAIRS, MOST_PAIRS = 2, 5
# Runs reserved for the comparison in turns at the end.
KEPT_PAIRS = 3
MANY_RUNS = 15
# In standard deviations of one run.
CLEAR_GAIN = 5.0
# The search ends when the next run is expected to gain less than this part of a step.
ENOUGH = 0.002
GAIN_THAT_MATTERS = 0.01
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
    """One search.

    Args:
        space: the settings that may be tried.
        run: runs the job.
        most_runs: of all kinds together, at least ``FEWEST_RUNS``.
        timeout_seconds: a run that takes longer counts as failed.
        seed: equal seeds and outcomes give equal searches.
        on_run: called after every run that is made, and not recalled.
        runs: made before.
        log: keeps all further ones.
        most_seconds: the whole search may take, with the comparison in turns at its end.
    """

    def __init__(
        self,
        space: SearchSpace,
        run: Runner,
        most_runs: int = 25,
        timeout_seconds: float = 300.0,
        seed: int = 0,
        on_run: Callable[[Run], None] = lambda run: None,
        runs: tuple[Run, ...] = (),
        log: Log = NoLog(),  # noqa: B008  (it has no state)
        most_seconds: float = math.inf,
    ) -> None:
        self.space = space
        self._knobs, self._numbered = space.numbered()
        self.runs: list[Run] = list(runs)
        self._run = run
        self._most_runs = most_runs
        self._timeout_seconds = timeout_seconds
        self._seed = seed
        self._on_run = on_run
        self._log = log
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
        return self._most_seconds - self._log.spent_seconds(len(self.runs) + 1)

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
        searcher = make_searcher("bayesian", Problem(self._knobs, numbered, self._seed))
        for configuration, cost, error in seen:
            searcher.tell(self._numbered[configuration], cost, error)
        if len({s.configuration for s in seen}) < searcher.initial_trials:
            return candidates[numbered.index(searcher.ask())]
        gains = self._process().gains()
        found = first_best(gains)
        return candidates[found] if gains[found] >= ENOUGH else None

    def _process(self) -> AdditiveProcess:
        return AdditiveProcess(self.space.knobs, self._candidates(), self._seen())

    def _candidates(self) -> list[Configuration]:
        own, *others = self.space.candidates
        failures = Failures(self.runs, self.space.settings)
        return [own, *(other for other in others if not failures.rules_out(other))]

    def _seen(self) -> list[Seen]:
        """The measured costs of settings that did not fail, with their errors."""
        limit = min(costs_of(self.runs, self.space.own), default=math.inf) + MOST_COST
        noise, failed = deviation(self.runs), banned(self.runs) - {self.space.own}
        found = []
        for run in self.runs:
            if run.cost is not None and run.configuration not in failed:
                within = run.outcome.standard_error
                error = max(noise, within) if math.isfinite(within) else noise
                found.append(Seen(run.configuration, min(run.cost, limit), error))
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
                is_undecided = gain.low <= 0 and gain.high > GAIN_THAT_MATTERS
                has_runs = min(self._runs_left, self._timely_runs) >= 2
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
        noise = deviation(self.runs)
        estimates = [Estimate(run.cost, noise, 1) for run in blocks if run.cost is not None]
        return difference(estimates, [run.configuration == self.space.own for run in blocks])

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
        outcome = self._log.recalled(number, purpose, settings)
        if outcome is not None:
            self.runs.append(Run(number, purpose, configuration, outcome))
            return self.runs[-1]
        self._log.begins(number, purpose, settings)
        outcome = self._run(self.space.changes(configuration), self._patience(purpose))
        self._log.ends(number, outcome)
        run = Run(number, purpose, configuration, outcome)
        self.runs.append(run)
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
