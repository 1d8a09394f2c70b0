"""Buckets of user-written algorithms: each operation beside what it should be, on ranks of two
nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.tensor import Backend, backend_of
from tests.compat.scripts import begin
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

SIZES = (3, 4, 2)


def _values(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(SIZES), generator=generator)


def _bucket(flatten: bool, alignment: int = 1) -> tuple[BaguaBucket, Backend]:
    """With this rank's values."""
    backend = backend_of("module")
    tensors = []
    for place, values in enumerate(_values(dist.get_rank()).split(SIZES)):
        tensor: Any = values.clone()
        tensors.append(tensor.ensure_bagua_tensor(f"tensor {place}", "module"))
    bucket = BaguaBucket(tensors, "bucket", flatten, alignment)
    assert bucket.check_flatten() is flatten
    backend.register_ordered_buckets([bucket])
    return bucket, backend


def _run(bucket: BaguaBucket, backend: Backend) -> torch.Tensor:
    for tensor in reversed(bucket.tensors):
        tensor.bagua_mark_communication_ready()
    backend.wait_pending_comm_ops()
    return torch.cat([tensor.detach() for tensor in bucket.tensors])


def _sums() -> dict[str, float]:
    """By how much each way to sum up is wrong."""
    begin()
    everything = torch.stack([_values(rank) for rank in range(dist.get_world_size())])
    wrong = {}
    for hierarchical in (False, True):
        for average in (False, True):
            for compression in (None, "MinMaxUInt8"):
                bucket, backend = _bucket(flatten=False, alignment=4)
                bucket.append_centralized_synchronous_op(
                    hierarchical, average, scattergather=True, compression=compression
                )
                expected = everything.mean(0) if average else everything.sum(0)
                found = _run(bucket, backend)
                name = f"{hierarchical} {average} {compression}"
                wrong[name] = float((found - expected).abs().max())
    return wrong


def test_every_way_to_sum_up_tensors_that_lie_apart(four_ranks: RankPool) -> None:
    for wrong in four_ranks.run(_sums):
        assert len(wrong) == 8
        for name, error in wrong.items():
            # Eight bits of numbers below 3, of four ranks, twice.
            assert error < (0.2 if "MinMaxUInt8" in name else 1e-6), name


def _in_order() -> tuple[list[str], list[float]]:
    """What ran, in turn, where the second bucket was ready first; the sums it left."""
    begin()
    seen: list[str] = []
    backend = backend_of("module")
    buckets = []
    for name in ("first", "second"):
        tensor: Any = torch.ones(2)
        bucket = BaguaBucket([tensor.ensure_bagua_tensor(name, "module")], name, flatten=True)
        bucket.append_python_op(seen.append)
        bucket.append_python_op(lambda _, tensor=tensor: tensor.mul_(3))
        bucket.append_centralized_synchronous_op(average=False)
        buckets.append(bucket)
    backend.register_ordered_buckets(buckets)
    for _ in range(2):
        for bucket in reversed(buckets):
            bucket.tensors[0].bagua_mark_communication_ready()
        backend.wait_pending_comm_ops()
    return seen, [float(bucket.tensors[0][0]) for bucket in buckets]


def test_buckets_run_in_their_order_whichever_is_ready_first(two_ranks: RankPool) -> None:
    assert two_ranks.run(_in_order) == [(["first", "second"] * 2, [36.0, 36.0])] * 2


def _mistakes() -> list[tuple[str, str]]:
    """What is said of each, and a part of what should be."""
    begin()
    bucket, _kept = _bucket(flatten=False)
    first, other = bucket.tensors[0], torch.ones(1)

    def named(*names: str) -> Any:
        untyped: Any = torch.ones(1)
        return untyped.ensure_bagua_tensor(*names)

    tries: dict[str, Callable[[], object]] = {
        "needs scattergather=True": lambda: bucket.append_centralized_synchronous_op(
            compression="MinMaxUInt8"
        ),
        "must be 'MinMaxUInt8', not 'int4'": lambda: bucket.append_centralized_synchronous_op(
            scattergather=True, compression="int4"
        ),
        "not 'ring'": lambda: bucket.append_decentralized_synchronous_op(
            other, peer_selection_mode="ring"
        ),
        "not 'one'": lambda: bucket.append_asynchronous_model_average_op("one"),
        "cannot become 'another'": lambda: first.ensure_bagua_tensor("another", "module"),
        "without a module_name": lambda: named("x").bagua_mark_communication_ready(),
        "in no bucket": lambda: named("x", "module").bagua_mark_communication_ready(),
        "of one module, not of 2": lambda: BaguaBucket([first, torch.ones(1)], "two", False),
    }
    found = []
    for part, attempt in tries.items():
        with pytest.raises(ValueError) as caught:
            attempt()
        found.append((str(caught.value), part))
    return found


def test_mistakes_are_told(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_mistakes):
        assert [part for said, part in found if part not in said] == []
