"""The sizes that are set are those by which DeepSpeed communicates, from the next step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import bagua_client
from bagua_client.integrations.zero_engine import tunable_of
from tests.client.zero.models import Kind, engine_of, needs_deepspeed, train
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, needs_deepspeed]
ALL = 4560
"""The parameters of the model."""


@contextmanager
def _elements_of(names: Sequence[str]) -> Iterator[list[int]]:
    """What the calls of these methods of DeepSpeed's backend send: elements of all ranks."""
    from deepspeed.comm.torch import TorchBackend

    seen: list[int] = []

    def watched(name: str) -> Any:
        method = getattr(TorchBackend, name)

        def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(max(each.numel() for each in _tensors_in((args, list(kwargs.values())))))
            return method(backend, *args, **kwargs)

        return mock.patch.object(TorchBackend, name, call)

    with ExitStack() as patches:
        for name in names:
            patches.enter_context(watched(name))
        yield seen


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _reduced(kind: Kind, sizes: list[dict[str, Any]], names: tuple[str, ...]) -> list[list[int]]:
    """What is sent in the step after each change."""
    engine = bagua_client.tune(engine_of(kind))
    train(engine, kind, {}, 3)
    found = []
    for step, changes in enumerate(sizes, 3):
        with _elements_of(names) as seen:
            train(engine, kind, {step: changes}, step + 1, first=step)
        found.append([count for count in seen if count > 1])
    engine.destroy()
    return found


def test_gradients_travel_in_buckets_of_the_size_that_is_set(two_ranks: RankPool) -> None:
    sizes = [{"bucket_bytes": 4 * ALL}, {"bucket_bytes": 4 * 700}, {"bucket_bytes": 4}, {}]
    for found in two_ranks.run(_reduced, Kind(), sizes, ("all_reduce",)):
        whole, parts, alone, default = found
        assert whole == [ALL]
        assert max(parts) <= 700
        assert sum(parts) == ALL
        assert (
            len(alone) == 19
        )  # A tensor each; one belongs to two ranks, and is sent in two parts.
        assert max(default) <= 1500 < sum(default) == ALL
        assert len(whole) < len(default) < len(parts) < len(alone)


def test_what_stage_3_reduces_and_gathers(two_ranks: RankPool) -> None:
    sizes = [{}, {"bucket_bytes": 4 * 600}, {"prefetch_bytes": 0}, {"prefetch_bytes": 4 * ALL}, {}]
    kind = Kind(stage=3)
    for found in two_ranks.run(_reduced, kind, sizes, ("reduce_scatter_tensor",)):
        default, smaller, *others = found
        assert max(smaller) < max(default)
        assert len(smaller) > len(default)
        assert others == [default] * 3
    for found in two_ranks.run(_reduced, kind, sizes, ("all_gather_into_tensor",)):
        default, smaller, none, most, again = found
        assert default == smaller == again
        assert len(most) < len(default) < len(none)


def _in_force_at_first(stage: int) -> list[tuple[int, int]]:
    """Of an engine that is not tuned: before anything was asked of it, and then."""
    engine = bagua_client.tune(engine_of(Kind(stage)))
    first = engine.configuration
    assert engine.reconfigure(replace(first, bucket_bytes=4 * 600))
    found = [(each.bucket_bytes, each.prefetch_bytes) for each in (first, engine.configuration)]
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "prefetch"), [(2, 0), (3, 4 * 600)])
def test_the_configuration_is_what_the_training_has_set(
    two_ranks: RankPool, stage: int, prefetch: int
) -> None:
    for found in two_ranks.run(_in_force_at_first, stage):
        assert found == [(4 * 1500, prefetch), (4 * 600, prefetch)]


def _in_the_midst(stage: int) -> list[int]:
    """Asked for between the micro-batches of a step, where a buffer of the old size is in use."""
    kind = Kind(stage, micro_batches=2, zero={"overlap_comm": True})
    engine = bagua_client.tune(engine_of(kind))
    buckets, default = tunable_of(engine).buckets, tunable_of(engine).default
    train(engine, kind, {}, 1)
    found = []
    for part in range(2):
        loss = engine(torch.ones(5, 16)).square().mean()
        engine.backward(loss)
        if part == 0:
            assert engine.reconfigure(replace(default, bucket_bytes=4 * 3000))
            assert engine.configuration.bucket_bytes == 4 * 3000
        found.append(buckets.read().bucket)
        engine.step()
    found.append(buckets.read().bucket)
    train(engine, kind, {}, 2, first=1)
    engine.destroy()
    return found


def test_a_change_in_the_midst_of_a_step_waits_where_it_must(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_in_the_midst, 1):
        assert found == [1500, 1500, 3000]
