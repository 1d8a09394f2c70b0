"""Weights averaged in rounds that no rank waits for."""

from bagua_client.algorithms import AsyncModelAverageAlgorithm

__all__ = ["AsyncModelAverageAlgorithm"]
