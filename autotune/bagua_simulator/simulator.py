"""A training job on a cluster, simulated: the step time of every configuration.

Written independently of the search's cost model, for which it is the ground truth. It has what that
model leaves out: computing and communicating slow each other, bandwidth depends on the size,
launching takes time, channels share a link, and ranks are late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagua_simulator.cluster import Cluster, Phase, converted_seconds, parts, reduction
from bagua_simulator.step import Message, Step, Trace
from bagua_simulator.workload import Workload
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Cutter, Cutting, Tensor
from bagua_wire.knob_kinds import check_number
from bagua_wire.knobs import (
    BUCKET_KNOB,
    BUCKET_SIZES,
    CHANNELS_VALUES,
    DEFAULT_BUCKET_BYTES,
    EDGE_BUCKET_BYTES,
    EDGE_KNOBS,
    domains,
)
from bagua_wire.profile import BucketTiming, Profile


@dataclass(frozen=True)
class Bucket:
    """Tensors of one group that travel together; full when its ``last`` tensor is ready.

    Attributes:
        bytes: of its tensors.
        last: the index, in gradient-ready order, of the tensor that completes it.
        dtype: of its tensors.
    """

    bytes: int
    last: int
    dtype: str


class Layouts:
    """Cuts one list of tensors, in gradient-ready order, into buckets."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._cutter = Cutter(tensors)

    def cut(self, configuration: Mapping[str, Value]) -> list[Bucket]:
        """The buckets in the order in which they become full.

        Knobs missing in ``configuration`` are not in use.

        Raises:
            ValueError: a size is not valid, or ``buckets`` does not fit the tensors.
        """
        given = {BUCKET_KNOB: DEFAULT_BUCKET_BYTES, **configuration}
        for knob in (BUCKET_KNOB, *EDGE_KNOBS):
            check_number(knob, given.get(knob, 0), at_least=0)
        found = []
        for bucket in self._cutter.cut(Cutting.of(Configuration(given))):
            if len({self._tensors[position].group for position in bucket.positions}) > 1:
                start = bucket.positions[0]
                raise ValueError(f"buckets: the one that begins with tensor {start} mixes groups")
            found.append(Bucket(bucket.bytes, bucket.last, self._tensors[bucket.last].dtype))
        return found


DEFAULT = Configuration(
    bucket_bytes=DEFAULT_BUCKET_BYTES,
    hierarchical="off",
    channels=1,
    first_bucket_bytes=0,
    last_bucket_bytes=0,
    buckets=(),
)
# Bytes on the wire for each byte of a float32 gradient.
PRECISIONS = {"as_is": 1.0, "bf16": 0.5, "fp16": 0.5}
# The reported step times of ranks differ by so much, although all end together: their clocks are
# read at different moments.
SPREAD = 0.01
# How much one running collective slows computing down, as a share, and the seconds that the
# computing thread needs to launch an operation.
CONTENTION, LAUNCH_SECONDS = 0.1, 20e-6
# A late rank delays a step by this share of its length.
LATE_SHARES = (0.2, 1.0)


class Simulator:
    """The steps of one workload on one cluster.

    Args:
        contention: how much one running collective slows computing down, as a share.
        launch_seconds: that the computing thread needs to launch one operation.
        baseline: the job's own default, if that is known to be another than :attr:`default`.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        contention: float = CONTENTION,
        launch_seconds: float = LAUNCH_SECONDS,
        baseline: Configuration = DEFAULT,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.contention = contention
        self.launch_seconds = launch_seconds
        self.baseline = baseline
        self._layouts = Layouts(workload.tensors)
        self._known: dict[tuple[tuple[str, Value], ...], float] = {}

    def on(self, cluster: Cluster) -> Simulator:
        """The same job on another cluster."""
        other = copy(self)
        other.cluster = cluster
        other._known = {}
        return other

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Those of the workload, in gradient-ready order."""
        return self.workload.tensors

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of reducing that there are on this cluster."""
        return ("off", "leaders", "shards") if self.cluster.is_hierarchical else ("off",)

    @property
    def space(self) -> dict[str, dict[str, Any]]:
        """The knobs that a job registers with the service, by name."""
        few: dict[str, Sequence[Value]] = {
            "hierarchical": self.ways,
            "channels": CHANNELS_VALUES,
            "first_bucket_bytes": EDGE_BUCKET_BYTES,
            "last_bucket_bytes": EDGE_BUCKET_BYTES,
        }
        return domains((BUCKET_SIZES.low_bytes, BUCKET_SIZES.high_bytes), few, True)

    @property
    def default(self) -> Configuration:
        """Torch's default: buckets of 25 MiB, flat, one channel."""
        return DEFAULT

    def step_seconds(self, configuration: Mapping[str, Value]) -> float:
        """The length of an undisturbed step, the same on all ranks.

        Args:
            configuration: missing knobs are not in use; besides those of ``space`` it may have
                ``wire_precision``: ``as_is``, ``bf16`` or ``fp16``.

        Raises:
            ValueError: a knob has an unknown value.
        """
        key = tuple(sorted(configuration.items()))
        if key not in self._known:
            trace = self._run(configuration, self._layouts.cut(configuration), None)
            self._known[key] = self.workload.forward_seconds + trace.end_seconds
        return self._known[key]

    def computing_seconds(self, configuration: Mapping[str, Value]) -> float:
        """Until the last gradient of such a step is ready, with launches and contention."""
        return max(self.profile(configuration).ready_seconds)

    def sent_bytes(self, configuration: Mapping[str, Value]) -> float:
        """What crosses each node's link in a step, in each direction; arguments and errors as of
        :meth:`step_seconds`."""
        channels = channels_of(configuration)
        return sum(
            phase.bytes
            for bucket in self._layouts.cut(configuration)
            for phases in self._parts(bucket, configuration, channels)
            for phase in phases
            if phase.link == "network"
        )

    def profile(
        self,
        configuration: Mapping[str, Value],
        step: int = 0,
        generator: np.random.Generator | None = None,
        noise: float = 0.0,
    ) -> Profile:
        """Rank 0's profile of a step.

        Args:
            noise: standard deviation of the logarithm of every tensor's computing time and of
                every phase's; needs a ``generator`` unless it is 0.
        """
        disturbance = _Disturbance(generator, noise) if generator and noise else None
        forward_seconds = self.workload.forward_seconds
        if disturbance:
            forward_seconds *= float(disturbance.factors(1)[0])
        ready = self._ready(disturbance)
        buckets = self._layouts.cut(configuration)
        trace = self._run(configuration, buckets, disturbance, ready)
        wall = _moments(trace, ready)
        return Profile(
            step=step,
            step_seconds=forward_seconds + trace.end_seconds,
            ready_seconds=tuple((forward_seconds + wall).tolist()),
            buckets=tuple(
                BucketTiming(
                    bytes=bucket.bytes,
                    started_seconds=forward_seconds + started,
                    ended_seconds=forward_seconds + ended,
                )
                for bucket, started, ended in zip(
                    buckets, trace.started_seconds, trace.ended_seconds, strict=True
                )
            ),
        )

    def observe(
        self,
        configuration: Mapping[str, Value],
        generator: np.random.Generator,
        noise: float = 0.05,
        straggler_probability: float = 0.03,
    ) -> tuple[float, ...]:
        """Seconds of one step by rank, as the ranks report them.

        Args:
            noise: standard deviation of the logarithm of the step's length.
            straggler_probability: the probability that one rank is late, and all wait for it.
        """
        seconds = self.step_seconds(configuration) * generator.lognormal(0.0, noise)
        if generator.random() < straggler_probability:
            seconds *= 1 + generator.uniform(*LATE_SHARES)
        shares = 1 - SPREAD * generator.random(self.cluster.world_size)
        shares[generator.integers(self.cluster.world_size)] = 1.0
        return tuple((seconds * shares).tolist())

    def _ready(self, disturbance: _Disturbance | None) -> NDArray[np.float64]:
        ready = np.array(self.workload.ready_seconds)
        if disturbance is None:
            return ready
        return np.cumsum(np.diff(ready, prepend=0.0) * disturbance.factors(len(ready)))

    def _run(
        self,
        configuration: Mapping[str, Value],
        buckets: list[Bucket],
        disturbance: _Disturbance | None,
        ready: NDArray[np.float64] | None = None,
    ) -> Trace:
        channels = channels_of(configuration)
        times = self.workload.ready_seconds if ready is None else ready.tolist()
        messages = []
        for bucket in buckets:
            phases = self._parts(bucket, configuration, channels)
            if disturbance:
                phases = [disturbance.of(part) for part in phases]
            launch_seconds = self.launch_seconds * sum(map(len, phases))
            messages.append(Message(times[bucket.last], launch_seconds, tuple(phases)))
        return Step(messages, times[-1], channels, self.cluster, self.contention).run()

    def _parts(
        self, bucket: Bucket, configuration: Mapping[str, Value], channels: int
    ) -> list[tuple[Phase, ...]]:
        """The phases of each part of a bucket."""
        precision = str(configuration.get("wire_precision", "as_is"))
        if precision not in PRECISIONS:
            raise ValueError(f"wire_precision is {precision!r}; it must be as_is, bf16 or fp16")
        hierarchical = str(configuration.get("hierarchical", "off"))
        is_cast = precision != "as_is" and bucket.dtype == "torch.float32"
        wire_bytes = bucket.bytes * PRECISIONS[precision] if is_cast else bucket.bytes
        count = parts(wire_bytes, channels)
        phases = reduction(self.cluster, hierarchical, wire_bytes / count)
        if is_cast and phases:
            first = phases[0]
            converting = converted_seconds(bucket.bytes)
            phases = (replace(first, seconds=first.seconds + converting), *phases[1:])
        return [phases] * count


class _Disturbance:
    """Random factors around 1, for the times of one profiled step."""

    def __init__(self, generator: np.random.Generator, noise: float) -> None:
        self._generator = generator
        self._noise = noise

    def factors(self, count: int) -> NDArray[np.float64]:
        return self._generator.lognormal(0.0, self._noise, count)

    def of(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        factors = self.factors(len(phases))
        return tuple(
            replace(phase, seconds=phase.seconds * factor, bytes=phase.bytes * factor)
            for phase, factor in zip(phases, factors.tolist(), strict=True)
        )


def channels_of(configuration: Mapping[str, Value]) -> int:
    """Raises ValueError unless it is a positive number."""
    channels = configuration.get("channels", 1)
    if not isinstance(channels, int) or channels < 1:
        raise ValueError(f"channels is {channels!r}; it must be a positive number")
    return channels


def _moments(trace: Trace, ready: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when so much was computed; if a launch followed at once, the time before it."""
    passed, computed = np.array(trace.computed).T
    after = np.searchsorted(computed, ready, side="left")
    before = np.maximum(after - 1, 0)
    length = computed[after] - computed[before]
    share = np.divide(ready - computed[before], length, out=np.ones_like(ready), where=length > 0)
    moments: NDArray[np.float64] = passed[before] + share * (passed[after] - passed[before])
    return moments
