"""Search methods: which configuration to try next; found by name."""

from __future__ import annotations

from bagua_autotune.costs import Predictor
from bagua_autotune.search.searcher import (
    USUAL,
    Judges,
    Predicts,
    Problem,
    Searcher,
    make_searcher,
    names,
)

__all__ = [
    "USUAL",
    "Judges",
    "Predictor",
    "Predicts",
    "Problem",
    "Searcher",
    "make_searcher",
    "names",
]
