"""Rank 0's thread beside the training, which alone talks to the service.

The names below are all that the training thread has of it: nothing that it calls there waits for
the service.
"""

from bagua_client.reporter.handover import Handover
from bagua_client.reporter.inbox import Event, RankTimes, Samples
from bagua_client.reporter.reporter import Reporter

__all__ = ["Event", "Handover", "RankTimes", "Reporter", "Samples"]
