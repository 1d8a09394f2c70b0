"""The cost model: how long a step takes under a configuration that was never tried."""

from __future__ import annotations

from bagua_autotune.costs.collectives import Cost, Costs, Kind, kinds_of
from bagua_autotune.costs.layouts import Layouts
from bagua_autotune.costs.model import CostModel, Predictor, fit_model
from bagua_autotune.costs.recomputation import Recomputing, RecomputingModel
from bagua_autotune.costs.sharded import ShardedModel, is_sharded

__all__ = [
    "Cost",
    "CostModel",
    "Costs",
    "Kind",
    "Layouts",
    "Predictor",
    "Recomputing",
    "RecomputingModel",
    "ShardedModel",
    "fit_model",
    "is_sharded",
    "kinds_of",
]
