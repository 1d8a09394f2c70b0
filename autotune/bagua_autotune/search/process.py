"""The Gaussian process: skopt's, with a prior mean and with its settings chosen from a grid.

Costs are logarithms of times (or parts of the default), so the size of amplitudes and noise is
roughly known. A coarse grid finds settings as good as those of a gradient ascent on the likelihood,
in a tenth of the time and without its extremes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skopt.learning import GaussianProcessRegressor
from skopt.learning.gaussian_process.kernels import (
    ConstantKernel,
    Kernel,
    Matern,
    WhiteKernel,
)

from bagua_autotune.search.points import TIE, Floats, Points, Prior, Rows

# The level is not known beforehand: 1 is a factor of e.
LEVEL_VARIANCE = 1.0
# The length scale of an input that a kernel must ignore.
NEVER = 1e6
# How far two values of a categorical knob are apart, in length scales.
CATEGORICAL_LENGTH_SCALE = 0.5
AMPLITUDES = (0.04, 0.1, 0.3)
# The least amplitude, as a part of the cost model's misfit.
MISFIT_SHARE = 1.2
SIZE_LENGTH_SCALES = (0.07, 0.2, 0.5)
# How much repeated trials of one configuration differ beyond their own errors.
REPEAT_ERRORS = (0.003, 0.03)


class Shared(Kernel):  # type: ignore[misc]
    """Known covariances: products of the inputs from ``first`` on.

    The inputs before belong to the other kernels.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:
        others = X if Y is None else Y
        found = X[:, self.first :] @ others[:, self.first :].T
        return (found, np.empty((*found.shape, 0))) if eval_gradient else found

    def diag(self, X: Floats) -> Floats:
        found: Floats = np.square(X[:, self.first :]).sum(axis=1)
        return found

    def is_stationary(self) -> bool:
        return False


class CandidateProcess(GaussianProcessRegressor):  # type: ignore[misc]
    """A process of the difference between the candidates' costs and a prior mean.

    Candidates are given by their number, so the prior mean may be any function.  After a fit,
    ``loo_residuals`` and ``loo_variances`` compare each cost with what all others predict for it
    (Rasmussen and Williams, "Gaussian Processes for Machine Learning", eqs. 5.10 to 5.12).

    Args:
        kernel: over ``inputs``.
        alpha: variance of each cost of the fit.
        inputs: of the candidates, shape (candidates, inputs).
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
            # Predictions are of the cost itself, without the error of another measurement.
            noise="gaussian",
        )
        self.inputs = inputs
        self.prior_mean = prior_mean

    def fit(self, X: Rows, y: Floats) -> CandidateProcess:
        residuals = y - self.prior_mean[X]
        self.level_ = float(np.median(residuals))
        super().fit(self.inputs[X], residuals - self.level_)
        inverse_diagonal = np.diag(self.K_inv_)
        self.loo_residuals = self.alpha_ / inverse_diagonal
        self.loo_variances = 1.0 / inverse_diagonal
        return self

    def predict(self, X: Rows, return_std: bool = False, **others: Any) -> Any:
        found = super().predict(self.inputs[X], return_std=return_std, **others)
        mean = self.prior_mean[X] + self.level_
        if isinstance(found, tuple):
            return (found[0] + mean, *found[1:])
        return found + mean

    def covariances(self, X: Rows, point: Rows) -> Floats:
        """Posterior covariances of the costs of some candidates with that of one (Rasmussen and
        Williams, eq. 2.24): shape (candidates,)."""
        inputs, other = self.inputs[X], self.inputs[point]
        seen = self.kernel_(self.X_train_, other)
        known = self.kernel_(inputs, self.X_train_) @ self.K_inv_ @ seen
        found: Floats = (self.kernel_(inputs, other) - known)[:, 0]
        return found


def make_process(
    points: Points, errors: Floats, prior: Prior | None, seed: int
) -> CandidateProcess:
    """A process to be fitted.

    Args:
        points: of the candidates.
        errors: the standard error of each cost that it will be fitted to.
        prior: what the cost model says of the points; None: nothing is known.
        seed: of what is random in skopt.
    """
    inputs, is_size = points.inputs, points.is_size
    scales = np.where(is_size, 0.3, CATEGORICAL_LENGTH_SCALE)
    known = ConstantKernel(LEVEL_VARIANCE, "fixed")
    if prior is not None and len(prior.deviations):
        known = known + Shared(len(is_size))
        inputs = np.hstack([inputs, prior.deviations.T])
        scales = np.concatenate([scales, np.full(len(prior.deviations), NEVER)])
    kernel = (
        known
        + ConstantKernel(0.01, (1e-6, 1.0)) * Matern(scales, [(0.05, 5.0)] * len(scales), nu=2.5)
    ) + WhiteKernel(1e-5, (1e-8, 1e-2))
    return CandidateProcess(
        kernel=kernel,
        alpha=np.square(errors) + 1e-10,
        inputs=inputs,
        prior_mean=np.zeros(len(inputs)) if prior is None else prior.means,
        optimizer=_Grid(is_size, inputs.shape[1] - len(is_size), prior.misfit if prior else 0.0),
        random_state=seed,
    )


class _Grid:
    """Chooses the kernel's settings; scikit-learn calls it in place of its own optimizer.

    Args:
        is_size: whether each input that the kernel uses is a size.
        others: how many inputs it ignores.
        misfit: the least amplitude. The measured costs cannot show it, as the cost model was
            fitted to them.
    """

    def __init__(self, is_size: NDArray[np.bool_], others: int, misfit: float) -> None:
        self._is_size = is_size
        self._others = np.full(others, NEVER)
        self._factor = max(1.0, MISFIT_SHARE * misfit / AMPLITUDES[0])
        # The error of a wrong model changes fast with the size.
        is_wrong = MISFIT_SHARE * misfit > AMPLITUDES[1]
        self._size_scales = SIZE_LENGTH_SCALES[: 1 if is_wrong else None]

    def __call__(
        self, objective: Callable[..., float], initial: Floats, bounds: Floats
    ) -> tuple[Floats, float]:
        """``initial`` holds the logs of amplitude^2, the length scales, noise^2, in this order."""
        best, lowest = initial, np.inf
        for usual, scale, error in product(AMPLITUDES, self._size_scales, REPEAT_ERRORS):
            amplitude = min(usual * self._factor, AMPLITUDES[-1])
            scales = np.where(self._is_size, scale, CATEGORICAL_LENGTH_SCALE)
            theta = np.log(np.concatenate([[amplitude**2], scales, self._others, [error**2]]))
            # Middle amplitudes are preferred by half a unit of log likelihood.
            value = objective(theta, eval_gradient=False) + 0.5 * np.log(usual / 0.05) ** 2 / 2
            if value < lowest - TIE:
                best, lowest = theta, value
        return best, lowest
