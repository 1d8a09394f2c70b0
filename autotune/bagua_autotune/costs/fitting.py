"""Fits the costs of all kinds of collectives to profiled steps, robustly; see parameters.

The fit also gives the uncertainty of the costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bagua_autotune.costs.collectives import Cost, Costs, Kind
from bagua_autotune.costs.layouts import Floats
from bagua_autotune.costs.parameters import CHAIN, USUAL_HALF_BYTES, Parameters
from bagua_autotune.costs.queues import Point

# How closely a measured duration follows the straight line, and an inherited cost this network.
DURATION_SPREAD = 0.1
INHERITED_SPREAD = 0.15
# Costs whose logarithms differ by less count as equal.
SAME_COST = 0.01
# The solution is the same on every processor: rounding differs from one to another, and with it
# the step at which a looser tolerance would end the fit.
EXACTLY = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12}
# Variances of parameters, in those of their priors, that differ by more are not told apart.
SMALLEST_VARIANCE = 1e-12


class Fit(NamedTuple):
    """The fitted costs.

    ``alternatives`` are other likely costs, one for each parameter that is not known well, with
    what changes beside it: together they show how sure the costs are, and which of them are wrong
    together; shape (alternatives, kinds, 3), kinds and parts as ``costs`` has them. ``misfit`` is
    the error of the costs for what was measured: a root mean square of logarithms.
    """

    costs: Costs
    alternatives: Floats
    misfit: float


def fit_costs(
    kinds: Sequence[Kind],
    points: Sequence[Point],
    inherited: Mapping[Kind, Cost] | None = None,
) -> Fit | None:
    """The costs of ``kinds``, by soft-L1 least squares in log seconds with priors.

    Args:
        points: measured in this round.
        inherited: costs measured on this network earlier; all may have changed by one factor.

    Returns:
        None if nothing is known.
    """
    from scipy.optimize import least_squares  # here: takes long to import

    inherited = inherited or {}
    if not points and not inherited:
        return None
    parameters = Parameters.of([*kinds, *(point.kind for point in points), *inherited])
    data = _Data(parameters, points, inherited)
    # Nothing tells what the other parameters are: they are as their priors have them.
    seen, x, steps = data.seen, data.prior_means.copy(), np.diag(data.prior_steps)
    solution = least_squares(
        data.residuals,
        data.prior_means[seen],
        jac=data.jacobian,
        loss="soft_l1",
        x_scale=data.spreads,
        **EXACTLY,
        max_nfev=60,
    )
    misfit = data.misfit(solution.x)
    x[seen], steps[np.ix_(seen, seen)] = solution.x, data.steps(solution.jac, misfit)
    tried = np.column_stack([x, (x + steps).T])
    rows = parameters.rows(kinds)
    rates, halves = rows.logs(tried)
    tails = np.where(rows.is_chain[:, None], np.exp(rates + tried[CHAIN]), 0.0)
    # By parameter vector, kind, and part of a cost.
    table = np.array([np.exp(rates + halves), np.exp(rates), tails]).T
    apart = [np.abs(logs - logs[:, :1]).max(axis=0) for logs in (rates, halves)]
    costs = {kind: Cost(*each) for kind, each in zip(kinds, table[0].tolist(), strict=True)}
    return Fit(costs, table[np.maximum(*apart) > SAME_COST], misfit)


class _Data:
    """The residuals of a fit: points, inherited costs, priors; each divided by its spread.

    Attributes:
        prior_means: of all parameters.
        prior_steps: their priors' spreads, towards lower costs.
        seen: whether each is in a point or in an inherited cost; only these are fitted.
        spreads: of these, their priors'.
    """

    def __init__(
        self, parameters: Parameters, points: Sequence[Point], inherited: Mapping[Kind, Cost]
    ) -> None:
        rows = parameters.rows([point.kind for point in points])
        known = parameters.rows([*inherited], are_inherited=True)
        self.seen = rows.seen | known.seen
        self._rows, self._inherited = rows.only(self.seen), known.only(self.seen)
        queues = np.array([point.queue for point in points], float).reshape(-1, 4)
        self._latencies = np.log(queues[:, 0])
        self._bytes, self._tail_bytes = queues[:, 1], queues[:, 2]
        self._seconds = np.log(queues[:, 3])
        counts = np.array([point.weight for point in points], float)
        self._weights = np.sqrt(np.minimum(counts, 16.0)) / DURATION_SPREAD
        latencies, rates, tails = (
            np.array([cost.parts for cost in inherited.values()]).reshape(-1, 3).T
        )
        self._known = np.log(rates), np.log(latencies) - np.log(rates)
        rate = float(self._known[0][0]) if inherited else 0.0
        if len(points):
            rate = float(np.median(self._seconds - np.log(self._bytes + USUAL_HALF_BYTES)))
        self.prior_means, spreads = parameters.prior(rate)
        shares = (tails / rates)[tails > 0]
        if len(shares):
            self.prior_means[CHAIN] = math.log(float(np.median(shares)))
            spreads[CHAIN] = INHERITED_SPREAD
        # A wider link costs less, of all else less does.
        self.prior_steps = np.where(parameters.widens, spreads, -spreads)
        self._means, self.spreads = self.prior_means[self.seen], spreads[self.seen]

    def residuals(self, x: Floats) -> Floats:
        wide = self._rows.widening(x)
        predicted = self._rows.rate @ x + wide + np.log(sum(self._terms(x, wide)))
        rates, halves = (
            (found - known) / INHERITED_SPREAD
            for found, known in zip(self._inherited.logs(x), self._known, strict=True)
        )
        apart = (x - self._means) / self.spreads
        measured = (predicted - self._seconds) * self._weights
        return np.concatenate([measured, rates, halves, apart])

    def jacobian(self, x: Floats) -> Floats:
        rows, known = self._rows, self._inherited
        half_bytes, tail_bytes, held_bytes = self._terms(x, rows.widening(x))
        total = half_bytes + tail_bytes + held_bytes
        measured = rows.rate + rows.half * (half_bytes / total)[:, None]
        measured[:, CHAIN] += tail_bytes / total
        measured += (rows.widening_slope(x) * (1.0 - half_bytes / total))[:, None] * rows.width
        # More channels raise the rate, not the latencies.
        widens = known.widening_slope(x)[:, None] * known.width
        inherited = np.concatenate([known.rate + widens, known.half - widens]) / INHERITED_SPREAD
        priors = np.diag(1 / self.spreads)
        return np.concatenate([measured * self._weights[:, None], inherited, priors])

    def misfit(self, x: Floats) -> float:
        """See Fit; 0 if nothing was measured."""
        errors = self.residuals(x)[: len(self._weights)] / self._weights
        return float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0

    def steps(self, jacobian: Floats, misfit: float) -> Floats:
        """Steps of one standard deviation from a solution, one in each row. The sum of their outer
        products is the covariance of the parameters (Gauss-Newton); each points to lower costs.

        They are the rows of the covariance's symmetric root, in units of the priors' spreads. There
        every parameter is known at least as well as a number of the size of 1, and there is one
        such root: directions of equal variance, and their signs, would be the rounding's choice.

        If the model explains the points badly they count for less: it is as wrong elsewhere.
        """
        scaled = jacobian * self.spreads
        scaled[: len(self._weights)] /= max(1.0, misfit / DURATION_SPREAD)
        values, vectors = np.linalg.eigh(scaled.T @ scaled)
        values = np.maximum(values, SMALLEST_VARIANCE * values[-1])
        root = (vectors / np.sqrt(values)) @ vectors.T
        signs = np.sign(self.prior_steps[self.seen])
        found: Floats = signs[:, None] * root * self.spreads
        return found

    def _terms(self, x: Floats, wide: Floats) -> tuple[Floats, Floats, Floats]:
        """The time of each queue, in bytes: of its latencies, of its last chain's end, its own."""
        latencies_ = np.exp(np.clip(self._rows.half @ x - wide + self._latencies, -60.0, 60.0))
        return latencies_, self._tail_bytes * np.exp(np.clip(x[CHAIN], -60.0, 60.0)), self._bytes
