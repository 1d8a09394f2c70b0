"""What the benchmarks share: paired comparisons, tables, and results as JSON."""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """``other`` against ``reference``, measured in pairs.

    Attributes:
        reference_seconds: median.
        other_seconds: median.
        ratio: of the medians, other over reference.
        paired_ratio: median of the pairs' ratios; noise that lasts longer than a pair cancels.
        low, high: 95 % percentile bootstrap interval of ``paired_ratio`` (Efron and Tibshirani,
            An Introduction to the Bootstrap, chapter 13).
    """

    reference_seconds: float
    other_seconds: float
    ratio: float
    paired_ratio: float
    low: float
    high: float
    pairs: int


def compare(reference: Sequence[float], other: Sequence[float]) -> Comparison:
    """Summarise paired measurements, in seconds."""
    ratios = [mine / theirs for theirs, mine in zip(reference, other, strict=True)]
    draw = random.Random(0)
    resampled = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Comparison(
        reference_seconds=median(reference),
        other_seconds=median(other),
        ratio=median(other) / median(reference),
        paired_ratio=median(ratios),
        low=resampled[int(0.025 * RESAMPLES)],
        high=resampled[int(0.975 * RESAMPLES) - 1],
        pairs=len(ratios),
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]), flush=True)


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
