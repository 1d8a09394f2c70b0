"""From the profiled steps of a job to what it computes and what its network does."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.simulation.computing import Step, fit_computing
from bagua_autotune.simulation.recorded import Record, Traffic


def summarise(
    job: str,
    ranks_per_node: Sequence[int],
    tensors: Sequence[Tensor],
    steps: Sequence[Step],
) -> Record:
    """The record of a job.

    Args:
        steps: each with the configuration it ran under.

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
        traffic=tuple(
            _traffic(step) for step in steps if step[0].get("wire_precision", "as_is") == "as_is"
        ),
    )


def _traffic(step: Step) -> Traffic:
    configuration, profile = step
    return Traffic.model_validate(
        {
            "hierarchical": configuration.get("hierarchical", "off"),
            "channels": configuration.get("channels", 1),
            "buckets": tuple(sorted(profile.buckets, key=lambda bucket: bucket.started_seconds)),
        }
    )
