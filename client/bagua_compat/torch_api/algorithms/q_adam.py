"""Adam's momentum averaged in eight bits after a warm-up, with the steps that Bagua makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bagua_client import algorithms as ours
from bagua_client.algorithms import QAdamAlgorithm

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]


class QAdamOptimizer(ours.QAdamOptimizer):
    """:class:`bagua_client.algorithms.QAdamOptimizer` with ``compatible=True``, so that a Bagua
    training keeps its numbers; that class has the formulas and a better default. As in Bagua each
    parameter has its state from the beginning."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, warmup_steps, betas, eps, weight_decay, compatible=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)
