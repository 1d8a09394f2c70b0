"""Algorithms: what is communicated, and when. Importing this registers the built-in ones."""

from bagua_client.algorithms.base import Algorithm, Communicates, When, find, register
from bagua_client.algorithms.gradient_allreduce import GradientAllReduce

__all__ = ["Algorithm", "Communicates", "GradientAllReduce", "When", "find", "register"]
