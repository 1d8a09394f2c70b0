"""The search, on jobs that are formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.statistics import Interval
from bagua_runs.asked import searched
from bagua_runs.outcomes import Outcome, Run, lead
from bagua_runs.places import EnvironmentVariable
from bagua_runs.presets import BUFFERS, find_variables
from bagua_runs.report import summary
from bagua_runs.search import SystemSearch, left_out
from bagua_runs.space import CHANNELS, MOST_CONNECTIONS, SOCKETS, THREADS, SearchSpace, Setting
from bagua_wire.configuration import Configuration
from tests.runs.recorded import BEST_SPEED, MIB, PlantedJob, speed

pytestmark = pytest.mark.slow

NCCL = SearchSpace(find_variables("nccl", False, {}))


def test_a_planted_optimum_is_found_within_25_runs() -> None:
    reached = []
    for seed in range(20):
        job = PlantedJob(seed)
        search = SystemSearch(NCCL, job, most_runs=25)
        verdict = search.find()
        assert len(job.environments) == len(search.runs) <= 25
        assert verdict.gain is not None
        assert verdict.gain.low > 1
        reached.append(speed(NCCL.changes(verdict.configuration)) / BEST_SPEED)
    # Not each time: runs differ by 5 %, and there are about 15 of them for 400 candidates.
    assert sum(part >= 0.98 for part in reached) >= 18
    assert min(reached) >= 0.94


def test_nothing_is_kept_that_is_not_faster() -> None:
    """Where no variable matters, what was luckiest is confirmed by nothing."""
    space = SearchSpace(
        [
            Setting(EnvironmentVariable("A"), ("1", "2", "4")),
            Setting(EnvironmentVariable("B"), ("x", "y")),
        ]
    )

    class Indifferent(PlantedJob):
        def __call__(self, environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
            self.environments.append(environment)
            score = math.exp(self._random.gauss(0.0, 0.02))
            return Outcome(score, -math.log(score), seconds=1.0)

    kept = [SystemSearch(space, Indifferent(seed), 15).find() for seed in range(20)]
    # The interval is one of 95 %.
    assert sum(verdict.configuration != space.own for verdict in kept) <= 1


def test_the_users_own_settings_are_first_and_come_again() -> None:
    job = PlantedJob(1)
    SystemSearch(NCCL, job).find()
    own = [place for place, environment in enumerate(job.environments) if environment == {}]
    assert own[0] == 0
    assert len(own) >= 5
    # At the end in turns.
    winner, *rest = job.environments[-4:]
    assert [e == {} for e in (winner, *rest)] == [False, True, True, False]
    assert rest[-1] == winner


def test_a_job_that_fails_once_with_settings_that_ran_is_run_again() -> None:
    job = PlantedJob(0)
    times = 0

    def flaky(environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
        nonlocal times
        times += not environment
        if not environment and times == 2:
            return Outcome(failure="lost its network", seconds=1.0)
        return job(environment, timeout_seconds)

    search = SystemSearch(NCCL, flaky)
    verdict = search.find()
    assert verdict.gain is not None
    assert len(search.runs) <= 25


def test_a_run_is_given_up_once_it_cannot_be_the_fastest() -> None:
    limits = []

    def job(environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
        limits.append(timeout_seconds)
        return Outcome(1.0, 0.0, seconds=40.0)

    SystemSearch(NCCL, job, most_runs=8, timeout_seconds=300).find()
    assert limits[0] == 300
    assert set(limits[1:]) == {120}


def _run(failed: bool, **values: int) -> Run:
    outcome = Outcome(failure="crashed") if failed else Outcome(1.0, 0.0)
    return Run(1, "search", Configuration(values), outcome)


def test_a_value_that_never_succeeded_is_left_out_after_two_failures() -> None:
    runs = [_run(False, a=1, b=1), _run(True, a=2, b=1)]
    assert left_out(runs) == []
    runs.append(_run(True, a=2, b=2))
    assert left_out(runs) == [{("a", 2)}]


def test_values_that_fail_together_only_are_left_out_together() -> None:
    runs = [_run(False, a=2, b=1, c=1), _run(False, a=1, b=2, c=1)]
    runs += [_run(False, a=1, b=1, c=c) for c in (2, 3)]
    runs += [_run(True, a=2, b=2, c=c) for c in (2, 3)]
    assert left_out(runs) == [{("a", 2), ("b", 2)}]


def test_connections_are_counted_over_nccl_and_our_channels() -> None:
    space = SearchSpace(find_variables("nccl", True, {}))
    products = {
        int(e.get(THREADS, 1)) * int(e.get(SOCKETS, 1)) * int(e.get(CHANNELS, 1))
        for e in map(space.changes, space.candidates)
    }
    assert max(products) == MOST_CONNECTIONS
    assert {c.number("connections") for c in space.candidates} == products


def test_which_variables_there_are() -> None:
    def names(*args: bool | str, **more: object) -> list[str]:
        return [v.name for v in find_variables(*args, {}, **more)]  # type: ignore[arg-type]

    assert names("gloo", False) == []
    assert names("gloo", True) == [CHANNELS]
    assert names("gloo", False, only=[CHANNELS]) == [CHANNELS]
    assert names("gloo", False, interfaces=["eth0", "eth1"]) == ["GLOO_SOCKET_IFNAME"]
    known = {setting.name: setting for setting in find_variables("nccl", False, {})}
    assert [setting.name for setting in searched(known, [THREADS])] == [THREADS]
    with pytest.raises(ValueError, match="--only NCCL_ALGO: that is not varied; varied are"):
        searched(known, ["NCCL_ALGO"])


def _two_switches() -> SearchSpace:
    return SearchSpace([Setting(EnvironmentVariable(name), ("0", "1"), "0") for name in "AB"])


def test_a_search_that_leaves_out_combinations_says_why() -> None:
    """It ended after two of six runs, and said only that nothing was faster."""

    def job(changes: Mapping[str, str], timeout_seconds: float) -> Outcome:
        if changes:
            return Outcome(failure="ended with exit code 1", seconds=1.0, exit_code=1)
        return Outcome(1.0, 0.0, seconds=1.0)

    search = SystemSearch(_two_switches(), job, most_runs=6)
    said = summary(search, search.find())
    assert len(search.runs) == 2
    assert search.untried == 2
    assert said.startswith("no run with other settings succeeded; the last, ")
    assert said.endswith("; 2 of 4 combinations were not tried: of --runs 6 the last 4 are for the "
                         "comparison of the best with your settings in turns; a larger number "
                         "tries more")  # fmt: skip


def test_what_is_set_already_is_left_as_it_is() -> None:
    own = {THREADS: "4", BUFFERS.name: "auto"}
    known = {setting.name: setting for setting in find_variables("nccl", False, own)}
    space = SearchSpace(searched(known, [THREADS, BUFFERS.name]))
    assert space.changes(space.own) == {}
    given = [space.changes(candidate) for candidate in space.candidates]
    assert {e.get(THREADS) for e in given} == {None, "1", "2", "8"}
    # A word among numbers: its place among them is not known.
    assert {e.get(BUFFERS.name) for e in given} == {None, *(str(n * MIB) for n in (1, 2, 4, 8, 16))}


def lead_of(*costs: float, noise: float = 0.001) -> Interval:
    """Of runs in the order A B B A ..."""
    return lead(costs, [place % 4 in (0, 3) for place in range(len(costs))], noise)


def test_few_runs_and_such_as_differ_say_less() -> None:
    steady = lead_of(1.0, 0.9, 0.9, 1.0, 1.0, 0.9)
    assert steady.center == pytest.approx(0.1)
    assert steady.low > 0 > lead_of(1.1, 1.0, 0.8, 0.9, 1.1, 0.9).low
    assert lead_of(1.0, 0.97, 0.97, 1.0).low < 0 < lead_of(*[1.0, 0.97, 0.97, 1.0] * 3).low
    assert lead_of(1.0, 0.9, 0.9, 1.0, 1.0, 0.9, noise=0.2).low < 0


@given(st.floats(-1, 1), st.floats(-1e3, 1e3), st.floats(-0.1, 0.1))
def test_a_steady_drift_changes_nothing(gain: float, start: float, drift: float) -> None:
    sides = [place % 4 in (0, 3) for place in range(6)]
    found = lead_of(*(start + drift * place + gain * side for place, side in enumerate(sides)))
    assert found.center == pytest.approx(gain, abs=1e-9)
    assert 0 < found.high - found.low < 0.07


@pytest.mark.parametrize("between", [0.0, 0.03])
def test_a_lead_that_is_looked_at_after_each_pair_holds_the_truth(between: float) -> None:
    """Whoever stops as soon as it is clear of 0 stops on lucky runs, too."""
    rng = random.Random(1)
    held = stopped = 0
    for _ in range(300):
        costs: list[float] = []
        found = None
        for place in range(12):
            costs.append(-0.05 * (place % 4 in (1, 2)) + rng.gauss(0, math.hypot(between, 0.008)))
            if place in (3, 5, 7, 9, 11):
                found = lead_of(*costs)
                if found.low > 0:
                    break
        if found is not None and found.low > 0:
            stopped += 1
            held += found.low <= 0.05 <= found.high
    assert stopped > 150
    assert held / stopped >= 0.93
