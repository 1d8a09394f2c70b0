"""Bagua's algorithms: the arguments are Bagua's, the work is done by ours. In ``base``, what a
user-written one is made of."""

from bagua_client.compat.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from bagua_client.compat.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
)

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
