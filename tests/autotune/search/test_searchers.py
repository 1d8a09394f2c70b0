"""What each of our search methods promises beyond what every one keeps (tests/contracts)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_autotune.search import Problem, Searcher, make_searcher, names
from bagua_autotune.search.bayesian import BayesianSearcher
from bagua_autotune.search.searcher import RandomSearcher
from bagua_autotune.testing import CANDIDATES, JOB, MIB, cost_of, drive
from bagua_wire.configuration import Configuration
from tests.strangers import lay

LEAST = min(map(cost_of, CANDIDATES))


def make(name: str, seed: int = 0) -> Searcher:
    return make_searcher(name, Problem(JOB, CANDIDATES, seed))


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
    assert cost_of(searcher.best()) < LEAST + 0.04


def test_the_best_is_not_the_luckiest() -> None:
    searcher = make("bayesian")
    for candidate in CANDIDATES:
        searcher.tell(candidate, cost_of(candidate), 0.02)
    lucky = Configuration(bucket_bytes=64 * 1024, hierarchical="off")
    searcher.tell(lucky, LEAST - 0.1, 0.3)
    assert cost_of(searcher.best()) < LEAST + 0.05


def test_random_search_tries_everything_once() -> None:
    assert set(drive(make("random"), len(CANDIDATES))) == set(CANDIDATES)
    assert drive(make("random", 1), 9) != drive(make("random", 2), 9)


def test_an_unknown_method_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'grid'.*bayesian, random"):
        make("grid")


def test_one_of_another_package_is_found_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "from bagua_autotune.search.searcher import RandomSearcher as Aside\n"
    entries = {"aside": "aside_searcher:Aside", "lacking": "aside_searcher:Lacking"}
    lay(tmp_path, {"aside_searcher.py": text}, {"bagua_autotune.searchers": entries})
    monkeypatch.syspath_prepend(tmp_path)
    assert names() == ["aside", "bayesian", "lacking", "random"]
    assert isinstance(make("aside"), RandomSearcher)
    assert isinstance(make("lacking"), BayesianSearcher)
    make("lacking")
    (line,) = caplog.messages
    assert line.startswith("the search method lacking (aside_searcher:Lacking) cannot be imported")
    assert line.endswith("; bayesian is used in its place")
