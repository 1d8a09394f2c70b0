"""Configurations as points of a unit cube: log2 of sizes, and one input per categorical value; and
what a cost model says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs import Layouts
from bagua_autotune.model.knobs import Domain, LogInteger, Partition, Space, is_ordered
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import BUCKET_KNOB, COUNT_KNOBS

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
TIE = 1e-7
"""Logarithms of times, and of likelihoods, that differ by less are equal but for the rounding,
which differs from one processor to another."""


class Prior(NamedTuple):
    """The cost model's predictions for the points: means and their errors; see Predictor."""

    means: Floats
    deviations: Floats
    misfit: float


def first_best(scores: Floats) -> int:
    """The place of the highest score; of equal ones the first, on every processor."""
    return int(np.argmax(scores >= scores.max() - TIE))


def offered(space: Space, configurations: Sequence[Configuration]) -> dict[str, set[Value]]:
    """The values of each knob in which the configurations differ."""
    found = {knob: {configuration[knob] for configuration in configurations} for knob in space}
    return {knob: values for knob, values in found.items() if len(values) > 1}


class Points:
    """The points of some configurations.

    Attributes:
        inputs: of the process, shape (configurations, inputs), within 0..1.
        exponents: log2 of the average bucket's size, shape (configurations,).
        is_size: whether each input is a size; the others are 0 or 1.

    Args:
        knobs: in which the configurations differ.
        configurations: all that will be asked for; the range of sizes is theirs.
        layouts: see Problem.
    """

    def __init__(
        self,
        knobs: Space,
        configurations: Sequence[Configuration],
        layouts: Layouts | None = None,
    ) -> None:
        self._row_of = {configuration: row for row, configuration in enumerate(configurations)}
        self.exponents: Floats = np.zeros(len(configurations))
        if layouts is not None:
            self.exponents = np.log2(layouts.average_bytes(configurations))
        elif BUCKET_KNOB in knobs:
            self.exponents = np.log2([c.number(BUCKET_KNOB) for c in configurations])
        blocks = [
            _scaled(self.exponents) if knob == BUCKET_KNOB else _block(domain, knob, configurations)
            for knob, domain in knobs.items()
        ]
        self.inputs: Floats = np.hstack(blocks)
        widths = [block.shape[1] for block in blocks]
        self.is_size = np.repeat([isinstance(d, LogInteger) for d in knobs.values()], widths)

    def rows(self, configurations: Sequence[Configuration]) -> list[int]:
        """The configurations' rows in ``inputs``. Raises KeyError for an unknown configuration."""
        return [self._row_of[configuration] for configuration in configurations]


def _scaled(exponents: Floats) -> Floats:
    scaled: Floats = (exponents - exponents.min()) / (float(np.ptp(exponents)) or 1.0)
    return scaled[:, None]


def _block(domain: Domain, knob: str, configurations: Sequence[Configuration]) -> Floats:
    """Return one knob's inputs: one for two values or ordered ones, else one for each value."""
    values = [configuration[knob] for configuration in configurations]
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    found = _scale(domain, knob, list(codes))[[codes[value] for value in values]]
    if isinstance(domain, LogInteger) or is_ordered(knob, domain):
        return _scaled(found)
    return found


def _scale(domain: Domain, knob: str, values: Sequence[Value]) -> Floats:
    """The inputs of each of some values, before they are scaled."""
    if isinstance(domain, Partition):
        return np.array([[float(bool(value))] for value in values])
    if isinstance(domain, LogInteger) or is_ordered(knob, domain):
        numbers = np.array(values, float)
        return numbers if knob in COUNT_KNOBS else np.log2(numbers)
    places = [list(map(str, domain.values)).index(str(value)) for value in values]
    count = len(domain.values)
    table = np.array([[0.0], [1.0]]) if count == 2 else np.eye(count)
    found: Floats = table[places]
    return found
