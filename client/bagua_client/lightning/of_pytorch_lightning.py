# Type checkers know WithAlgorithm as one of the other package.
# mypy: disable-error-code="misc"
"""The strategies of whoever imports ``pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from bagua_client.lightning.fabric import WithAlgorithmInFabric
from bagua_client.lightning.trainer import WithAlgorithm

__all__ = ["STRATEGY_REGISTRY", "BaguaFabricStrategy", "BaguaStrategy", "StrategyRegistry"]


class BaguaStrategy(WithAlgorithm, DDPStrategy):
    __doc__ = WithAlgorithm.__doc__
    misconfiguration = MisconfigurationException


class BaguaFabricStrategy(WithAlgorithmInFabric, FabricDDPStrategy):
    __doc__ = WithAlgorithmInFabric.__doc__
    misconfiguration = MisconfigurationException
