"""Simulated training jobs: what a configuration, or another network, would bring."""

from __future__ import annotations

from bagua_autotune.simulation.cluster import Cluster
from bagua_autotune.simulation.problems import Problem, problems
from bagua_autotune.simulation.simulator import Simulator
from bagua_autotune.simulation.workload import Workload

__all__ = ["Cluster", "Problem", "Simulator", "Workload", "problems"]
