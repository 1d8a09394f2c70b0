"""A wrapped model as a job that is tuned has it, without an agent: all its buckets travel by our
hook, and are re-cut when we say so."""

from __future__ import annotations

from collections.abc import Callable

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.reducer.tunable_reducer import TunableReducer


def hooked(wrapped: DistributedDataParallel) -> TunableReducer:
    """What is re-cut of ``wrapped``, observed in detail. All ranks must call it together, between
    two steps."""
    wrapped.reconfigure(wrapped.configuration)
    tunable = wrapped._tunable  # nothing public leads there
    assert tunable is not None
    tunable.attach()
    return tunable


def recut(
    wrapped: DistributedDataParallel,
    configuration: Configuration,
    step: Callable[[], object],
    in_detail: bool = True,
) -> int:
    """Put ``configuration`` into force and make steps until torch has cut the buckets for good.

    Args:
        in_detail: whether its steps are still observed in detail, as those of a trial until they
            are measured.

    Returns:
        How many steps that were.

    Raises:
        RuntimeError: the model cannot run under it.
    """
    if not wrapped.reconfigure(configuration):
        raise RuntimeError(f"the model cannot run under {configuration}")
    tunable = wrapped._tunable
    assert tunable is not None
    if not in_detail:
        tunable.attach(in_detail=False)
    steps = 0
    while not tunable.is_settled:
        step()
        steps += 1
    return steps
