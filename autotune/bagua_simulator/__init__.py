"""Simulated training jobs: the effect of a configuration or of another network."""

from __future__ import annotations

from bagua_simulator.cluster import Cluster
from bagua_simulator.simulator import Simulator
from bagua_simulator.workload import Workload
from bagua_simulator.workloads import Case, cases

__all__ = ["Case", "Cluster", "Simulator", "Workload", "cases"]
