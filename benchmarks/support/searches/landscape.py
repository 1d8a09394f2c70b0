"""The search benchmark's problems: a space, the true time of each configuration, noisy trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from bagua_autotune.model.knobs import Categorical, LogInteger
from bagua_simulator import Simulator, cases
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Tensor
from bagua_wire.profile import Profile

KIB, MIB, GIB = 2**10, 2**20, 2**30
BASELINE_BYTES = 25 * MIB
Knob = LogInteger | Categorical

_SMALL: dict[str, Knob] = {
    "bucket_bytes": LogInteger(low=64 * KIB, high=GIB),
    "hierarchical": Categorical(values=("off", "leaders")),
}
SPACES: dict[str, dict[str, Knob]] = {
    "small": _SMALL,
    "large": {
        **_SMALL,
        "channels": Categorical(values=(1, 2, 4, 8, 16)),
        "wire_precision": Categorical(values=("as_is", "bf16")),
    },
}

# A trial's score is a summary of so many steps; its standard error is known as well as that.
STEPS_OF_A_TRIAL = 8
STRAGGLER_PROBABILITY = 0.03
# By how much a straggler slows the trial that it hits: evenly between these.
STRAGGLER_FACTORS = (1.2, 2.0)


@dataclass(frozen=True)
class Measurement:
    """What a trial measured.

    Attributes:
        seconds: of a step, a summary of the trial's.
        standard_error: of the logarithm of ``seconds``.
        profile: what rank 0 would report of one step.
    """

    seconds: float
    standard_error: float
    profile: Profile


def bytes_of(half_exponent: int) -> int:
    """2 ** (half_exponent / 2), in whole KiB."""
    return round(2 ** (half_exponent / 2) / KIB) * KIB


def half_exponents(domain: LogInteger) -> range:
    """Those of the half-powers of two inside the domain, whose ends are powers of two."""
    return range(round(2 * math.log2(domain.low)), round(2 * math.log2(domain.high)) + 1)


class Landscape:
    """One simulated job in one space, with the truth about every configuration.

    The sizes are the half-powers of two from 64 KiB to 1 GiB, and the baseline's.
    """

    def __init__(self, name: str, simulator: Simulator, space: Mapping[str, Knob]) -> None:
        self.name = name
        self.simulator = simulator
        self.space = dict(space)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.simulator.workload.tensors

    @cached_property
    def baseline(self) -> Configuration:
        """25 MiB, and the first value of every other knob."""
        return Configuration(
            {
                knob: domain.values[0] if isinstance(domain, Categorical) else BASELINE_BYTES
                for knob, domain in self.space.items()
            }
        )

    def parameters(self, configuration: Configuration) -> dict[str, Value]:
        """A configuration as other searches take it: a size is an integer, its exponent in
        half-powers of two."""
        return {
            knob: round(2 * math.log2(configuration.number(knob)))
            if isinstance(domain, LogInteger)
            else configuration[knob]
            for knob, domain in self.space.items()
        }

    def configuration(self, parameters: Mapping[str, Any]) -> Configuration:
        """Which has these parameters, maybe of numpy's types."""
        return Configuration(
            {
                knob: bytes_of(int(value))
                if isinstance(self.space[knob], LogInteger)
                else (str(value) if isinstance(value, str) else int(value))
                for knob, value in parameters.items()
            }
        )

    @cached_property
    def grid(self) -> list[Configuration]:
        """Every configuration that an engine may name, the baseline first."""
        choices: list[Sequence[Value]] = [
            domain.values
            if isinstance(domain, Categorical)
            else [BASELINE_BYTES, *map(bytes_of, half_exponents(domain))]
            for domain in self.space.values()
        ]
        return [Configuration(dict(zip(self.space, v, strict=True))) for v in product(*choices)]

    @cached_property
    def optimum_seconds(self) -> float:
        """The shortest true step time of the grid."""
        return min(map(self.seconds, self.grid))

    def seconds(self, configuration: Configuration) -> float:
        """The true step time."""
        return self.simulator.step_seconds(configuration)

    def excess(self, configuration: Configuration) -> float:
        """By which part of the optimum's time the configuration is slower."""
        return self.seconds(configuration) / self.optimum_seconds - 1

    def measure(
        self, configuration: Configuration, noise: float, generator: np.random.Generator
    ) -> Measurement:
        """One trial: the truth times lognormal noise, and now and then a straggler.

        The noise is that of the whole trial's score, so more steps would not average it away.
        """
        draws = generator.standard_normal(), generator.random(), generator.random()
        low, high = STRAGGLER_FACTORS
        factor = low + (high - low) * draws[2] if draws[1] < STRAGGLER_PROBABILITY else 1.0
        degrees = STEPS_OF_A_TRIAL - 1
        return Measurement(
            seconds=self.seconds(configuration) * math.exp(noise * draws[0]) * factor,
            standard_error=noise * math.sqrt(generator.chisquare(degrees) / degrees),
            profile=self.simulator.profile(configuration, generator=generator, noise=noise),
        )


def load(problem: str, space: str) -> Landscape:
    """The landscape of a named problem in a named space.

    Raises:
        KeyError: there is no such problem or space.
    """
    simulator = {case.name: case.simulator for case in cases()}[problem]
    return Landscape(problem, simulator, SPACES[space])
