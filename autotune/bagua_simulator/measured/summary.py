"""Sums up a job's profiled steps: its computing times and its network traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua_autotune.model.layout import Tensor
from bagua_simulator.measured.computing import ProfiledStep, fit_computing
from bagua_simulator.measured.recorded import Record
from bagua_simulator.measured.step_times import MeasuredStep, step_times_of
from bagua_simulator.measured.traffic import traffic_of


def summarise(
    job: str,
    ranks_per_node: Sequence[int],
    tensors: Sequence[Tensor],
    steps: Sequence[ProfiledStep],
    measured: Iterable[MeasuredStep] = (),
) -> Record:
    """The record of a job.

    Args:
        steps: each with its configuration.
        measured: steps that trials were judged by.

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
    )
