"""Bagua's algorithms: the arguments are Bagua's, the work is done by ours. In ``base``, what a
user-written one is made of."""

from bagua_client.algorithms import async_model_average, bytegrad, gradient_allreduce
from bagua_compat.torch_api.algorithms import decentralized, q_adam
from bagua_compat.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

for _name, _algorithm in {
    "gradient_allreduce": gradient_allreduce.GradientAllReduceAlgorithm,
    "bytegrad": bytegrad.ByteGradAlgorithm,
    "decentralized": decentralized.DecentralizedAlgorithm,
    "low_precision_decentralized": decentralized.LowPrecisionDecentralizedAlgorithm,
    "qadam": q_adam.QAdamAlgorithm,
    "async": async_model_average.AsyncModelAverageAlgorithm,
}.items():
    GlobalAlgorithmRegistry.register(_name, _algorithm)

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
