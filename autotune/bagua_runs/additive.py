"""Predicts the cost of all settings from a few runs, mostly by adding the variables' effects.

A few runs cannot show every combination of four or five variables. If effects add up, every run
teaches something of every variable; a small part is left to joint effects. This is the Gaussian
process of the service with an additive kernel (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian
processes", 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from bagua_autotune.costs.layouts import Floats
from bagua_autotune.model.knobs import Space
from bagua_autotune.search.process import (
    LEVEL_VARIANCE,
    TIE,
    Process,
    Rows,
    Told,
    expected_improvements,
    first_best,
    unlikelihood,
)
from bagua_wire.configuration import Configuration

# How much one variable may change the logarithm of a step's time: the middle value is the
# likeliest, to a factor of e. And how much all together may change it beyond the sum of their
# effects.
AMPLITUDES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
USUAL_AMPLITUDE = 0.2
TOGETHER = (0.02, 0.05)
SWEEPS = 3
# In ranges of a number's logarithm: long, so that its effect has a single best place.
LENGTH_SCALE = 0.7


class AdditiveProcess(Process):
    """The process, fitted to the measured costs.

    Args:
        knobs: on which a cost depends.
        candidates: all that will be asked for, and all that were measured.
        told: the measured costs, at least one.
    """

    def __init__(
        self, knobs: Space, candidates: Sequence[Configuration], told: Sequence[Told]
    ) -> None:
        self._knobs = knobs
        self._candidates = candidates
        self._row_of = {candidate: row for row, candidate in enumerate(candidates)}
        rows = np.array([self._row_of[t.configuration] for t in told])
        costs = np.array([t.cost for t in told])
        level = float(np.mean(costs))
        alike = self._alike(rows)[:, rows]
        errors = np.diag([t.standard_error**2 for t in told])
        self._amplitudes = _likeliest(alike, errors, costs - level)
        covariance = _covariance(alike, self._amplitudes) + errors
        super().__init__(rows, costs - level, covariance, level)

    def gains(self) -> Floats:
        """How far each candidate is expected to be below the best measured one, if at all.

        The difference from that one counts, not each cost by itself: measuring it once more
        improves nothing.
        """
        best = int(self._rows[first_best(-self.means[self._rows])])
        variances = self.variances + self.variances[best] - 2 * self.covariances(best)
        deviations: Floats = np.sqrt(np.maximum(variances, 0.0))
        return expected_improvements(self.means - float(self.means[best]), deviations)

    def mean(self, configuration: Configuration) -> float:
        """The expected cost of a candidate."""
        return float(self.means[self._row_of[configuration]])

    def _prior(self, rows: Rows) -> Floats:
        return _covariance(self._alike(rows), self._amplitudes)

    def _prior_variances(self) -> Floats:
        found: Floats = np.full(len(self._candidates), LEVEL_VARIANCE + sum(self._amplitudes**2))
        return found

    def _alike(self, rows: Rows) -> Floats:
        """How similar all candidates are to some, in each variable and in all together: shape
        (variables + 1, candidates, rows)."""
        each = [_alike(knob, self._candidates, rows) for knob in self._knobs]
        found: Floats = np.stack([*each, np.prod(each, axis=0)])
        return found


def _likeliest(alike: Floats, errors: Floats, residuals: Floats) -> Floats:
    """The likeliest amplitudes of the grid, chosen one after the other in several passes.

    Args:
        alike: the measured costs are, shape (variables + 1, costs, costs).
        errors: their covariance.
        residuals: from their level.
    """

    def unlikely(amplitudes: Floats) -> float:
        prior = float(np.sum(np.log(amplitudes[:-1] / USUAL_AMPLITUDE) ** 2))
        return unlikelihood(_covariance(alike, amplitudes) + errors, residuals) + prior / 2

    variables = len(alike) - 1
    best = np.array([USUAL_AMPLITUDE] * variables + [TOGETHER[0]])
    lowest = unlikely(best)
    for _ in range(SWEEPS):
        for place, amplitude in (*product(range(variables), AMPLITUDES), *product([-1], TOGETHER)):
            changed = best.copy()
            changed[place] = amplitude
            if (value := unlikely(changed)) < lowest - TIE:
                best, lowest = changed, value
    return best


def _covariance(alike: Floats, amplitudes: Floats) -> Floats:
    found: Floats = LEVEL_VARIANCE + np.tensordot(amplitudes**2, alike, axes=1)
    return found


def _alike(knob: str, candidates: Sequence[Configuration], rows: Rows) -> Floats:
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
