"""Algorithms: how the replicas of a model are kept together. Importing this registers Bagua's."""

from bagua_client.algorithms.base import Algorithm, GlobalAlgorithmRegistry, find, register
from bagua_client.algorithms.bytegrad import ByteGradAlgorithm
from bagua_client.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

__all__ = [
    "Algorithm",
    "ByteGradAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "find",
    "register",
]
