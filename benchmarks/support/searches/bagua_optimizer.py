"""Bagua's own optimiser, ``bagua.service.BayesianOptimizer`` of its PyPI release 0.9.2.

It runs in a process of its own.  Parameters are declared in Bagua's way: a
size is an integer exponent of two, a choice of two is a boolean, of more an integer.  The sizes
are those of the other engines, 64 KiB to 1 GiB; Bagua's own range, 1 KiB to 2 GiB, would only
cost it more trials.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from bagua_autotune.model.knobs import LogInteger
from bagua_wire.configuration import Configuration, Value
from benchmarks.support.searches.landscape import GIB, Landscape, Measurement
from tests.outside import BAGUA, PLACE


class BaguaEngine:
    """See Engine. The seed is not used: Bagua's optimiser has a fixed one."""

    def __init__(self, landscape: Landscape, seed: int) -> None:
        self._baseline = landscape.baseline
        self._space = landscape.space
        self._gibibytes = sum(tensor.bytes for tensor in landscape.tensors) / GIB
        self._next: dict[str, int] | None = None
        self._best: tuple[float, Configuration] = (-math.inf, landscape.baseline)
        integers, booleans = {}, []
        for knob, domain in self._space.items():
            if isinstance(domain, LogInteger):
                integers[knob] = (round(math.log2(domain.low)), round(math.log2(domain.high)))
            elif len(domain.values) > 2:
                integers[knob] = (0, len(domain.values) - 1)
            else:
                booleans.append(knob)
        _ask_worker({"integers": integers, "booleans": booleans})

    def ask(self) -> Configuration:
        if self._next is None:
            return self._baseline
        return Configuration({knob: self._value(knob, n) for knob, n in self._next.items()})

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        speed = self._gibibytes / measurement.seconds  # as Bagua's workers report it
        self._best = max(self._best, (speed, configuration), key=lambda pair: pair[0])
        told = {knob: self._number(configuration, knob) for knob in self._space}
        self._next = _ask_worker({"told": told, "score": speed})["asked"]

    def best(self) -> Configuration:
        """Bagua's: the trial of the highest score."""
        return self._best[1]

    def _number(self, configuration: Configuration, knob: str) -> int:
        domain = self._space[knob]
        if isinstance(domain, LogInteger):
            return int(math.log2(configuration.number(knob)))
        return next(n for n, value in enumerate(domain.values) if value == configuration[knob])

    def _value(self, knob: str, number: int) -> Value:
        domain = self._space[knob]
        return 2**number if isinstance(domain, LogInteger) else domain.values[number]


def prepare() -> None:
    """See whether Bagua's release is there.

    Raises:
        SystemExit: it is not.
    """
    if not (PLACE / BAGUA).exists():
        raise SystemExit(
            f"{BAGUA} is not there; python -m tests.outside brings it; --engines leaves Bagua out"
        )


@cache
def _worker() -> subprocess.Popen[str]:
    """One for this process; it ends when this one does, as its input is closed then."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(PLACE / BAGUA),
        "PYTHONWARNINGS": "ignore",  # one line for each point it has tried before
    }
    worker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("bagua_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables,
        text=True,
    )
    return worker


def _ask_worker(request: dict[str, Any]) -> Any:
    worker = _worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"Bagua's optimiser ended with exit code {worker.wait()}")
    return json.loads(answer)
