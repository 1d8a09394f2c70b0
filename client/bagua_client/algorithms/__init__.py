"""Algorithms: how the replicas of a model are kept together. Importing this registers Bagua's."""

from bagua_client.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua_client.algorithms.base import Algorithm, GlobalAlgorithmRegistry, find, offered, register
from bagua_client.algorithms.bytegrad import ByteGradAlgorithm
from bagua_client.algorithms.decentralized import (
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua_client.algorithms.gradient_allreduce import DEFAULT_ALGORITHM, GradientAllReduceAlgorithm
from bagua_client.algorithms.powersgd import PowerSGDAlgorithm
from bagua_client.algorithms.qadam import QAdamAlgorithm, QAdamOptimizer
from bagua_client.algorithms.quantized import QuantizedAlgorithm

__all__ = [
    "DEFAULT_ALGORITHM",
    "Algorithm",
    "AsyncModelAverageAlgorithm",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "PowerSGDAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "QuantizedAlgorithm",
    "find",
    "offered",
    "register",
]
