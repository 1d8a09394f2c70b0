"""Predicts the cost of all settings from a few runs, mostly by adding the variables' effects.

A few runs cannot show every combination of four or five variables. If effects add up, every run
teaches something of every variable; a small part is left to joint effects. This is a Gaussian
process with an additive kernel (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian processes",
2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Space
from bagua_autotune.search.points import TIE, first_best
from bagua_wire.configuration import Configuration

Floats = NDArray[np.float64]

LEVEL_VARIANCE = 1.0
# How much one variable may change the logarithm of a step's time: the middle value is the
# likeliest, to a factor of e. And how much all together may change it beyond the sum of their
# effects.
AMPLITUDES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
USUAL_AMPLITUDE = 0.2
TOGETHER = (0.02, 0.05)
SWEEPS = 3
# In ranges of a number's logarithm: long, so that its effect has a single best place.
LENGTH_SCALE = 0.7


class Seen(NamedTuple):
    """A measured cost."""

    configuration: Configuration
    cost: float
    standard_error: float


class AdditiveProcess:
    """The process, fitted to the measured costs.

    Args:
        knobs: on which a cost depends.
        candidates: all that will be asked for, and all that were measured.
        seen: the measured costs, at least one.
    """

    def __init__(
        self, knobs: Space, candidates: Sequence[Configuration], seen: Sequence[Seen]
    ) -> None:
        self._row_of = {candidate: row for row, candidate in enumerate(candidates)}
        rows = [self._row_of[s.configuration] for s in seen]
        parts = np.array([_alike(knob, candidates, rows) for knob in knobs])
        self._costs = np.array([s.cost for s in seen])
        self._noise = np.diag([s.standard_error**2 for s in seen])
        settings = self._fitted(parts[:, rows])
        kernel = _kernel(parts[:, rows], *settings) + self._noise
        cross = _kernel(parts, *settings)
        level = float(np.mean(self._costs))
        solved = np.linalg.solve(kernel, cross.T)
        self.means: Floats = level + cross @ np.linalg.solve(kernel, self._costs - level)
        prior = LEVEL_VARIANCE + float(np.sum(settings[0] ** 2)) + settings[1] ** 2
        self._variances: Floats = prior - np.einsum("ij,ji->i", cross, solved)
        # Covariances with the measured ones: shape (candidates, seen).
        self._covariances: Floats = cross - solved.T @ cross[rows].T
        self._seen_rows = rows

    def gains(self) -> Floats:
        """How far each candidate is expected to be below the best measured one, if at all
        (Jones, Schonlau and Welch, "Efficient global optimization", 1998, eq. 15)."""
        from scipy.special import ndtr  # imported here, as it takes long

        place = first_best(-self.means[self._seen_rows])
        row = self._seen_rows[place]
        # The uncertainty of the difference counts, not that of each cost.
        variances = self._variances + self._variances[row] - 2 * self._covariances[:, place]
        spread = np.sqrt(np.maximum(variances, 1e-12))
        below = self.means[row] - self.means
        scaled = below / spread
        density = np.exp(-0.5 * scaled**2) / np.sqrt(2 * np.pi)
        found: Floats = below * ndtr(scaled) + spread * density
        found[row] = 0.0
        return found

    def mean(self, configuration: Configuration) -> float:
        """The expected cost of a candidate."""
        return float(self.means[self._row_of[configuration]])

    def _fitted(self, parts: Floats) -> tuple[Floats, float]:
        """The likeliest amplitudes of the grid, for each variable and for all together, chosen one
        after the other in several passes. ``parts``: shape (knobs, seen, seen)."""
        amplitudes, together = np.full(len(parts), USUAL_AMPLITUDE), TOGETHER[0]
        best = self._likelihood(parts, amplitudes, together)
        for _ in range(SWEEPS):
            for place, amplitude in product(range(len(parts)), AMPLITUDES):
                changed = amplitudes.copy()
                changed[place] = amplitude
                likelihood = self._likelihood(parts, changed, together)
                if likelihood > best + TIE:
                    best, amplitudes = likelihood, changed
            for other in TOGETHER:
                likelihood = self._likelihood(parts, amplitudes, other)
                if likelihood > best + TIE:
                    best, together = likelihood, other
        return amplitudes, together

    def _likelihood(self, parts: Floats, amplitudes: Floats, together: float) -> float:
        kernel = _kernel(parts, amplitudes, together) + self._noise
        costs = self._costs - np.mean(self._costs)
        _, size = np.linalg.slogdet(kernel)
        prior = np.sum(np.log(amplitudes / USUAL_AMPLITUDE) ** 2)
        return -0.5 * float(costs @ np.linalg.solve(kernel, costs) + size + prior)


def _kernel(parts: Floats, amplitudes: Floats, together: float) -> Floats:
    found: Floats = (
        LEVEL_VARIANCE
        + np.tensordot(amplitudes**2, parts, axes=1)
        + together**2 * np.prod(parts, axis=0)
    )
    return found


def _alike(knob: str, candidates: Sequence[Configuration], rows: Sequence[int]) -> Floats:
    """How similar the candidates' values of a knob are to those of some rows, from 0 to 1: shape
    (candidates, rows). Numbers are similar by their ratio, words only to themselves."""
    values = [candidate[knob] for candidate in candidates]
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    places = np.array([codes[value] for value in values])
    equal: Floats = (places[:, None] == places[rows][None, :]).astype(float)
    exponents = np.array([math.log2(v) if isinstance(v, int) and v > 0 else np.nan for v in values])
    known = exponents[~np.isnan(exponents)]
    span = (float(np.ptp(known)) if known.size else 0.0) or 1.0
    distances = (exponents[:, None] - exponents[rows][None, :]) / (span * LENGTH_SCALE)
    found: Floats = np.where(np.isnan(distances), equal, np.exp(-0.5 * distances**2))
    return found
