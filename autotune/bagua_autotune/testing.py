"""What every search method keeps, ours and a stranger's, as tests for pytest::

    from bagua_autotune.testing import SearcherContract
    from grid import Grid

    class TestGrid(SearcherContract):
        searcher = Grid

Of the package contracts alone need pytest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from bagua_autotune.costs.layouts import Floats
from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_autotune.search import Judges, Predicts, Problem, Searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.search.searcher import Factory
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor

MIB = 1024**2
TENSORS = [
    Tensor(name=f"layer{index}", elements=100_000, bytes=400_000, dtype="f32", group="f32/cpu")
    for index in range(250)
]
SIZES = LogInteger(low=65536, high=1024 * MIB)
WAYS = Categorical(values=("off", "leaders", "shards"))
CHANNELS = Categorical(values=("1", "2", "4"))
NUMBERS = Categorical(values=(1, 2, 4))
JOB: Space = {"bucket_bytes": SIZES, "hierarchical": Categorical(values=("off", "leaders"))}
BASELINE = Configuration(bucket_bytes=25 * MIB, hierarchical="off")
CANDIDATES = enumerate_candidates(JOB, BASELINE, TENSORS)


def cost_of(configuration: Configuration) -> float:
    """Log seconds of a step: lowest at 4 MiB, by node."""
    distance = math.log2(configuration.number("bucket_bytes") / (4 * MIB))
    by_node = 0.93 if configuration["hierarchical"] != "off" else 1.0
    return math.log(0.2 * (1 + 0.02 * distance**2) * by_node)


@dataclass
class RoughModel:
    """A cost model that is off by some per cent."""

    misfit: float = 0.03

    def predict(self, configurations: Sequence[Configuration]) -> Floats:
        errors = [random.Random(str(c)).gauss(0.0, self.misfit) for c in configurations]
        return np.array([cost_of(c) for c in configurations]) + errors

    def deviations(self, configurations: Sequence[Configuration]) -> Floats:
        return np.zeros((0, len(configurations)))


def drive(searcher: Searcher, trials: int, noise: float = 0.0) -> list[Configuration]:
    """Trials of what the searcher asks for, which are returned."""
    rng, asked = random.Random(7), []
    for _ in range(trials):
        asked.append(searcher.ask())
        searcher.tell(asked[-1], cost_of(asked[-1]) + rng.gauss(0, noise), noise or 0.001)
    return asked


class SearcherContract:
    """Derive a class from it whose name begins with Test.

    Attributes:
        searcher: the class, or what else makes a searcher for a problem.
    """

    searcher: Factory

    @pytest.fixture(params=["without a cost model", "with a cost model"])
    def problem(self, request: pytest.FixtureRequest) -> Problem:
        model = RoughModel() if request.param == "with a cost model" else None
        return Problem(JOB, CANDIDATES, predictor=model)

    def make(self, problem: Problem) -> Searcher:
        return type(self).searcher(problem)

    def test_the_default_is_asked_first_and_only_candidates_are(self, problem: Problem) -> None:
        asked = drive(self.make(problem), 15)
        assert asked[0] == BASELINE
        assert set(asked) <= set(CANDIDATES)

    def test_what_is_believed_is_what_the_search_goes_by(self, problem: Problem) -> None:
        searcher = self.make(problem)
        if not isinstance(searcher, Predicts):
            pytest.skip("it has no model to show")
        assert searcher.predict(CANDIDATES) == []
        asked = drive(searcher, 12, noise=0.005)
        believed = dict(zip(CANDIDATES, searcher.predict(CANDIDATES), strict=True))
        for configuration, interval in believed.items():
            assert interval.low < interval.center < interval.high
            assert interval.center == pytest.approx(searcher.expected_cost(configuration))
        best = min(asked, key=lambda configuration: believed[configuration].center)
        assert best == searcher.best()
        # Of what was measured more is known than of anything else.
        widths = {c: found.high - found.low for c, found in believed.items()}
        assert max(widths[c] for c in asked) < max(widths.values())

    def test_a_gain_is_claimed_of_what_is_faster(self, problem: Problem) -> None:
        searcher = self.make(problem)
        if not isinstance(searcher, Judges):
            pytest.skip("the usual search judges for it")
        searcher.tell(BASELINE, 0.0, 0.01)
        assert searcher.gain(CANDIDATES[1], BASELINE).low == -math.inf
        for cost, configuration in ((-0.3, CANDIDATES[1]), (0.3, CANDIDATES[2])):
            searcher.tell(configuration, cost, 0.01)
            searcher.tell(configuration, cost, 0.01)
        searcher.tell(BASELINE, 0.0, 0.01)
        faster, slower = (searcher.gain(c, BASELINE) for c in CANDIDATES[1:3])
        assert 0 < faster.low < faster.center < faster.high
        assert slower.low < slower.center < slower.high < 0

    @pytest.mark.parametrize(
        "space",
        [
            {"bucket_bytes": SIZES},
            {"bucket_bytes": SIZES, "hierarchical": Categorical(values=("off",))},
            {"bucket_bytes": SIZES, "hierarchical": WAYS},
            {"bucket_bytes": SIZES, "channels": NUMBERS},
            {"bucket_bytes": SIZES, "hierarchical": WAYS, "channels": CHANNELS},
        ],
        ids=lambda space: " x ".join(f"{knob} {domain}" for knob, domain in space.items()),
    )
    def test_a_space_of_any_knobs_can_be_searched(self, space: Space) -> None:
        baseline = Configuration(
            {
                knob: domain.values[0] if isinstance(domain, Categorical) else 25 * MIB
                for knob, domain in space.items()
            }
        )
        candidates = enumerate_candidates(space, baseline, TENSORS)
        searcher = self.make(Problem(space, candidates))
        for trial in range(searcher.initial_trials + 3):
            asked = searcher.ask()
            assert asked in candidates
            cost = math.log(0.2) + 0.01 * candidates.index(asked) + 0.001 * trial
            searcher.tell(asked, cost, 0.01)
        assert math.isfinite(searcher.expected_gain())
        assert all(math.isfinite(searcher.expected_cost(candidate)) for candidate in candidates)
        assert searcher.best() in candidates

    def test_equal_seeds_and_tells_give_equal_answers(self, problem: Problem) -> None:
        first, second = (self.make(replace(problem, seed=3)) for _ in range(2))
        assert drive(first, 10, 0.02) == drive(second, 10, 0.02)
        assert first.best() == second.best()
        assert first.expected_gain() == second.expected_gain()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_refused_and_does_no_harm(
        self, problem: Problem, bad: float
    ) -> None:
        searcher = self.make(problem)
        drive(searcher, 6)
        with pytest.raises(ValueError, match="finite"):
            searcher.tell(BASELINE, bad, 0.1)
        drive(searcher, 2)
        assert searcher.best() in CANDIDATES

    def test_an_unknown_error_and_a_foreign_configuration_are_taken(self, problem: Problem) -> None:
        """Such as one that was banned since."""
        searcher = self.make(replace(problem, candidates=CANDIDATES[:20]))
        searcher.tell(CANDIDATES[-1], -9.0, math.inf)
        drive(searcher, 8)
        assert searcher.best() in CANDIDATES[:20]

    def test_costs_without_any_difference_or_of_any_size_are_taken(self, problem: Problem) -> None:
        for scale in (0.0, 1e-9, 1e9):
            searcher = self.make(problem)
            for turn in range(8):
                searcher.tell(searcher.ask(), scale * (turn % 3), 0.0)
            assert searcher.ask() in CANDIDATES
            assert math.isfinite(searcher.expected_gain())

    def test_without_a_measured_candidate_there_is_no_best(self, problem: Problem) -> None:
        searcher = self.make(problem)
        assert searcher.expected_gain() == math.inf
        with pytest.raises(LookupError):
            searcher.best()
        searcher.tell(BASELINE, 1.0, 0.1)
        assert searcher.best() == BASELINE

    def test_a_single_candidate_is_asked_again(self, problem: Problem) -> None:
        searcher = self.make(replace(problem, candidates=[BASELINE]))
        assert drive(searcher, 3) == [BASELINE] * 3
        assert searcher.best() == BASELINE

    def test_a_space_of_names_alone_is_searched(self) -> None:
        candidates = [
            Configuration(reduce=way, channels=channels)
            for way in ("leaders", "off", "shards")
            for channels in ("1", "2")
        ]
        searcher = self.make(Problem({"reduce": WAYS, "channels": CHANNELS}, candidates))
        costs = {"off": 3.0, "leaders": 2.0, "shards": 1.0}
        for _ in range(8):
            asked = searcher.ask()
            searcher.tell(asked, costs[str(asked["reduce"])], 0.1)
        assert searcher.best()["reduce"] == "shards"

    def test_what_is_expected_to_be_gained_falls(self, problem: Problem) -> None:
        searcher = self.make(problem)
        drive(searcher, searcher.initial_trials + 1, 0.01)
        early = searcher.expected_gain()
        drive(searcher, 12, 0.01)
        assert 0 <= searcher.expected_gain() < early
