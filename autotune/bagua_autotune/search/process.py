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

Floats = NDArray[np.float64]

# Nobody knows the level beforehand: 1 is a factor of e.
LEVEL_VARIANCE = 1.0
# How far two values of a categorical knob are apart, in length scales.
CATEGORICAL_LENGTH_SCALE = 1.0
AMPLITUDES = (0.01, 0.03, 0.1, 0.3)
SIZE_LENGTH_SCALES = (0.15, 0.3, 0.6)
# What repeated trials of one configuration differ by, beyond their own errors.
REPEAT_ERRORS = (0.003, 0.03)


class PriorMeanProcess(GaussianProcessRegressor):  # type: ignore[misc]
    """A process of what the costs differ from ``prior_mean``.

    After a fit, ``loo_residuals`` and ``loo_variances`` say how each cost compares with what all
    others predict for it (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
    eqs. 5.10 to 5.12).

    Args:
        prior_mean: of inputs, shape (points, inputs), the expected cost of each point.
    """

    def __init__(
        self,
        kernel: Any = None,
        alpha: Any = 1e-10,
        prior_mean: Callable[[Floats], Floats] | None = None,
        optimizer: Any = "fmin_l_bfgs_b",
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
        self.prior_mean = prior_mean

    def fit(self, X: Any, y: Any) -> PriorMeanProcess:
        inputs, costs = np.asarray(X, float), np.asarray(y, float)
        residuals = costs - self._mean(inputs)
        self.level_ = float(np.median(residuals))
        super().fit(inputs, residuals - self.level_)
        inverse_diagonal = np.diag(self.K_inv_)
        self.loo_residuals = self.alpha_ / inverse_diagonal
        self.loo_variances = 1.0 / inverse_diagonal
        return self

    def predict(self, X: Any, return_std: bool = False, **others: Any) -> Any:
        found = super().predict(X, return_std=return_std, **others)
        mean = self._mean(np.asarray(X, float)) + self.level_
        if isinstance(found, tuple):
            return (found[0] + mean, *found[1:])
        return found + mean

    def _mean(self, inputs: Floats) -> Floats:
        return np.zeros(len(inputs)) if self.prior_mean is None else self.prior_mean(inputs)


def make_process(
    is_size: NDArray[np.bool_],
    errors: Floats,
    prior_mean: Callable[[Floats], Floats] | None,
    seed: int,
) -> PriorMeanProcess:
    """A process to be fitted.

    Args:
        is_size: for each input, whether it is a size.
        errors: the standard error of each cost that it will be fitted to.
        prior_mean: see PriorMeanProcess.
        seed: of what is random in skopt.
    """
    scales = np.where(is_size, 0.3, CATEGORICAL_LENGTH_SCALE)
    kernel = (
        ConstantKernel(LEVEL_VARIANCE, "fixed")
        + ConstantKernel(0.01, (1e-6, 1.0)) * Matern(scales, [(0.05, 5.0)] * len(scales), nu=2.5)
    ) + WhiteKernel(1e-5, (1e-8, 1e-2))
    return PriorMeanProcess(
        kernel=kernel,
        alpha=np.square(errors) + 1e-10,
        prior_mean=prior_mean,
        optimizer=_Grid(is_size),
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
