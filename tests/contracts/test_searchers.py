"""Our search methods keep what every one must."""

from __future__ import annotations

from bagua_autotune.search.bayesian import BayesianSearcher
from bagua_autotune.search.searcher import RandomSearcher
from bagua_autotune.testing import SearcherContract


class TestBayesian(SearcherContract):
    searcher = BayesianSearcher


class TestRandom(SearcherContract):
    searcher = RandomSearcher
