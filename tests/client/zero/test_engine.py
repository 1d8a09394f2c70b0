"""An engine of DeepSpeed: the sizes that are set are those by which it communicates, from the next
step on; what it learns is what an untouched one does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import bagua_client
from bagua_client.configuration import Configuration
from bagua_client.integrations.zero_engine import tunable_of
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.tunable.memory import Lack
from bagua_client.zero import PREFETCH, BucketsMemory, Sizes, held_bytes, refusal_of
from tests.client.tunable.test_measured_memory import GIB, Device
from tests.client.zero.models import (
    Kind,
    deepspeed_on_cpu,
    differs,
    engine_of,
    needs_deepspeed,
    train,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

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


@needs_deepspeed
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


@needs_deepspeed
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


@needs_deepspeed
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


@needs_deepspeed
def test_a_change_in_the_midst_of_a_step_waits_where_it_must(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_in_the_midst, 1):
        assert found == [1500, 1500, 3000]


# Engines of which nothing can be tuned say so, and train as they do.

ON_CPU = {"device": "cpu", "pin_memory": False}


def _said(kind: Kind) -> str:
    engine = bagua_client.tune(engine_of(kind))
    said = refusal_of(engine)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        engine.reconfigure(bagua_client.Configuration())
    assert engine.tuning.state == "off"
    assert len(train(engine, kind, {}, 2)) == 2
    engine.destroy()
    return said


@needs_deepspeed
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind(0), "ZeRO is off (stage 0)"),
        (Kind(3, zero={"reduce_scatter": False}), "reduce_scatter is off"),
    ],
)
def test_what_an_engine_says(two_ranks: RankPool, kind: Kind, said: str) -> None:
    for found in two_ranks.run(_said, kind):
        assert said in found


def _where_names_differ() -> list[str]:
    """As another release may have it."""
    deepspeed_on_cpu()
    engine, found = engine_of(Kind(3)), []
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    size = vars(coordinator).pop(PREFETCH)
    found.append(refusal_of(engine))
    vars(coordinator)[PREFETCH] = size
    buckets = vars(engine.optimizer).pop("ipg_buckets")
    found.append(refusal_of(engine))
    engine.optimizer.ipg_buckets = buckets
    found.append(refusal_of(engine))
    engine.destroy()
    return found


@needs_deepspeed
def test_another_release_is_refused_and_not_an_error(two_ranks: RankPool) -> None:
    for *lacking, whole in two_ranks.run(_where_names_differ):
        for said, name in zip(lacking, (PREFETCH, "ipg_buckets"), strict=True):
            assert "this release of DeepSpeed keeps its bucket sizes elsewhere" in said
            assert name in said
        assert whole == ""


def _another_algorithm() -> str:
    engine: Any = engine_of(Kind())
    with pytest.raises(ValueError, match="not for an engine of DeepSpeed") as error:
        bagua_client.tune(engine, algorithm="bytegrad")
    assert not hasattr(type(engine), "reconfigure")
    return str(error.value)


@needs_deepspeed
def test_it_has_no_other_algorithm(two_ranks: RankPool) -> None:
    assert "bytegrad" in two_ranks.run(_another_algorithm)[0]


# Losses, weights and the optimizer's state are those of an untouched engine of DeepSpeed, bit for
# bit, whatever is changed between its steps. (On two ranks, whose sums have one order only.)


# A block has 1072 parameters; its largest holds 512, the whole model 4560.
SEQUENCE: dict[int, dict[str, Any]] = {
    1: {"bucket_bytes": 4 * 600},
    2: {"bucket_bytes": 4 * 4560},
    3: {"bucket_bytes": 4 * 100},
    4: {"bucket_bytes": 1},
    5: {},
    6: {"bucket_bytes": 4 * 3000},
}
OF_STAGE_3: dict[int, dict[str, Any]] = {
    1: {"bucket_bytes": 4 * 600},
    2: {"prefetch_bytes": 0},
    3: {"bucket_bytes": 1, "prefetch_bytes": 4 * 4560},
    5: {},
    6: {"bucket_bytes": 4 * 100, "prefetch_bytes": 4 * 100},
}
RECOMPUTED: dict[int, dict[str, Any]] = {
    0: {},
    3: {"recomputed_blocks": 1},
    4: {"recomputed_blocks": 0, "bucket_bytes": 4 * 600},
    5: {},
    6: {"recomputed_blocks": 2, "bucket_bytes": 1},
    7: {"recomputed_blocks": 0},
}
KINDS = {
    "stage-1": Kind(stage=1),
    "stage-1-recomputed": Kind(1, checkpoints=True),
    "stage-1-overlapped-micro-batches": Kind(1, micro_batches=3, zero={"overlap_comm": True}),
    "stage-2": Kind(),
    "overlapped": Kind(zero={"overlap_comm": True}),
    "micro-batches": Kind(micro_batches=3),
    "not-contiguous": Kind(zero={"contiguous_gradients": False}),
    "reduced-to-one-rank": Kind(zero={"use_multi_rank_bucket_allreduce": False}),
    "all-reduced": Kind(zero={"reduce_scatter": False}),
    "round-robin": Kind(zero={"round_robin_gradients": True}),
    "bfloat16": Kind(config={"bf16": {"enabled": True}, "gradient_clipping": 0.5}),
    "stage-2-recomputed-and-frozen": Kind(checkpoints=True, frozen=True),
    "stage-3": Kind(stage=3),
    "stage-3-bfloat16": Kind(3, config={"bf16": {"enabled": True}, "gradient_clipping": 0.5}),
    "stage-3-recomputed": Kind(3, micro_batches=2, checkpoints=True, frozen=True),
}


@needs_deepspeed
@pytest.mark.parametrize("name", KINDS)
def test_any_changes(two_ranks: RankPool, name: str) -> None:
    kind = KINDS[name]
    changes = OF_STAGE_3 if kind.stage == 3 else SEQUENCE
    changes = RECOMPUTED if kind.checkpoints else changes
    assert two_ranks.run(differs, kind, changes) == ["", ""]


# What would not fit in a rank's memory is not tried; what takes no more than the default, is.

# 4 GiB of gradients in 16 bits.
SPECS = [TensorSpec(str(at), (GIB // 2,), 2, "torch.bfloat16", "cuda#0") for at in range(4)]


def buckets(stage: int = 2, copies: int = 3) -> Any:
    is_sharded = stage == 3
    return SimpleNamespace(
        tensors=SPECS,
        is_sharded=is_sharded,
        copies=copies,
        element_bytes=2,
        parameter_bytes=2,
        given=Sizes(GIB // 2),
    )


def layout(bucket_bytes: int) -> Layout:
    return plan(SPECS, range(4), Configuration(bucket_bytes))


def memory_on(device: Device) -> BucketsMemory:
    memory = BucketsMemory(buckets(), device, layout(GIB))
    memory.read()
    return memory


def test_what_sizes_hold() -> None:
    one = Sizes(GIB // 2)
    assert held_bytes(one, buckets()) == 3 * GIB
    assert held_bytes(one, buckets(copies=4)) == 4 * GIB  # two buffers, by overlap_comm
    # The buffer is as large as it is told to be, and what is sent no larger than the gradients.
    assert held_bytes(Sizes(4 * GIB), buckets()) == (8 + 2 * 4) * GIB
    assert held_bytes(Sizes(4 * GIB), buckets(stage=3)) == 3 * 4 * GIB
    assert held_bytes(Sizes(GIB // 2, prefetch=GIB), buckets(stage=3)) == (3 + 2) * GIB


@pytest.mark.parametrize(("bucket_bytes", "lack"), [(2 * GIB, Lack.OVER), (GIB // 2, Lack.NONE)])
def test_only_a_larger_bucket_is_what_does_not_fit(bucket_bytes: int, lack: Lack) -> None:
    device = Device()
    memory = memory_on(device)
    memory.begin(layout(bucket_bytes))
    device.taken_bytes = 19 * GIB
    assert memory.read().lack == lack


def test_a_larger_bucket_is_tried_only_where_it_fits() -> None:
    # 3 of these 10 GiB are buckets.
    roomy, tight = memory_on(Device()), memory_on(Device(allowed=12 * GIB))
    assert roomy.misfit(layout(2 * GIB)) is None
    found = tight.misfit(layout(2 * GIB))
    assert found is not None
    assert found.peak_bytes == 13 * GIB
    for memory in (roomy, tight):
        assert memory.misfit(layout(GIB)) is None
        assert memory.misfit(layout(GIB // 4)) is None
