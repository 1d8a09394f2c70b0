"""A workload on a cluster under each algorithm that keeps replicas together.

Gradients travel as they become ready. Weights travel when the first bucket is full, and the step
ends when they have arrived (``begin``); or when the optimizer has stepped (``end``); or beside the
steps (``apart``).
"""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.model.knobs import Value
from bagua_simulator.algorithms.exchanges import Sends, exchange
from bagua_simulator.collectives import parts
from bagua_simulator.layout import Layouts
from bagua_simulator.simulator import Simulator
from bagua_simulator.step import Message, Step

ROUND_PAUSE_SECONDS = 0.5
"""Of ``async``: from the end of a round of averaging to the beginning of the next
(``sync_interval_ms``)."""


class Replicas:
    """The steps of a job under one algorithm.

    Args:
        simulator: the job, whose gradients are summed up.
        sends: what travels instead.
    """

    def __init__(self, simulator: Simulator, sends: Sends) -> None:
        self.simulator = simulator
        self.sends = sends
        self._layouts = Layouts(simulator.workload.tensors)

    def step_seconds(self, configuration: Mapping[str, Value]) -> float:
        """The length of an undisturbed step, the same on all ranks.

        Args:
            configuration: as ``Simulator`` takes it, without another precision on the wire.

        Raises:
            ValueError: a knob has an unknown value, or one that the algorithm does not work with.
        """
        if self.sends == Sends():
            return self.simulator.step_seconds(configuration)
        if self.sends.when == "apart":
            return self._apart_seconds()
        if configuration.get("wire_precision", "as_is") != "as_is":
            raise ValueError("only gradients that are summed up travel at another precision")
        workload, cluster = self.simulator.workload, self.simulator.cluster
        channels = configuration.get("channels", 1)
        if not isinstance(channels, int) or channels < 1:
            raise ValueError(f"channels is {channels!r}; it must be a positive number")
        messages = [
            self._message(ready_seconds, size_bytes, configuration, channels)
            for ready_seconds, size_bytes in self._travelling(configuration)
        ]
        step = Step(
            messages, workload.ready_seconds[-1], channels, cluster, self.simulator.contention
        )
        return workload.forward_seconds + step.run().end_seconds

    def _travelling(self, configuration: Mapping[str, Value]) -> list[tuple[float, float]]:
        """What travels: when it may leave, since the beginning of the backward pass, and bytes."""
        times = self.simulator.workload.ready_seconds
        buckets = self._layouts.cut(configuration)
        if self.sends.when == "begin":
            # All weights of a kind at once, when the first bucket is full.
            whole: dict[str, float] = {}
            for tensor in self.simulator.workload.tensors:
                whole[tensor.group] = whole.get(tensor.group, 0.0) + tensor.bytes
            return [(times[buckets[0].last], size_bytes) for size_bytes in whole.values()]
        is_late = self.sends.when == "end"
        return [(times[-1] if is_late else times[b.last], float(b.bytes)) for b in buckets]

    def _message(
        self,
        ready_seconds: float,
        size_bytes: float,
        configuration: Mapping[str, Value],
        channels: int,
    ) -> Message:
        count = parts(size_bytes, channels)
        way = str(configuration.get("hierarchical", "off"))
        phases = exchange(self.simulator.cluster, self.sends, way, size_bytes / count)
        launch_seconds = self.simulator.launch_seconds * count * len(phases)
        return Message(ready_seconds, launch_seconds, (phases,) * count)

    def _apart_seconds(self) -> float:
        """No step waits for a round of averaging, but computing is slower beside it."""
        workload = self.simulator.workload
        size_bytes = float(sum(tensor.bytes for tensor in workload.tensors))
        phases = exchange(self.simulator.cluster, self.sends, "off", size_bytes)
        round_seconds = sum(phase.alone_seconds for phase in phases)
        share = round_seconds / (round_seconds + ROUND_PAUSE_SECONDS)
        return workload.compute_seconds * (1 + self.simulator.contention * share)
