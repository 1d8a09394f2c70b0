"""Rank 0's thread beside the training, which alone talks to the service.

The names below are all that the training thread has of it: nothing that it calls there waits for
the service.
"""

from bagua_client.reporter.copies import Handover
from bagua_client.reporter.inbox import Event, GatheredTimes, RankTimes
from bagua_client.reporter.reporter import Reporter

__all__ = ["Event", "GatheredTimes", "Handover", "RankTimes", "Reporter"]
