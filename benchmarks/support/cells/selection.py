"""Which arms of the sweep the results rest on, and which the run-off therefore measures again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from bagua_client import Configuration
from benchmarks.support.cells.cell import (
    BAGUA_DEFAULT,
    COMPRESSED,
    COMPUTE,
    MIB,
    STOCK_DEFAULT,
    TUNED,
    TUNED_ALLOWED,
    Arm,
    Cell,
    Effort,
    is_swept,
)
from benchmarks.support.harness import Spread

STOCK_DEFAULT_BYTES = 25 * MIB
BAGUA_DEFAULT_BYTES = 10 * MIB

Times = Mapping[str, Spread]
"""Step times of the sweep, by the arm's name."""


def run_off_arms(arms: Sequence[Arm], times: Times, cell: Cell, effort: Effort) -> list[Arm]:
    """What stage 2 measures: the finalists of the sweep and all that results compare."""
    wanted = {
        STOCK_DEFAULT,
        COMPUTE,
        BAGUA_DEFAULT,
        COMPRESSED,
        TUNED,
        TUNED_ALLOWED,
        best_stock(arms, times),
        scaled_stock_default(arms, cell),
        scaled_bagua_default(arms, cell),
        best_flat(arms, times),
        best_hierarchical(arms, times),
        *finalists(arms, times, effort),
    }
    return [arm for arm in arms if arm["name"] in wanted]


def finalists(arms: Sequence[Arm], times: Times, effort: Effort) -> list[str]:
    """The fastest of our sweep, and those that may be as fast: the lower end of their interval is
    at most the median of the last of the fastest."""
    ranked = _ranked((arm["name"] for arm in arms if is_swept(arm)), times)
    last = times[ranked[: effort.finalists][-1]].seconds
    close = [name for name in ranked if times[name].low <= last]
    return close[: effort.most_finalists]


def best_stock(arms: Sequence[Arm], times: Times) -> str:
    """Stock DDP at the size that is fastest in the sweep; its default is one of them."""
    return _ranked((arm["name"] for arm in arms if arm["kind"] == "stock"), times)[0]


def scaled_stock_default(arms: Sequence[Arm], cell: Cell) -> str:
    """Stock DDP with about as many buckets as its default makes of the published model."""
    sizes = {
        arm["name"]: (arm["bucket_mib"] or STOCK_DEFAULT_BYTES / MIB) * MIB
        for arm in arms
        if arm["kind"] == "stock"
    }
    return _nearest(sizes, STOCK_DEFAULT_BYTES * cell.scale)


def scaled_bagua_default(arms: Sequence[Arm], cell: Cell) -> str:
    """The same of ours at Bagua's default size."""
    sizes = {
        arm["name"]: arm["configuration"]["bucket_bytes"]
        for arm in arms
        if is_swept(arm) and Configuration.from_json(arm["configuration"]).is_torchs_way
    }
    return _nearest(sizes, BAGUA_DEFAULT_BYTES * cell.scale)


def best_flat(arms: Sequence[Arm], times: Times) -> str:
    """The fastest flat one of our sweep."""
    return _ranked((a["name"] for a in arms if is_swept(a) and not is_hierarchical(a)), times)[0]


def best_hierarchical(arms: Sequence[Arm], times: Times) -> str | None:
    """The fastest of our sweep that reduces inside each node first; None if there is none."""
    names = [arm["name"] for arm in arms if is_swept(arm) and is_hierarchical(arm)]
    return _ranked(names, times)[0] if names else None


def is_hierarchical(arm: Arm) -> bool:
    """Whether an arm of ours reduces inside each node first."""
    return bool(arm["configuration"]["hierarchical"] != "off")


def _ranked(names: Iterable[str], times: Times) -> list[str]:
    return sorted(names, key=lambda name: times[name].seconds)


def _nearest(sizes_bytes: Mapping[str, float], wanted_bytes: float) -> str:
    """By ratio."""
    return min(sizes_bytes, key=lambda name: abs(math.log(sizes_bytes[name] / wanted_bytes)))
