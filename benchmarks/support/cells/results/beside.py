"""What is measured beside in some cells: 16 bits on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.support.harness import Comparison

from ..arms import COMPRESSED, STOCK_DEFAULT, TUNED_ALLOWED
from .spread import Spread, ratio, spread


@dataclass(frozen=True)
class Allowed:
    """The job that was tuned with 16 bits allowed.

    Attributes:
        over_stock, over_compressed: how many times as fast as stock DDP's default, and as that with
            torch's own hook for 16 bits (None: not measured).
    """

    step: Spread
    over_stock: Comparison
    over_compressed: Comparison | None
    configuration: dict[str, Any]
    tuning: dict[str, Any]


@dataclass(frozen=True)
class Beside:
    compressed: Spread | None = None
    allowed: Allowed | None = None


def beside_of(result: Mapping[str, Any]) -> Beside:
    """From the JSON of a cell."""
    run_off = result["run_off"]["arms"]
    compressed = run_off.get(COMPRESSED)
    return Beside(
        compressed=spread(compressed) if compressed else None,
        allowed=_allowed(result) if result.get("allowed") else None,
    )


def _allowed(result: Mapping[str, Any]) -> Allowed:
    run_off, compressed = result["run_off"]["arms"], result["run_off"]["arms"].get(COMPRESSED)
    tuned = run_off[TUNED_ALLOWED]
    return Allowed(
        step=spread(tuned),
        over_stock=ratio(tuned, run_off[STOCK_DEFAULT]),
        over_compressed=ratio(tuned, compressed) if compressed else None,
        configuration=result["arms"][TUNED_ALLOWED]["configuration"],
        tuning=result["allowed"],
    )
