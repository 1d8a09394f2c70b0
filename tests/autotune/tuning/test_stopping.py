"""When the search ends by itself."""

from __future__ import annotations

import math
import random

from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.search import make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.tuning.stopping import search_has_ended
from tests.autotune.support import make_spec, peaked

SPEC = make_spec()
BASELINE = Configuration(SPEC.default_configuration)
CANDIDATES = enumerate_candidates(SPEC.knobs, BASELINE, SPEC.tensors)
MAX_SAMPLES = 60


def search(seed: int, drift: float) -> list[Trial]:
    """The trials of a search on a machine that gets slower by ``drift`` with each."""
    rng = random.Random(seed)
    trials: list[Trial] = []
    while True:
        searcher = make_searcher("bayesian", SPEC.knobs, CANDIDATES, seed)
        for trial in trials:
            assert trial.estimate is not None
            searcher.tell(trial.configuration, trial.estimate.center, trial.estimate.standard_error)
        if trials and search_has_ended(trials, CANDIDATES, searcher, MAX_SAMPLES, 1.0):
            return trials
        asked = searcher.ask()
        cost = math.log(peaked(asked)) + drift * len(trials) + rng.gauss(0, 0.008)
        trials.append(Trial(len(trials), "search", asked, "measured", Estimate(cost, 0.008, 8)))


def test_a_search_on_a_steady_machine_is_short() -> None:
    for seed in range(3):
        assert len(search(seed, drift=0.0)) <= 20


def test_a_machine_that_gets_slower_does_not_keep_the_search_going() -> None:
    for seed in range(3):
        assert len(search(seed, drift=0.02)) <= 25
