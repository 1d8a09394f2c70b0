"""Algorithms: how gradients become the same on all ranks. Importing this registers the built-in
one."""

from bagua_client.algorithms.base import Algorithm, find, register
from bagua_client.algorithms.gradient_allreduce import GradientAllReduce

__all__ = ["Algorithm", "GradientAllReduce", "find", "register"]
