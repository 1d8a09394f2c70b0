"""The strategies of whoever imports ``lightning``."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from bagua_client.lightning.fabric import WithAlgorithmInFabric
from bagua_client.lightning.trainer import WithAlgorithm

__all__ = ["STRATEGY_REGISTRY", "BaguaFabricStrategy", "BaguaStrategy", "StrategyRegistry"]


class BaguaStrategy(WithAlgorithm, DDPStrategy):
    __doc__ = WithAlgorithm.__doc__
    misconfiguration = MisconfigurationException


class BaguaFabricStrategy(WithAlgorithmInFabric, FabricDDPStrategy):
    __doc__ = WithAlgorithmInFabric.__doc__
    misconfiguration = MisconfigurationException
