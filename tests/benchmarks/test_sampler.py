"""The samplers' benchmark: steps are as even as it wants, and its verdict on a job is right."""

from __future__ import annotations

import pytest
from sampler import OURS, STOCK, evenness, failures, judged, slowest_over_mean

SECONDS = [2.0, 2.2, 2.1] * 3


def result(gain: float, worse: float) -> dict[str, object]:
    stock = {"way": STOCK, "seconds": SECONDS, "losses": [1.0, 1.1, 1.05]}
    ours = {
        "way": OURS,
        "seconds": [seconds / gain for seconds in SECONDS],
        "losses": [loss + worse for loss in stock["losses"]],
    }
    return {"job": judged([{"kind": "one at a time", **row} for row in (stock, ours)])}


def test_the_slowest_rank_makes_the_step():
    lengths = [1.0, 3.0, 2.0, 2.0]
    assert slowest_over_mean([[0, 2], [1, 3]], lengths, 1) == (3 + 2) / (2 + 2)
    assert slowest_over_mean([[0, 2], [1, 3]], lengths, 2) == 5 / 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_are_as_even_as_they_should_be(ranks):
    rows = evenness(ranks)
    assert failures({"evenness": rows}) == []
    by_chance = [row["slowest_over_mean"][1] for row in rows if row["sampler"] == STOCK]
    assert min(by_chance) > 1.3


@pytest.mark.parametrize(
    ("gain", "worse", "missed"),
    [
        pytest.param(1.5, 0.02, [], id="faster, as good"),
        pytest.param(1.5, -0.5, [], id="faster, better"),
        pytest.param(1.1, 0.0, [f"{OURS}: 1.10x"], id="not much faster"),
        pytest.param(1.5, 0.2, [f"{OURS}: loss +0.200"], id="worse"),
    ],
)
def test_a_job_meets_the_goals_or_not(gain, worse, missed):
    assert failures(result(gain, worse)) == missed
