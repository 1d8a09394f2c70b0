"""Several hosts on one machine: network namespaces with links of a given rate and delay."""

from __future__ import annotations

from .host import Host
from .job import Job
from .network import Network
from .testbed import Testbed

__all__ = ["Host", "Job", "Network", "Testbed"]
