"""What would not fit in a rank's memory is not tried; what takes no more than the default, is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.tunable.memory import Lack
from bagua_client.zero.buckets import Sizes
from bagua_client.zero.tunable_engine import BucketsMemory, held_bytes
from tests.client.tunable.test_measured_memory import GIB, Device

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    ("bucket_bytes", "taken", "retries", "lack"),
    [
        (2 * GIB, 19 * GIB, 0, Lack.OVER),
        (2 * GIB, 12 * GIB, 1, Lack.RETRIED),
        (2 * GIB, 12 * GIB, 0, Lack.NONE),
        (GIB // 2, 19 * GIB, 1, Lack.NONE),
    ],
)
def test_what_turns_out_not_to_fit(bucket_bytes: int, taken: int, retries: int, lack: Lack) -> None:
    device = Device()
    memory = memory_on(device)
    memory.begin(layout(bucket_bytes))
    device.taken_bytes, device.retries = taken, retries
    assert memory.read().lack == lack
