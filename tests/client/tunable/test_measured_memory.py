"""What would not fit is not tried, what was measured is learned from, and what turns out not to fit
is found out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.tunable.memory import (
    CudaMemory,
    Footprint,
    Lack,
    MeasuredMemory,
    Taken,
    memory_of,
    why_given_up,
    why_not_tried,
)
from bagua_client.tunable.recomputation import Recomputation

GIB = 2**30
SPECS = [TensorSpec("weight", (GIB // 4,), 4, "torch.float32", "cuda#0")]


@dataclass
class Device:
    taken_bytes: int = 10 * GIB
    allowed: int = 20 * GIB
    reachable: int = 20 * GIB
    retries: int = 0
    largest: int = 0
    resets: int = field(default=0, init=False)

    def reset(self) -> None:
        self.resets += 1

    def taken(self) -> Taken:
        return Taken(self.taken_bytes, self.retries)

    def now_bytes(self) -> int:
        return self.taken_bytes

    def allowed_bytes(self) -> int:
        return self.allowed

    def largest_bytes(self) -> int:
        return self.largest

    def reachable_bytes(self) -> int:
        return self.reachable


class MemoryOfUnits(MeasuredMemory):
    """Each unit that is kept takes a GiB."""

    def _extra_bytes(self, layout: Layout) -> int:
        return layout.configuration.kept_units * GIB


def layout(**changes: Any) -> Layout:
    return plan(SPECS, [0], Configuration(GIB, **changes))


def memory_on(device: Device) -> MeasuredMemory:
    memory = MemoryOfUnits(device, layout())
    memory.read()
    return memory


def test_what_is_predicted_beyond_the_share_is_not_tried() -> None:
    memory = memory_on(Device(allowed=15 * GIB))
    assert memory.misfit(layout(kept_units=2)) is None
    over = memory.misfit(layout(kept_units=4))
    assert over == Footprint(14 * GIB, int(13.5 * GIB), 15 * GIB)
    assert why_not_tried([Footprint(), over]) == (
        "rank 1 would need 14 GiB of its device's memory, and may use 13.5 GiB"
    )
    memory.share = 0.95
    assert memory.misfit(layout(kept_units=4)) is not None
    memory.share = 1.0
    # It fits, but not if it took twice as much as predicted.
    unproven = memory.misfit(layout(kept_units=3))
    assert unproven == Footprint(13 * GIB, 15 * GIB, 15 * GIB)
    short = Footprint(14 * GIB, 0, 15 * GIB)
    assert "by default already memory ran out" in why_not_tried([short])
    assert why_not_tried([unproven]).endswith("too far from all that was measured to be tried yet")


def test_it_goes_on_from_what_was_measured() -> None:
    device = Device(allowed=14 * GIB)
    memory = memory_on(device)
    memory.share = 1.0
    assert memory.misfit(layout(kept_units=3)) is not None
    memory.begin(layout(kept_units=2))
    device.taken_bytes = 12 * GIB
    assert memory.read() == Footprint(12 * GIB, 14 * GIB, 14 * GIB)
    assert memory.misfit(layout(kept_units=3)) is None
    # It takes more than predicted: so will the others.
    device.taken_bytes = 12 * GIB + GIB // 2
    memory.read()
    assert memory.misfit(layout(kept_units=3)) == Footprint(13 * GIB + GIB // 2, *[14 * GIB] * 2)
    device.taken_bytes = 13 * GIB + 1
    memory.read()
    found = memory.misfit(layout(kept_units=3))
    assert found is not None
    assert found.peak_bytes > found.limit_bytes


def test_what_others_use_of_the_device_cannot_be_had() -> None:
    assert memory_on(Device(reachable=12 * GIB)).misfit(layout(kept_units=1)) == Footprint(
        11 * GIB, int(0.9 * 12 * GIB), 12 * GIB
    )


def test_what_turns_out_not_to_fit() -> None:
    device = Device(allowed=14 * GIB)
    memory = memory_on(device)
    device.taken_bytes, device.retries = 14 * GIB, 1
    memory.settle()
    assert memory.read().lack is Lack.NONE  # It is the default.
    memory.begin(layout(kept_units=1))
    assert device.resets == 2
    over = memory.read()
    assert over.lack is Lack.OVER
    device.taken_bytes, device.retries = 10 * GIB, 2
    retried = memory.read()
    assert retried.lack is Lack.RETRIED
    assert why_given_up([Footprint(), over], is_trial=True) == (
        "rank 1 took 14 GiB of its device's memory, and may use 12.6 GiB"
    )
    assert why_given_up([retried], is_trial=True) == (
        "rank 0 ran out of memory until it freed what it kept for later, at 10 GiB of 14 GiB"
    )
    assert why_given_up([over], is_trial=False) == why_given_up([retried], is_trial=False) == ""
    memory.begin(layout(kept_units=1))
    device.retries = 5
    memory.settle()  # Some steps later; what was freed until then fitted another configuration.
    assert memory.read().lack is Lack.NONE
    memory.begin(layout())
    device.retries = 6
    assert memory.read().lack is Lack.NONE
    memory.begin(layout(kept_units=1))
    device.retries = 7
    assert memory.read().lack is Lack.NONE  # So it is under the default.
    both = over._replace(lack=Lack.OVER | Lack.RETRIED)
    assert why_given_up([both], is_trial=False)
    assert why_given_up([Footprint()], is_trial=True) == ""


def test_of_a_cpu_nothing_is_known() -> None:
    assert memory_of(torch.device("cpu")) is None


class TwoBlocks:
    """Recomputed, or else they keep a GiB each."""

    def __init__(self) -> None:
        self.was_held_back = self.has_varied = False

    def __len__(self) -> int:
        return 2

    def kept_bytes(self, count: int) -> int:
        return (2 - count) * GIB


def recomputing(device: Device) -> tuple[MeasuredMemory, TwoBlocks]:
    blocks = TwoBlocks()
    memory = MemoryOfUnits(device, layout(recomputed_blocks=2), cast(Recomputation, blocks))
    memory.read()
    return memory, blocks


def test_what_blocks_keep_counts_with_what_other_knobs_take() -> None:
    memory, _ = recomputing(Device(allowed=14 * GIB))
    assert memory.misfit(layout(recomputed_blocks=0)) is None
    assert memory.misfit(layout(recomputed_blocks=1, kept_units=1)) is None
    assert memory.misfit(layout(recomputed_blocks=0, kept_units=1)) is not None
    assert memory.free_bytes == int(2.6 * GIB)


def test_there_must_be_room_for_the_largest_tensor_beside_what_blocks_keep() -> None:
    """What they keep lies in pieces of what larger tensors leave."""
    memory, blocks = recomputing(Device(allowed=14 * GIB, largest=2 * GIB))
    assert memory.misfit(layout(recomputed_blocks=1)) is None
    assert memory.misfit(layout(kept_units=2, recomputed_blocks=2)) is None
    assert memory.misfit(layout(recomputed_blocks=0)) is None
    assert memory.misfit(layout(recomputed_blocks=0, kept_units=1)) is not None
    blocks.has_varied = True
    assert memory.misfit(layout(recomputed_blocks=1)) is not None
    assert memory.free_bytes == 0


def test_what_blocks_were_never_seen_to_keep_may_be_a_little_more() -> None:
    device = Device(allowed=14 * GIB)
    memory, _ = recomputing(device)
    memory.share = 12.03 / 14
    assert memory.misfit(layout(recomputed_blocks=1)) is None
    assert memory.misfit(layout(recomputed_blocks=0)) is not None
    memory.begin(layout(recomputed_blocks=1))
    device.taken_bytes = 11 * GIB
    memory.read()
    assert memory.misfit(layout(recomputed_blocks=0)) is None


def test_a_segment_that_grows_says_nothing_of_the_largest_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = [
        {"device": 0, "total_size": 2 * GIB, "is_expandable": False},
        {"device": 0, "total_size": 9 * GIB, "is_expandable": True},
        {"device": 1, "total_size": 3 * GIB, "is_expandable": False},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert CudaMemory(torch.device("cuda", 0)).largest_bytes() == 2 * GIB
    assert CudaMemory(torch.device("cuda", 1)).largest_bytes() == 3 * GIB


def test_blocks_keep_nothing_where_memory_runs_out_by_default() -> None:
    device = Device(allowed=18 * GIB)
    memory, _ = recomputing(device)
    assert memory.misfit(layout(recomputed_blocks=1)) is None
    device.retries = 1
    memory.read()
    assert memory.misfit(layout(recomputed_blocks=1)) is not None
    assert memory.free_bytes < 0


def test_a_larger_batch_that_was_recomputed_counts_as_if_blocks_had_kept_theirs() -> None:
    device = Device(allowed=15 * GIB)
    memory, blocks = recomputing(device)
    memory.begin(layout(recomputed_blocks=0))
    device.taken_bytes = 12 * GIB
    assert memory.read().lack == Lack.NONE
    blocks.was_held_back = True
    found = memory.read()
    assert (found.peak_bytes, found.lack) == (14 * GIB, Lack.OVER)
