"""Gradients averaged, as torch does it."""

from bagua_client.algorithms import GradientAllReduceAlgorithm

__all__ = ["GradientAllReduceAlgorithm"]
