"""A second ground truth, that no cost model expects: ripples, a cliff, channels that cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bagua_autotune.model.knobs import Value
from bagua_simulator import Simulator
from bagua_simulator.cluster import Cluster
from bagua_simulator.collectives import Phase
from bagua_simulator.layout import Bucket
from bagua_simulator.simulator import CONTENTION, LAUNCH_SECONDS
from bagua_simulator.workload import Workload

KIB = 1024
FREE_CHANNELS = 2


@dataclass(frozen=True)
class Oddities:
    """What is odd about a network.

    Attributes:
        ripple: by which share the bandwidth rises and falls with the size of a part.
        ripple_octaves: so many doublings of the size later it is where it was.
        ripple_phase: of the ripple at one byte, in radians.
        cliff_bytes: below this size of a part a collective takes another, slow way.
        cliff_seconds: by how much longer that takes.
        channel_penalty: what each doubling of the channels beyond two adds to all that travels.
    """

    ripple: float = 0.3
    ripple_octaves: float = 2.0
    ripple_phase: float = 0.0
    cliff_bytes: float = 256 * KIB
    cliff_seconds: float = 300e-6
    channel_penalty: float = 0.12


class OddSimulator(Simulator):
    """A network as no cost model expects it: bandwidth ripples with the size, small parts fall off
    a cliff, many channels cost something."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        contention: float = CONTENTION,
        launch_seconds: float = LAUNCH_SECONDS,
        oddities: Oddities | None = None,
    ) -> None:
        super().__init__(workload, cluster, contention, launch_seconds)
        self.oddities = oddities or Oddities()

    def _parts(
        self, bucket: Bucket, configuration: Mapping[str, Value], channels: int
    ) -> list[tuple[Phase, ...]]:
        odd = self.oddities
        parts = super()._parts(bucket, configuration, channels)
        part_bytes = bucket.bytes / max(len(parts), 1)
        turns = math.log2(max(part_bytes, 1)) / odd.ripple_octaves
        factor = 1 + odd.ripple * math.sin(2 * math.pi * turns + odd.ripple_phase)
        factor /= 1 + odd.channel_penalty * max(0.0, math.log2(channels / FREE_CHANNELS))
        late = odd.cliff_seconds if part_bytes < odd.cliff_bytes else 0.0
        return [
            tuple(
                # Bytes rather than bandwidth: what the link allows at most changes too then.
                replace(phase, bytes=phase.bytes / factor, seconds=phase.seconds + late)
                for phase in phases
            )
            for phases in parts
        ]


def with_cluster(simulator: Simulator, cluster: Cluster) -> Simulator:
    """The same model and truth on another cluster."""
    return _like(simulator, simulator.workload, cluster)


def with_workload(simulator: Simulator, workload: Workload) -> Simulator:
    """Another model on the same cluster, with the same truth."""
    return _like(simulator, workload, simulator.cluster)


def with_slower_links(simulator: Simulator, factor: float) -> Simulator:
    """The same job on links that take ``factor`` times as long for each byte."""
    cluster = simulator.cluster
    slow = replace(
        cluster,
        bandwidth_bytes_per_second=cluster.bandwidth_bytes_per_second / factor,
        flow_bytes_per_second=cluster.flow_bytes_per_second / factor,
        inside_bandwidth_bytes_per_second=cluster.inside_bandwidth_bytes_per_second / factor,
    )
    return with_cluster(simulator, slow)


def _like(simulator: Simulator, workload: Workload, cluster: Cluster) -> Simulator:
    settings = workload, cluster, simulator.contention, simulator.launch_seconds
    if isinstance(simulator, OddSimulator):
        return OddSimulator(*settings, simulator.oddities)
    return Simulator(*settings)
