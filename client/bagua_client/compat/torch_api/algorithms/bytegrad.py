"""Gradients averaged in eight bits."""

from bagua_client.algorithms import ByteGradAlgorithm

__all__ = ["ByteGradAlgorithm"]
