"""Simulated training jobs: what a configuration, or another network, would bring."""

from __future__ import annotations

from bagua_simulator.cases import Case, cases
from bagua_simulator.cluster import Cluster
from bagua_simulator.simulator import Simulator
from bagua_simulator.workload import Workload

__all__ = ["Case", "Cluster", "Simulator", "Workload", "cases"]
