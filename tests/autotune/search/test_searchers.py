"""The contract that every search method keeps, and what each promises beyond it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_autotune.search import Predicts, Problem, Searcher, make_searcher, names
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_wire.configuration import Configuration
from tests.autotune.support import MIB, make_spec, peaked

SPEC = make_spec()
BASELINE = Configuration(SPEC.default_configuration)
CANDIDATES = enumerate_candidates(SPEC.knobs, BASELINE, SPEC.tensors)

every_searcher = pytest.mark.parametrize("name", names())


def make(name: str, seed: int = 0, candidates: Sequence[Configuration] = CANDIDATES) -> Searcher:
    return make_searcher(name, Problem(SPEC.knobs, candidates, seed))


def drive(searcher: Searcher, trials: int, noise: float = 0.0) -> list[Configuration]:
    rng = random.Random(7)
    asked = []
    for _ in range(trials):
        configuration = searcher.ask()
        cost = math.log(peaked(configuration)) + rng.gauss(0, noise)
        searcher.tell(configuration, cost, noise or 0.001)
        asked.append(configuration)
    return asked


@every_searcher
def test_the_baseline_is_asked_first_and_only_candidates_are(name: str) -> None:
    asked = drive(make(name), 15)
    assert asked[0] == BASELINE
    assert set(asked) <= set(CANDIDATES)


@every_searcher
def test_what_is_believed_is_what_the_search_goes_by(name: str) -> None:
    searcher = make(name)
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


SIZES = LogInteger(low=65536, high=1024 * MIB)
WAYS = Categorical(values=("off", "leaders", "shards"))
CHANNELS = Categorical(values=("1", "2", "4"))


@every_searcher
@pytest.mark.parametrize(
    "space",
    [
        {"bucket_bytes": SIZES},
        {"bucket_bytes": SIZES, "hierarchical": Categorical(values=("off",))},
        {"bucket_bytes": SIZES, "hierarchical": WAYS},
        {"bucket_bytes": SIZES, "channels": Categorical(values=(1, 2, 4))},
        {"bucket_bytes": SIZES, "hierarchical": WAYS, "channels": CHANNELS},
    ],
    ids=lambda space: " x ".join(f"{knob} {domain}" for knob, domain in space.items()),
)
def test_a_space_of_any_knobs_can_be_searched(name: str, space: Space) -> None:
    baseline = Configuration(
        {
            knob: domain.values[0] if isinstance(domain, Categorical) else 25 * MIB
            for knob, domain in space.items()
        }
    )
    candidates = enumerate_candidates(space, baseline, SPEC.tensors)
    searcher = make_searcher(name, Problem(space, candidates))
    for trial in range(searcher.initial_trials + 3):
        asked = searcher.ask()
        assert asked in candidates
        searcher.tell(asked, math.log(0.2) + 0.01 * candidates.index(asked) + 0.001 * trial, 0.01)
    assert math.isfinite(searcher.expected_gain())
    assert all(math.isfinite(searcher.expected_cost(candidate)) for candidate in candidates)
    assert searcher.best() in candidates


@every_searcher
def test_equal_seeds_and_tells_give_equal_answers(name: str) -> None:
    first, second = make(name, seed=3), make(name, seed=3)
    assert drive(first, 10, 0.02) == drive(second, 10, 0.02)
    assert first.best() == second.best()
    assert first.expected_gain() == second.expected_gain()


@every_searcher
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_does_no_harm(name: str, bad: float) -> None:
    searcher = make(name)
    drive(searcher, 6)
    with pytest.raises(ValueError, match="finite"):
        searcher.tell(BASELINE, bad, 0.1)
    drive(searcher, 2)
    assert searcher.best() in CANDIDATES


@every_searcher
def test_an_unknown_error_and_a_foreign_configuration_are_taken(name: str) -> None:
    searcher = make(name, candidates=CANDIDATES[:20])
    searcher.tell(CANDIDATES[-1], -9.0, math.inf)
    drive(searcher, 8)
    assert searcher.best() in CANDIDATES[:20]


@every_searcher
def test_costs_without_any_difference_or_of_any_size_are_taken(name: str) -> None:
    for scale in (0.0, 1e-9, 1e9):
        searcher = make(name)
        for turn in range(8):
            searcher.tell(searcher.ask(), scale * (turn % 3), 0.0)
        assert searcher.ask() in CANDIDATES
        assert math.isfinite(searcher.expected_gain())


@every_searcher
def test_without_a_measured_candidate_there_is_no_best(name: str) -> None:
    searcher = make(name)
    assert searcher.expected_gain() == math.inf
    with pytest.raises(LookupError):
        searcher.best()
    searcher.tell(BASELINE, 1.0, 0.1)
    assert searcher.best() == BASELINE


@every_searcher
def test_a_single_candidate_is_asked_again(name: str) -> None:
    searcher = make(name, candidates=[BASELINE])
    assert drive(searcher, 3) == [BASELINE] * 3
    assert searcher.best() == BASELINE


@every_searcher
def test_a_space_of_names_alone_is_searched(name: str) -> None:
    space = {"reduce": WAYS, "channels": CHANNELS}
    candidates = [
        Configuration(reduce=way, channels=channels)
        for way in ("leaders", "off", "shards")
        for channels in ("1", "2")
    ]
    searcher = make_searcher(name, Problem(space, candidates))
    costs = {"off": 3.0, "leaders": 2.0, "shards": 1.0}
    for _ in range(8):
        asked = searcher.ask()
        searcher.tell(asked, costs[str(asked["reduce"])], 0.1)
    assert searcher.best()["reduce"] == "shards"


@every_searcher
def test_what_is_expected_to_be_gained_falls(name: str) -> None:
    searcher = make(name)
    drive(searcher, searcher.initial_trials + 1, 0.01)
    early = searcher.expected_gain()
    drive(searcher, 12, 0.01)
    assert 0 <= searcher.expected_gain() < early


def test_the_initial_design_shows_every_level_and_both_halves_of_the_sizes() -> None:
    searcher = make("bayesian")
    asked = drive(searcher, searcher.initial_trials)
    assert {configuration["hierarchical"] for configuration in asked} == {"off", "leaders"}
    sizes = [int(configuration["bucket_bytes"]) for configuration in asked]
    assert min(sizes) < 4 * MIB
    assert max(sizes) > 25 * MIB
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("seed", range(4))
def test_bayesian_search_comes_near_the_optimum_in_few_noisy_trials(seed: int) -> None:
    searcher = make("bayesian", seed)
    drive(searcher, 12, noise=0.02)
    best = min(map(peaked, CANDIDATES))
    assert peaked(searcher.best()) < 1.04 * best


def test_the_best_is_not_the_luckiest() -> None:
    searcher = make("bayesian")
    for candidate in CANDIDATES:
        searcher.tell(candidate, math.log(peaked(candidate)), 0.02)
    lucky = Configuration(bucket_bytes=64 * 1024, hierarchical="off")
    searcher.tell(lucky, math.log(0.9 * min(map(peaked, CANDIDATES))), 0.3)
    assert peaked(searcher.best()) < 1.05 * min(map(peaked, CANDIDATES))


def test_random_search_tries_everything_once() -> None:
    assert set(drive(make("random"), len(CANDIDATES))) == set(CANDIDATES)
    assert drive(make("random", 1), 9) != drive(make("random", 2), 9)


def test_an_unknown_method_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'grid'.*bayesian, random"):
        make("grid")
