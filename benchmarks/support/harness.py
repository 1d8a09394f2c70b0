"""What the benchmarks share: spreads, paired comparisons, tables, and results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """One against another, measured in pairs.

    Attributes:
        paired_ratio: median of the pairs' ratios; noise that lasts longer than a pair cancels.
        low, high: 95 % percentile bootstrap interval of ``paired_ratio`` (Efron and Tibshirani,
            An Introduction to the Bootstrap, chapter 13).
    """

    paired_ratio: float
    low: float
    high: float
    pairs: int


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]), flush=True)


def as_given(options: argparse.Namespace) -> dict[str, str]:
    """A bench's options, as a result keeps them."""
    return {name: str(value) for name, value in vars(options).items()}


def forget_own_variables() -> None:
    """Jobs and services are set by the bench alone, whatever this process was told."""
    for name in [name for name in os.environ if name.startswith("BAGUA_")]:
        del os.environ[name]


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` with what it was measured on."""
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **result}, indent=2) + "\n")


Blocks = Sequence[Sequence[float]]
"""Step times in seconds, by round: all of a round ran right after each other."""


@dataclass(frozen=True)
class Spread:
    """The step times of an arm.

    Attributes:
        seconds: median over all steps.
        deviation_seconds: median absolute deviation from it.
        low, high: 95 % percentile bootstrap interval of the median, over whole blocks, as steps
            of a block are alike (Efron and Tibshirani, An Introduction to the Bootstrap,
            chapter 13).
    """

    seconds: float
    deviation_seconds: float
    low: float
    high: float
    steps: int


def spread(blocks: Blocks) -> Spread:
    """As many steps in every block.

    Raises:
        ValueError: no step, or blocks of different lengths.
    """
    steps = np.asarray(blocks, dtype=float)
    if steps.ndim != 2 or not steps.size:
        raise ValueError("an arm without a measured step")
    middle = float(np.median(steps))
    draws = np.random.default_rng(0).integers(len(steps), size=(RESAMPLES, len(steps)))
    medians = np.median(steps[draws].reshape(RESAMPLES, -1), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Spread(
        seconds=middle,
        deviation_seconds=float(np.median(np.abs(steps - middle))),
        low=float(low),
        high=float(high),
        steps=steps.size,
    )


def ratio(reference: Blocks, other: Blocks) -> Comparison:
    """``other`` over ``reference``, both in blocks of the same rounds."""
    pairs = zip(map(median, reference), map(median, other), strict=True)
    ratios = [mine / theirs for theirs, mine in pairs]
    draw = random.Random(0)
    resampled = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = resampled[int(0.025 * RESAMPLES)], resampled[int(0.975 * RESAMPLES) - 1]
    return Comparison(median(ratios), low, high, pairs=len(ratios))
