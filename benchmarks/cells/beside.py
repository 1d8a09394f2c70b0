"""What is measured beside in some cells: 16 bits on the wire, and NCCL's socket variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness import Comparison, compare

from .arms import COMPRESSED, STOCK_DEFAULT, TUNED, TUNED_ALLOWED
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
class Sockets:
    """Stock DDP in processes that began with NCCL's socket variables.

    Attributes:
        arm: the faster of its sizes.
        step: of that one, in all jobs.
        tuned_over: the tuned job's step over it: of each of these jobs, and of as large a part of
            the run-off, which ran between them.
    """

    arm: str
    step: Spread
    tuned_over: Comparison


@dataclass(frozen=True)
class Beside:
    compressed: Spread | None = None
    allowed: Allowed | None = None
    sockets: Sockets | None = None


def beside_of(result: Mapping[str, Any]) -> Beside:
    """From the JSON of a cell."""
    run_off = result["run_off"]["arms"]
    compressed = run_off.get(COMPRESSED)
    return Beside(
        compressed=spread(compressed) if compressed else None,
        allowed=_allowed(result) if result.get("allowed") else None,
        sockets=_sockets(result["sockets"]["jobs"], run_off[TUNED])
        if result.get("sockets")
        else None,
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


def _sockets(jobs: Sequence[Mapping[str, Any]], tuned: Sequence[Sequence[float]]) -> Sockets:
    blocks = {arm: [block for job in jobs for block in job["arms"][arm]] for arm in jobs[0]["arms"]}
    best = min(blocks, key=lambda arm: spread(blocks[arm]).seconds)
    count = len(jobs)
    parts = [tuned[len(tuned) * n // count : len(tuned) * (n + 1) // count] for n in range(count)]
    return Sockets(
        arm=best,
        step=spread(blocks[best]),
        tuned_over=compare(
            [_median(job["arms"][best]) for job in jobs], [_median(part or tuned) for part in parts]
        ),
    )


def _median(blocks: Sequence[Sequence[float]]) -> float:
    return median(seconds for block in blocks for seconds in block)
