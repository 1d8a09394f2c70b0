"""Bagua's optimizer of a few named parameters: scikit-optimize's, for the highest score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import skopt


@dataclass
class IntParam:
    """A whole number; both ends of ``space_dimension`` are included."""

    val: int
    space_dimension: tuple[int, int]


@dataclass
class FloatParam:
    """A number."""

    val: float
    space_dimension: tuple[float, float]


@dataclass
class BoolParam:
    """A switch, which is 0 or 1 in what is asked and told."""

    val: bool
    space_dimension: ClassVar[tuple[int, int]] = (0, 1)


class BayesianOptimizer:
    """Proposes parameters, given the scores of earlier ones. It needs scikit-optimize, which
    ``pip install bagua-autotune[service]`` brings.

    Args:
        param_declaration: for each name an :class:`IntParam`, :class:`FloatParam` or
            :class:`BoolParam`.
        n_initial_points: so many are proposed without regard to scores.
        initial_point_generator: how; one of scikit-optimize's.
        random_state: seed; None: another each time.
    """

    def __init__(
        self,
        param_declaration: Mapping[str, IntParam | FloatParam | BoolParam],
        n_initial_points: int = 20,
        initial_point_generator: str = "halton",
        random_state: int | None = 0,
    ) -> None:
        self.param_declaration = dict(param_declaration)
        self.bayesian_optimizer = skopt.Optimizer(
            [tuple(param.space_dimension) for param in self.param_declaration.values()],
            n_initial_points=n_initial_points,
            initial_point_generator=initial_point_generator,
            random_state=random_state,
        )

    def tell(self, param_dict: Mapping[str, Any], score: float) -> None:
        """Tell the score of these parameters; higher is better.

        Raises:
            ValueError: the score is no finite number: scikit-optimize would keep it, and fail at
                every later one.
        """
        if not math.isfinite(score):
            raise ValueError(f"the score must be a finite number, not {score}")
        point = [float(param_dict[name]) for name in self.param_declaration]
        self.bayesian_optimizer.tell(point, -score)

    def ask(self) -> dict[str, Any]:
        """The parameters to try next."""
        return dict(zip(self.param_declaration, self.bayesian_optimizer.ask(), strict=True))
