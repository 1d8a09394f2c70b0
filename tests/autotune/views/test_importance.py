"""How the gain is divided among the knobs, for jobs whose true step times are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.statistics import Interval
from bagua_autotune.search.bayesian import BayesianSearcher
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.curve import (
    FAILED,
    NO_GAIN,
    NO_MODEL,
    Importance,
    make_importance,
    shapley_shares,
)
from bagua_autotune.views.overviews import Overviews
from bagua_wire.configuration import Configuration
from tests.autotune.support import Ranks, peaked
from tests.autotune.views.jobs import DEFAULT, run, trial

BOTH = ("bucket_bytes", "hierarchical")


def importance(tuner: Tuner, searcher: str = "bayesian") -> Importance:
    return Overviews(tuner.store, searcher).curve("job").importance


def mixtures(
    changed: Sequence[str], cost: Mapping[str, float], together: float = 0.0, error: float = 0.0
) -> dict[frozenset[str], Interval]:
    """Every knob adds its own cost; all of them together add ``together``."""
    found = {}
    for number in range(2 ** len(changed)):
        knobs = frozenset(knob for place, knob in enumerate(changed) if number >> place & 1)
        center = sum(cost[knob] for knob in knobs) + together * (len(knobs) == len(changed))
        found[knobs] = Interval(center, center - error, center + error)
    return found


def test_what_knobs_do_by_themselves_is_theirs() -> None:
    cost = {"a": -0.3, "b": 0.05, "c": -0.15}
    found = shapley_shares("abc", mixtures("abc", cost))
    assert [share.knob for share in found] == ["a", "c", "b"]
    assert [share.share for share in found] == pytest.approx([0.75, 0.375, -0.125])


def test_what_knobs_do_together_is_shared_equally() -> None:
    found = shapley_shares("abc", mixtures("abc", {"a": -0.3, "b": 0, "c": 0}, together=-0.3))
    assert [share.share for share in found] == pytest.approx([4 / 6, 1 / 6, 1 / 6])
    assert sum(share.share for share in found) == pytest.approx(1)


def test_an_interval_is_as_wide_as_the_errors_may_add_up_to() -> None:
    # Of two knobs: half of the difference of two costs, twice. Each is 0.01 off, of 0.2.
    found = shapley_shares("ab", mixtures("ab", {"a": -0.15, "b": -0.05}, error=0.01))
    assert [share.high - share.share for share in found] == pytest.approx([0.1, 0.1])
    assert [share.share - share.low for share in found] == pytest.approx([0.1, 0.1])
    assert shapley_shares("ab", mixtures("ab", {"a": -0.15, "b": -0.05}, error=0.03)) == []
    assert shapley_shares("ab", mixtures("ab", {"a": 0.05, "b": 0.0})) == []  # no gain


# The trials of seed 2 leave it unclear.
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_the_shares_of_a_tuned_job_are_the_true_ones(tuner: Tuner, seed: int) -> None:
    run(tuner, Ranks(seed=seed, noise=0.005))
    best = tuner.status("job").configuration
    true = {
        knob: math.log(peaked(DEFAULT) / peaked({**DEFAULT, knob: best[knob]})) for knob in BOTH
    }
    found = importance(tuner)
    assert {share.knob for share in found.shares} == set(BOTH)
    for share in found.shares:
        assert share.low <= true[share.knob] / sum(true.values()) <= share.high
        assert share.high - share.low < 0.5


def test_a_knob_that_alone_differs_explains_all(tuner: Tuner) -> None:
    run(tuner, Ranks(noise=0.005, step_seconds=lambda c: peaked({**c, "hierarchical": "off"})))
    assert tuner.status("job").configuration["hierarchical"] == "off"
    (share,) = importance(tuner).shares
    assert (share.knob, share.share, share.low, share.high) == ("bucket_bytes", 1.0, 1.0, 1.0)


def test_without_a_gain_there_is_nothing_to_divide(tuner: Tuner) -> None:
    run(tuner, Ranks(noise=0.005), trials=1)
    assert importance(tuner) == Importance(unknown=NO_GAIN)


def test_two_configurations_do_not_tell_two_knobs_apart(tuner: Tuner) -> None:
    run(tuner, Ranks(seed=1, noise=0.005), trials=2)
    assert importance(tuner).shares == ()
    assert "at least 3 measured configurations; there are 2" in importance(tuner).unknown


def test_a_search_without_a_model_says_so(tuner: Tuner) -> None:
    run(tuner, Ranks(seed=1, noise=0.005))
    assert importance(tuner, "random") == Importance(unknown=NO_MODEL)


def test_a_knob_that_failed_alone_is_not_judged(tuner: Tuner) -> None:
    run(tuner, Ranks(seed=1, noise=0.005))
    job, trials = tuner.store.jobs.get("job"), tuner.store.trials.of("job")
    best = tuner.status("job").configuration
    alone = trial(99, Configuration({**DEFAULT, "bucket_bytes": best["bucket_bytes"]}))
    kept = [each for each in trials if each.configuration != alone.configuration]
    failed = replace(alone, state="failed", failure="the ranks disagreed")
    problem = Knowledge(tuner.store).problem(Round.of(job, trials))
    found = [
        make_importance(Round.of(job, each), best, problem, BayesianSearcher)
        for each in (kept, [*kept, failed])
    ]
    assert found[0].unknown != FAILED
    assert found[1] == Importance(unknown=FAILED)
