"""Losses over steps and over time, drawn, and when each way of training came to a given loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

SMOOTHED_STEPS = 20
Seeds = Sequence[Mapping[str, Any]]
"""Of each seed: ``curve``, the loss of each step, and ``seconds``, how long each took."""


def smoothed(curve: Sequence[float]) -> list[float]:
    """Means of the last steps, at most ``SMOOTHED_STEPS`` of them."""
    sums = [0.0, *accumulate(curve)]
    return [
        (sums[end] - sums[max(end - SMOOTHED_STEPS, 0)]) / min(end, SMOOTHED_STEPS)
        for end in range(1, len(sums))
    ]


def mean_of(seeds: Seeds) -> tuple[list[float], list[float]]:
    """Smoothed losses and the seconds since the first step, means over the seeds."""
    losses = [fmean(each) for each in zip(*(smoothed(s["curve"]) for s in seeds), strict=True)]
    seconds = [fmean(each) for each in zip(*(s["seconds"] for s in seeds), strict=True)]
    return losses, list(accumulate(seconds))


def came_to(seeds: Seeds, loss: float) -> tuple[int, float] | None:
    """After how many steps and seconds the smoothed loss was at most this; None: it never was."""
    losses, seconds = mean_of(seeds)
    for step, (found, since) in enumerate(zip(losses, seconds, strict=True), 1):
        if step >= SMOOTHED_STEPS and found <= loss:
            return step, since
    return None


def draw(path: Path, by_way: Mapping[str, Seeds], title: str) -> None:
    """Write a picture: losses over steps, and over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    for way, seeds in by_way.items():
        losses, seconds = mean_of(seeds)
        over_steps.plot(range(1, len(losses) + 1), losses, label=way)
        over_time.plot(seconds, losses, label=way)
    over_steps.set(xlabel="steps", ylabel=f"loss, mean of {SMOOTHED_STEPS} steps", title=title)
    over_time.set(xlabel="seconds")
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.3)
    over_time.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
