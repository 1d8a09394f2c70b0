"""Sums up a job's profiled steps: its computing times and its network traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bagua_simulator.measured.computing import ProfiledStep, fit_computing
from bagua_simulator.measured.recorded import Record
from bagua_simulator.measured.step_times import MeasuredStep, step_times_of
from bagua_simulator.measured.traffic import traffic_of, way_and_channels
from bagua_simulator.simulator import DEFAULT
from bagua_wire.configuration import Value
from bagua_wire.cutting import Tensor
from bagua_wire.knobs import BUCKET_KNOB, LOSSLESS_KNOBS


def summarise(
    job: str,
    ranks_per_node: Sequence[int],
    tensors: Sequence[Tensor],
    steps: Sequence[ProfiledStep],
    measured: Iterable[MeasuredStep] = (),
    default: Mapping[str, Value] | None = None,
) -> Record:
    """The record of a job.

    Args:
        steps: each with its configuration.
        measured: steps that trials were judged by.
        default: the job's default configuration.

    Raises:
        ValueError: there is no step, or one does not fit the tensors.
    """
    if not steps:
        raise ValueError("no step of this job has been profiled")
    for _, profile in steps:
        if len(profile.ready_seconds) != len(tensors):
            raise ValueError(
                f"step {profile.step} was profiled with {len(profile.ready_seconds)} tensors; "
                f"the job has {len(tensors)}"
            )
    computing = fit_computing(steps)
    return Record(
        job=job,
        ranks_per_node=tuple(ranks_per_node),
        tensors=tuple(tensors),
        forward_seconds=computing.forward_seconds,
        ready_seconds=tuple(computing.ready_seconds.tolist()),
        contention=computing.contention,
        launch_seconds=computing.launch_seconds,
        traffic=traffic_of(steps),
        step_times=step_times_of(measured),
        default=_simulated(default or {}),
    )


def _simulated(configuration: Mapping[str, Value]) -> dict[str, Value] | None:
    """The knobs of it that are simulated; None if it does something else than they say, as that of
    a sharded model does."""
    is_sharded = any(knob in configuration for knob in LOSSLESS_KNOBS if knob not in DEFAULT)
    if is_sharded or BUCKET_KNOB not in configuration or not way_and_channels(configuration):
        return None
    return {knob: v for knob, v in configuration.items() if knob in DEFAULT}
