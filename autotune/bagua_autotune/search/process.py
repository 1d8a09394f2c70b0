"""The Gaussian process: skopt's, with a prior mean and with its settings chosen from a grid.

Costs are logarithms of times (or parts of the baseline), so amplitudes and noise have a known
size, and a few steps of a grid find as good settings as a climb along the likelihood does, in a
tenth of the time and without its extremes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skopt.learning import GaussianProcessRegressor
from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from bagua_autotune.search.points import Floats, Points

# Nobody knows the level beforehand: 1 is a factor of e.
LEVEL_VARIANCE = 1.0
# How far two values of a categorical knob are apart, in length scales.
CATEGORICAL_LENGTH_SCALE = 1.0
AMPLITUDES = (0.04, 0.1, 0.3)
SIZE_LENGTH_SCALES = (0.2, 0.5)
# What repeated trials of one configuration differ by, beyond their own errors.
REPEAT_ERRORS = (0.003, 0.03)


class CandidateProcess(GaussianProcessRegressor):  # type: ignore[misc]
    """A process of what the costs of candidates differ from a prior mean.

    It is shown candidates by their number (see ``scaled``), so that skopt has one dimension to
    keep and a prior mean may be anything.  After a fit, ``loo_residuals`` and ``loo_variances``
    say how each cost compares with what all others predict for it (Rasmussen and Williams,
    "Gaussian Processes for Machine Learning", eqs. 5.10 to 5.12).

    Args:
        kernel: over ``inputs``.
        alpha: variance of each cost that it is fitted to.
        inputs: shape (candidates, inputs): where the candidates lie.
        prior_mean: shape (candidates,): their expected costs, up to a common level.
        optimizer: chooses the kernel's settings, see scikit-learn.
        random_state: of what is random in skopt.
    """

    def __init__(
        self,
        kernel: Any = None,
        alpha: Any = 1e-10,
        inputs: Any = None,
        prior_mean: Any = None,
        optimizer: Any = None,
        random_state: int | None = None,
    ) -> None:
        super().__init__(
            kernel=kernel,
            alpha=alpha,
            optimizer=optimizer,
            random_state=random_state,
            # Predictions are of the cost itself, without the error of measuring it once more.
            noise="gaussian",
        )
        self.inputs = inputs
        self.prior_mean = prior_mean

    def fit(self, X: Any, y: Any) -> CandidateProcess:
        rows = self._rows(X)
        residuals = np.asarray(y, float) - self.prior_mean[rows]
        self.level_ = float(np.median(residuals))
        super().fit(self.inputs[rows], residuals - self.level_)
        inverse_diagonal = np.diag(self.K_inv_)
        self.loo_residuals = self.alpha_ / inverse_diagonal
        self.loo_variances = 1.0 / inverse_diagonal
        return self

    def predict(self, X: Any, return_std: bool = False, **others: Any) -> Any:
        rows = self._rows(X)
        found = super().predict(self.inputs[rows], return_std=return_std, **others)
        mean = self.prior_mean[rows] + self.level_
        if isinstance(found, tuple):
            return (found[0] + mean, *found[1:])
        return found + mean

    def covariances(self, X: Any, point: Any) -> Floats:
        """Posterior covariances of the costs of some candidates with that of one (Rasmussen and
        Williams, eq. 2.24): shape (candidates,)."""
        inputs, other = self.inputs[self._rows(X)], self.inputs[self._rows(point)]
        seen = self.kernel_(self.X_train_, other)
        known = self.kernel_(inputs, self.X_train_) @ self.K_inv_ @ seen
        found: Floats = (self.kernel_(inputs, other) - known)[:, 0]
        return found

    def _rows(self, X: Any) -> NDArray[np.int64]:
        found: NDArray[np.int64] = np.rint(np.asarray(X, float)[:, 0] * top(len(self.inputs)))
        return found.astype(np.int64)


def top(count: int) -> int:
    """The end of skopt's dimension over so many candidates, which must not be empty."""
    return max(1, count - 1)


def scaled(count: int) -> Floats:
    """All of so many candidates as the process is shown them: shape (candidates, 1)."""
    found: Floats = np.arange(count, dtype=float)[:, None] / top(count)
    return found


def make_process(
    points: Points, errors: Floats, prior_mean: Floats | None, seed: int
) -> CandidateProcess:
    """A process to be fitted.

    Args:
        points: of the candidates.
        errors: the standard error of each cost that it will be fitted to.
        prior_mean: see CandidateProcess; flat if None.
        seed: of what is random in skopt.
    """
    scales = np.where(points.is_size, 0.3, CATEGORICAL_LENGTH_SCALE)
    kernel = (
        ConstantKernel(LEVEL_VARIANCE, "fixed")
        + ConstantKernel(0.01, (1e-6, 1.0)) * Matern(scales, [(0.05, 5.0)] * len(scales), nu=2.5)
    ) + WhiteKernel(1e-5, (1e-8, 1e-2))
    return CandidateProcess(
        kernel=kernel,
        alpha=np.square(errors) + 1e-10,
        inputs=points.inputs,
        prior_mean=np.zeros(len(points.inputs)) if prior_mean is None else prior_mean,
        optimizer=_Grid(points.is_size),
        random_state=seed,
    )


class _Grid:
    """Chooses the kernel's settings; scikit-learn calls it in place of its own optimizer."""

    def __init__(self, is_size: NDArray[np.bool_]) -> None:
        self._is_size = is_size

    def __call__(
        self, objective: Callable[..., float], initial: Floats, bounds: Floats
    ) -> tuple[Floats, float]:
        """``initial`` holds the logs of amplitude^2, the length scales, noise^2, in this order."""
        best, lowest = initial, np.inf
        for amplitude, scale, error in product(AMPLITUDES, SIZE_LENGTH_SCALES, REPEAT_ERRORS):
            scales = np.where(self._is_size, scale, CATEGORICAL_LENGTH_SCALE)
            theta = np.log(np.concatenate([[amplitude**2], scales, [error**2]]))
            # A preference of half a unit of log likelihood for the middle of the amplitudes.
            value = objective(theta, eval_gradient=False) + 0.5 * np.log(amplitude / 0.05) ** 2 / 2
            if value < lowest:
                best, lowest = theta, value
        return best, lowest
