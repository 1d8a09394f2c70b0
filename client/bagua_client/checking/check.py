"""The ranks' part of ``bagua-autotune check``: how long a step computes, communicates and waits.

Nothing is tuned, and no service is used. After each block of steps the ranks gather what they have
measured, and each rank writes it to the file that ``check`` named. ``check`` reads the file, and
ends the job when enough steps are measured.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.agent.admission import why_not_admitted
from bagua_client.agent.job import describe_job, device_name
from bagua_client.algorithms.quantized import RANGE_ELEMENTS
from bagua_client.checking.surroundings import Seen, Surroundings, gather
from bagua_client.communication.agreement import Group, ranks_in
from bagua_client.communication.communicator import NOBODY_ELSE
from bagua_client.compression import BOUNDS_BYTES
from bagua_client.environment import Environment
from bagua_client.layout import TensorSpec
from bagua_client.measuring.clock import clock_for
from bagua_client.measuring.rank_measurement import Measures, RankMeasurement
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.wrapper import called_untraced, is_compiled
from bagua_client.tunable.looks import NotTuned, together
from bagua_client.tunable.memory import LARGEST_SHARE, memory_of
from bagua_client.tunable.tunable import Tunable
from bagua_wire.profile import BucketTiming, GatherTiming

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

WARMUP_STEPS = 5
"""First steps, not measured: connections are made in them, kernels are chosen, and torch cuts its
buckets.
"""
BLOCK_STEPS = 5
"""Number of steps that are measured before the ranks gather them."""
DROPPED_STEPS = 2
"""Steps after a block that are not measured, as the ranks have just waited for one another and
their devices.
"""

PROFILES_KEPT = 4
"""Latest recorded steps that are written: enough for the cost model."""
CHECKED = "check"
"""The name of a job that is not registered."""

FAILED = [[math.inf] * 3] * BLOCK_STEPS
"""What a rank that cannot measure reports in place of a block."""

_checks: list[Check] = []
"""The check of the first model that this process wrapped and that can be measured, if there is one.
"""


class Check(Measures):
    """Measures one model. All of its ranks make theirs together.

    Args:
        tunable: of the model; its configuration is not changed.
        optimizers: of the model, as far as they are known; their steps tell where a step ends.
        path: of the file to write.
        wrapper: of the model, if it is replicated.

    Attributes:
        models: how many models this process has wrapped.
    """

    def __init__(
        self,
        tunable: Tunable,
        optimizers: Iterable[torch.optim.Optimizer],
        path: str,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        self._tunable = tunable
        self._communicator = tunable.communicator
        self._path = path
        self._observe = tunable.observers.call
        self.measurement = RankMeasurement(tunable, optimizers, counts_recorded=True)
        self._steps: list[tuple[float, float | None, float | None]] = []
        self._gathers: Sequence[GatherTiming] = ()
        self._profiles: deque[dict[str, Any]] = deque(maxlen=PROFILES_KEPT)
        self._job: dict[str, Any] | None = None
        self._reductions = 0
        self._block_begins: int | None = None
        self.models = 1
        self._recomputing, self._read = _try(Recomputing, tunable), 0
        is_alone = self._communicator.world_size == 1
        self._surroundings = None if is_alone else _try(Surroundings, tunable, wrapper)
        self._seen: list[Seen] = []
        tunable.report_to(self)
        tunable.attach()
        self._observe(self.measurement.follow)
        self._observe(self._write)

    def reduced(self) -> None:
        self._reductions += 1
        if self._surroundings is not None:
            self._observe(self._surroundings.reduced)
        begins = bool(self._observe(self.measurement.tick))
        if self._block_begins is None:
            if self._reductions < WARMUP_STEPS or not self._tunable.is_settled:
                return
            self._block_begins = self._reductions
        if self._reductions == self._block_begins:
            self._observe(self.measurement.begin, 0, is_new=False)
        self._observe(self.measurement.record, begins)
        if self._reductions == self._block_begins + BLOCK_STEPS:
            self._bring_together()
            self._observe(self.measurement.leave, True)
            self._block_begins = self._reductions + DROPPED_STEPS

    def _bring_together(self) -> None:
        """Gather this block from all ranks, and sum each step up."""
        device = self._communicator.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # so that all marks are known
        measured = self._observe(self._own)
        rows = FAILED if measured is None or self._tunable.observers.has_failed else measured
        own = torch.tensor(rows, dtype=torch.float64, device=device)
        gathered = [torch.empty_like(own) for _ in range(self._communicator.world_size)]
        if len(gathered) > 1:
            dist.all_gather(gathered, own, group=self._communicator.group)
        by_rank = torch.stack(gathered if len(gathered) > 1 else [own])
        failed = [rank for rank, rows in enumerate(by_rank.tolist()) if rows == FAILED]
        if failed:
            self._give_up(failed)
            return
        if len(gathered) > 1:
            look = None if self._surroundings is None else _try(self._surroundings.look)
            self._seen = gather(look or b"{}", self._communicator)
        if self._recomputing is not None:
            self._observe(self._recomputing.read, self._reductions - self._read)
        self._read = self._reductions
        self._observe(self._sum_up, by_rank.transpose(0, 1).tolist())
        self._observe(self._write)

    def _sum_up(self, steps: list[list[list[float]]]) -> None:
        for row in steps:
            seconds, computing, travelling = zip(*row, strict=True)
            if (slowest := _known(max, seconds)) is not None:
                # The shortest: the other ranks also wait in it for the last one to come.
                self._steps.append((slowest, _known(max, computing), _known(min, travelling)))

    def _give_up(self, ranks: Sequence[int]) -> None:
        """Measure nothing more, as these ranks cannot and all know it; the training goes on."""
        where = ", ".join(map(str, ranks))
        _replace(self._path, {"refusal": f"an error on rank {where}; see the log of that rank"})
        self.close()

    def close(self) -> None:
        """Measure no longer."""
        self._observe(self.measurement.close)
        if self._recomputing is not None:
            self._recomputing.close()
        self._tunable.detach()

    def _own(self) -> list[list[float]]:
        """Return for each step of the block three times in seconds, NaN where not known: of the
        step, of this rank's computing, and of communication.
        """
        unknown = [math.nan] * 3
        found: dict[int, list[float]] = {}
        for time in self.measurement.take(True, BLOCK_STEPS):
            computing = math.nan if time.compute_seconds is None else time.compute_seconds
            if self._communicator.world_size == 1:  # It waits for nobody.
                computing = time.seconds
            found[time.step] = [time.seconds, computing, math.nan]
        for recording in self.measurement.take_recordings():
            if recording.step in found:
                profile = recording.read()
                self._gathers = profile.gathers
                self._profiles.append(asdict(profile))
                travelled = travelling_seconds([*profile.buckets, *profile.gathers])
                found[recording.step][2] = travelled
        first = self.measurement.spans[-1].first
        return [found.get(step, unknown) for step in range(first, first + BLOCK_STEPS)]

    def _write(self) -> None:
        if self._profiles and self._job is None:
            environment = Environment.read()
            self._job = _try(describe_job, self._tunable, environment, CHECKED) or {}
        topology, device = self._communicator.topology, self._communicator.device
        document = {
            "ranks": self._communicator.world_size,
            "nodes": len(topology.nodes),
            "backend": self._communicator.backend,
            "device": device_name(device),
            "models": self.models,
            "kind": self._tunable.offer.kind,
            "backward_passes": round(self._reductions / max(self.measurement.step, 1)),
            "steps": self._steps,
            "shares": self._shares(),
            "seen": self._seen,
            "job": self._job,
            "profiles": list(self._profiles),
            "recomputing": None if self._recomputing is None else _try(self._recomputing.facts),
        }
        _replace(self._path, document)

    def _shares(self) -> dict[str, float]:
        """Return what part of a step's bytes would be left in fewer bits; see :func:`shares`."""
        tensors = self._tunable.tensors
        registered = [tensors[index] for index in self._tunable.order]
        gathers = [(gather.tensor, gather.bytes) for gather in self._gathers]
        sent = gradients(tensors) + gathered(registered, gathers)
        return shares(sent, self._tunable.offer.kind == "replicated")


def begin(
    group: Group,
    refusal: str,
    tunable: Callable[[], Tunable],
    optimizers: Iterable[torch.optim.Optimizer],
    path: str,
    wrapper: DistributedDataParallel | None = None,
) -> None:
    """Measure this model, or write why that is not possible. If a process wraps several models, the
    first is measured and the others are only counted. All ranks call it together.

    Args:
        group: the ranks that train it.
        refusal: why it cannot be measured on this rank; empty: it can.
        tunable: makes the model's.
        optimizers, path, wrapper: see :class:`Check`.
    """
    if _checks:
        _checks[0].models += 1
        return
    nobody_else = NOBODY_ELSE if group is not None and ranks_in(group) == 1 else ""
    refusal = nobody_else or why_not_admitted(group, refusal, {})
    if not refusal:
        try:
            made = tunable()
            make, communicator = partial(Check, made, optimizers, path, wrapper), made.communicator
            _checks.append(together(make, Check.close, communicator.group, communicator.device))
        except NotTuned as reason:
            refusal = str(reason)
    if refusal:
        _replace(path, {"refusal": refusal})


def travelling_seconds(sent: Sequence[BucketTiming | GatherTiming]) -> float:
    """How long at least one of them was being communicated."""
    total, until = 0.0, 0.0
    for each in sorted(sent, key=lambda each: each.started_seconds):
        total += max(0.0, each.ended_seconds - max(until, each.started_seconds))
        until = max(until, each.ended_seconds)
    return total


def _try(look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What ``look`` returns; None if it fails, which costs no more than what it would tell."""
    try:
        return look(*args, **kwargs)
    except Exception as error:
        logger.warning("this rank cannot see what is around its training: %r", error)
        return None


def _known(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """The largest or smallest value of all ranks; None if one of them is not known."""
    return None if any(map(math.isnan, values)) else choose(values)


def _replace(path: str, document: object) -> None:
    """Write the file in one move, as others read it and the ranks of a machine all write it."""
    new = f"{path}.{os.getpid()}"
    try:
        with open(new, "w") as file:
            json.dump(document, file)
        os.replace(new, path)
    except OSError as error:
        logger.warning("what was measured cannot be written: %s", error)


class Recomputing:
    """What the training's blocks recompute in a step, and what memory there is to keep their
    activations instead.

    Times the forward passes of the blocks: recomputing is one more. Those of compiled blocks are
    left alone, as the compiler would follow what times them.

    Args:
        tunable: of the model.
    """

    def __init__(self, tunable: Tunable) -> None:
        self._tunable = tunable
        self._clock = clock_for(tunable.communicator.device)
        self._begun: dict[torch.nn.Module, Any] = {}
        self._passes: list[tuple[Any, Any]] = []
        self._seconds: float | None = None
        self._device_memory = memory_of(tunable.communicator.device)
        blocks = tunable.recomputation.modules
        # Of some blocks alone nobody knows what all of them take.
        timed = [] if any(map(is_compiled, blocks)) else blocks
        observe = tunable.observers.call
        begins = called_untraced(lambda *given: observe(self._begins, *given))
        ends = called_untraced(lambda *given: observe(self._ends, *given))
        self._handles = [
            handle
            for block in timed
            for handle in (
                block.register_forward_pre_hook(begins),
                block.register_forward_hook(ends),
            )
        ]

    def close(self) -> None:
        """Time no longer."""
        while self._handles:
            self._handles.pop().remove()
        self._begun.clear()

    def read(self, steps: int) -> None:
        """So many steps were made since this was called last, and the device has ended them."""
        passes, self._passes = self._passes, []
        if passes and steps:
            total = sum(self._clock.seconds(begin, end) for begin, end in passes)
            self._seconds = total / steps

    def facts(self) -> dict[str, Any]:
        """As the file of a check has it; what is not known is None."""
        recomputation, device = self._tunable.recomputation, self._device_memory
        found: dict[str, Any] = {
            "blocks": len(recomputation),
            "seconds": self._seconds,
            "kept_bytes": recomputation.kept_bytes(0) if recomputation.is_known else None,
            "left_alone": self._tunable.offer.recomputed.left_alone,
        }
        if device is not None:
            found["peak_bytes"] = device.taken().peak_bytes
            found["device_bytes"] = min(device.allowed_bytes(), device.reachable_bytes())
            found["limit_bytes"] = int(LARGEST_SHARE * found["device_bytes"])
        return found

    def _begins(self, block: torch.nn.Module, _: Any) -> None:
        if block.training and not is_in_backward():
            self._begun[block] = self._clock.mark()

    def _ends(self, block: torch.nn.Module, _: Any, __: Any) -> None:
        if (begun := self._begun.pop(block, None)) is not None:
            self._passes.append((begun, self._clock.mark()))


# How many bytes a step would send if its numbers travelled in fewer bits, or as rank-1 matrices.
# What changes the numbers is tuned only where the user lists it; this says what it could be worth.

WORTH = 2
"""Torch's PowerSGD hook sends a matrix as it is unless that many times fewer numbers would do."""
FLOATS = ("float64", "float32", "float16", "bfloat16")


class Sent(NamedTuple):
    """Numbers of one dtype that are communicated together in each step.

    Attributes:
        shape: their sizes; of numbers that have none, how many there are.
        element_bytes: of one.
        is_float: else they always travel as they are.
        is_reduced: they are gradients; else weights that are gathered, whose precision is the
            training's own.
    """

    shape: tuple[int, ...]
    element_bytes: float
    is_float: bool = True
    is_reduced: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.elements * self.element_bytes


def gradients(tensors: Sequence[TensorSpec]) -> list[Sent]:
    """What a step reduces."""
    return [
        Sent(each.shape, each.element_bytes, each.dtype.removeprefix("torch.") in FLOATS)
        for each in tensors
        if not each.is_sparse
    ]


def gathered(tensors: Sequence[TensorSpec], gathers: Sequence[tuple[int, int]]) -> list[Sent]:
    """What a step of a sharded model gathers.

    Args:
        tensors: of its units.
        gathers: for each, the unit's place among ``tensors``, and how many bytes there were.
    """
    found = []
    for place, size_bytes in gathers:
        elements = tensors[place].elements
        found.append(Sent((elements,), size_bytes / max(elements, 1), is_reduced=False))
    return found


def shares(sent: Sequence[Sent], has_shapes: bool) -> dict[str, float]:
    """Return what part of a step's bytes would be left: with ``bits16``, ``bits8`` and
    ``powersgd`` of rank 1 (Vogels et al., NeurIPS 2019); without those that would leave all.

    Args:
        has_shapes: the shapes are those of the weights. PowerSGD needs them, and replicas.
    """
    ways: dict[str, Callable[[Sent], float]] = {"bits16": _bits16, "bits8": _bits8}
    if has_shapes:
        ways["powersgd"] = _powersgd
    total = sum(each.bytes for each in sent)
    found = {way: sum(map(left, sent)) / total for way, left in ways.items()} if total else {}
    return {way: share for way, share in found.items() if share < 1}


def _bits16(sent: Sent) -> float:
    narrows = sent.is_float and sent.is_reduced
    return min(sent.bytes, 2.0 * sent.elements) if narrows else sent.bytes


def _bits8(sent: Sent) -> float:
    bounds = BOUNDS_BYTES * math.ceil(sent.elements / RANGE_ELEMENTS)
    return min(sent.bytes, sent.elements + bounds) if sent.is_float else sent.bytes


def _powersgd(sent: Sent) -> float:
    rows = sent.shape[0] if len(sent.shape) > 1 else 1
    columns = sent.elements // max(rows, 1)
    is_worth_it = len(sent.shape) > 1 and (rows + columns) * WORTH < sent.elements
    if not (sent.is_float and is_worth_it):
        return sent.bytes
    return (rows + columns) * sent.element_bytes
