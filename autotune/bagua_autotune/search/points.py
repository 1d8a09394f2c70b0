"""Configurations as points of skopt's space: log2 of sizes, and the categorical values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Categorical, Configuration, LogInteger, Partition, Space

BY_SIZE, EXPLICIT = "by size", "explicit"


def varying(space: Space, configurations: Sequence[Configuration]) -> Space:
    """The knobs in which the configurations differ."""
    return {
        knob: domain
        for knob, domain in space.items()
        if len({configuration[knob] for configuration in configurations}) > 1
    }


class Points:
    """Maps configurations to points.

    Args:
        knobs: in which the configurations differ.
        configurations: all that will be mapped: the sizes span the range of theirs.
    """

    def __init__(self, knobs: Space, configurations: Sequence[Configuration]) -> None:
        from skopt.space import Categorical as Choice
        from skopt.space import Real
        from skopt.space import Space as PointSpace
        from skopt.utils import normalize_dimensions

        self._knobs = knobs
        self.dimensions: list[Any] = []
        for knob, domain in knobs.items():
            if isinstance(domain, LogInteger):
                exponents = [math.log2(c.number(knob)) for c in configurations]
                self.dimensions.append(Real(min(exponents), max(exponents)))
            elif isinstance(domain, Partition):
                self.dimensions.append(Choice([BY_SIZE, EXPLICIT]))
            else:
                self.dimensions.append(Choice(list(domain.values)))
        self._space: PointSpace = normalize_dimensions(self.dimensions)

    @property
    def is_size(self) -> NDArray[np.bool_]:
        """For each input of the process whether it is a size; others are 0 or 1."""
        flags = [
            [not isinstance(domain, Categorical | Partition)] * dimension.transformed_size
            for domain, dimension in zip(self._knobs.values(), self._space.dimensions, strict=True)
        ]
        return np.array([flag for group in flags for flag in group])

    def of(self, configuration: Configuration) -> list[Any]:
        return [self._coordinate(configuration, knob) for knob in self._knobs]

    def inputs(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """What the process sees: shape (configurations, inputs), within 0..1."""
        found: NDArray[np.float64] = self._space.transform([self.of(c) for c in configurations])
        return found

    def _coordinate(self, configuration: Configuration, knob: str) -> Any:
        domain, value = self._knobs[knob], configuration[knob]
        if isinstance(domain, LogInteger):
            return math.log2(configuration.number(knob))
        if isinstance(domain, Partition):
            return EXPLICIT if value else BY_SIZE
        return value
