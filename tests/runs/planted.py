"""A job whose speed depends on its environment in a known way, without any process."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from bagua_runs.outcomes import Outcome
from bagua_runs.presets import (
    BUFFER_BYTES,
    CHANNELS,
    MIB,
    MIN_CHANNELS,
    SOCKETS,
    THREADS,
)

NOISE = 0.05
BEST_SPEED = 100.0


def speed(environment: Mapping[str, str]) -> float:
    """Of a job on a link that 8 connections fill: one takes twice as long as its best.

    More connections than that, more channels than it takes, and small buffers cost a little.
    """

    def exponent(name: str, otherwise: int) -> float:
        return math.log2(int(environment.get(name, otherwise)))

    connections = exponent(THREADS, 1) + exponent(SOCKETS, 1) + exponent(CHANNELS, 1)
    lacking, spare = max(3 - connections, 0.0), max(connections - 3, 0.0)
    seconds = (
        1.0
        + 0.11 * lacking**2
        + 0.015 * spare**2
        + 0.01 * max(22 - exponent(BUFFER_BYTES, 4 * MIB), 0.0) ** 2
        + 0.02 * max(2 - exponent(MIN_CHANNELS, 1), 0.0)
    )
    return BEST_SPEED / seconds


class PlantedJob:
    """Crashes with the largest buffers, and hangs with the most threads and sockets."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
        self.environments.append(environment)
        if environment.get(BUFFER_BYTES) == str(16 * MIB):
            return Outcome(failure="ended with exit code 1", seconds=5.0)
        if environment.get(THREADS) == "8" and environment.get(SOCKETS) == "8":
            return Outcome(failure="no result", seconds=timeout_seconds)
        score = speed(environment) * math.exp(self._random.gauss(0.0, NOISE))
        return Outcome(score, -math.log(score), seconds=20.0)
