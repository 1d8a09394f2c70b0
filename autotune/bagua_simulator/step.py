"""One training step, event by event: computing, launching and communicating side by side.

Gradients become ready one after the other; the computing thread also launches each bucket's
reduction, which takes time. On a channel the phases of one kind run one after the other, as the
operations of a process group do; different phases and different channels run at once and share
their link equally (processor sharing), but none gets more than it could use alone. While anything
communicates, computing is slower.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bagua_simulator.cluster import Cluster, Link, Phase


@dataclass(frozen=True)
class Message:
    """A bucket to be sent: it is full after ``ready_seconds`` of computing, then launched, then its
    parts are sent at once, each through its own phases."""

    ready_seconds: float
    launch_seconds: float
    parts: tuple[tuple[Phase, ...], ...]


@dataclass
class Trace:
    """When things happened, in seconds since the beginning of the backward pass.

    Attributes:
        started_seconds: for each message, when its launch was done.
        ended_seconds: for each message, when its last phase was done.
        computed: pairs of seconds passed and seconds of computing done by then, ascending.
        end_seconds: when everything was done.
    """

    started_seconds: list[float]
    ended_seconds: list[float]
    computed: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    end_seconds: float = 0.0


class _Flow:
    """A phase of a part under way."""

    __slots__ = (
        "flows",
        "left_bytes",
        "left_seconds",
        "link",
        "most",
        "part",
        "place",
        "rate",
        "weight",
    )

    def __init__(self, part: int, place: int, phase: Phase) -> None:
        self.part = part
        self.place = place
        self.link = phase.link
        self.flows = phase.flows
        self.left_seconds = phase.seconds
        self.left_bytes = phase.bytes
        self.most = phase.most
        self.weight = phase.weight
        self.rate = 0.0


class Step:
    """The state of one simulated step; :meth:`run` it once.

    Args:
        messages: in the order in which they become full.
        compute_seconds: of the whole backward pass.
        channels: process groups that the parts use in turn.
        cluster: whose links they share.
        contention: computing takes ``1 + contention * sqrt(n)`` times as long while ``n`` phases
            are under way.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        compute_seconds: float,
        channels: int,
        cluster: Cluster,
        contention: float,
    ) -> None:
        self._messages = messages
        self._parts = [
            (index, phases) for index, message in enumerate(messages) for phases in message.parts
        ]
        self._left = [len(message.parts) for message in messages]
        self._compute_seconds = compute_seconds
        self._channels = channels
        self._cluster = cluster
        self._contention = contention
        # By channel and place in the chain: the phase under way, and the phases that wait for it.
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._waiting: dict[tuple[int, int], deque[int]] = {}
        self._by_link: dict[Link, list[_Flow]] = {"network": [], "inside": []}
        self._trace = Trace([0.0] * len(messages), [0.0] * len(messages))
        self._now = 0.0

    def run(self) -> Trace:
        """Run to the end of computing and communicating."""
        part = 0
        for index, message in enumerate(self._messages):
            self._compute_until(message.ready_seconds)
            self._pass(message.launch_seconds)
            self._trace.computed.append((self._now, message.ready_seconds))
            self._trace.started_seconds[index] = self._now
            for _ in message.parts:
                self._enter(part, 0)
                part += 1
        self._compute_until(self._compute_seconds)
        while self._flows:
            self._advance(self._next_event_seconds())
        self._trace.end_seconds = self._now
        return self._trace

    def _compute_until(self, target_seconds: float) -> None:
        computed = self._trace.computed[-1][1]
        while computed < target_seconds:
            slowdown = 1 + self._contention * math.sqrt(len(self._flows))
            left = (target_seconds - computed) * slowdown
            event = self._next_event_seconds()
            if event < left:
                self._advance(event)
                computed += event / slowdown
            else:
                self._advance(left)
                computed = target_seconds
            self._trace.computed.append((self._now, computed))

    def _pass(self, seconds: float) -> None:
        """Continue the communication while the computing thread launches."""
        while seconds > 0:
            step = min(seconds, self._next_event_seconds())
            self._advance(step)
            seconds -= step

    def _next_event_seconds(self) -> float:
        """Seconds until the next phase begins to send or is done; infinite if there is none."""
        soonest = math.inf
        for flow in self._flows.values():
            seconds = flow.left_seconds or flow.left_bytes / flow.rate
            if seconds < soonest:
                soonest = seconds
        return soonest

    def _advance(self, seconds: float) -> None:
        """Advance the time by ``seconds``, at most up to the next event."""
        self._now += seconds
        done: list[tuple[tuple[int, int], _Flow]] = []
        for key, flow in self._flows.items():
            if flow.left_seconds:
                # A remainder from rounding must not become an event.
                if flow.left_seconds > seconds * (1 + 1e-12):
                    flow.left_seconds -= seconds
                    continue
                flow.left_seconds = 0.0
                if flow.left_bytes > 0:
                    self._send(flow)
                    continue
            elif flow.left_bytes > flow.rate * seconds * (1 + 1e-12):
                flow.left_bytes -= flow.rate * seconds
                continue
            done.append((key, flow))
        for key, flow in done:
            self._leave(key, flow)

    def _enter(self, part: int, place: int) -> None:
        """Begin the phase at ``place`` of a part, or let it wait for earlier ones."""
        message, phases = self._parts[part]
        if place == len(phases):
            self._left[message] -= 1
            if not self._left[message]:
                self._trace.ended_seconds[message] = self._now
            return
        key = (part % self._channels, place)
        if key in self._flows:
            self._waiting.setdefault(key, deque()).append(part)
        else:
            self._begin(key, part)

    def _begin(self, key: tuple[int, int], part: int) -> None:
        place = key[1]
        flow = _Flow(part, place, self._parts[part][1][place])
        self._flows[key] = flow
        if not flow.left_seconds:
            self._send(flow)

    def _leave(self, key: tuple[int, int], flow: _Flow) -> None:
        if flow in self._by_link[flow.link]:
            self._by_link[flow.link].remove(flow)
            self._share(flow.link)
        del self._flows[key]
        waiting = self._waiting.get(key)
        if waiting:
            self._begin(key, waiting.popleft())
        self._enter(flow.part, flow.place + 1)

    def _send(self, flow: _Flow) -> None:
        self._by_link[flow.link].append(flow)
        self._share(flow.link)

    def _share(self, link: Link) -> None:
        """Divide the link into equal shares; what a phase cannot use goes to the others."""
        flows = self._by_link[link]
        left = self._cluster.capacity(link, sum(flow.flows for flow in flows))
        for count, flow in enumerate(sorted(flows, key=lambda flow: flow.most * flow.weight)):
            flow.rate = min(flow.most, left / (len(flows) - count) / flow.weight)
            left -= flow.rate * flow.weight
