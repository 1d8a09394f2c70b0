"""The memory on paper gives blocks as torch's allocator does, and runs out as it would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.support.jobs.paper_memory import MIB, PaperAllocator, PaperMemory


def test_blocks_are_split_joined_and_go_back() -> None:
    device = PaperAllocator(60 * MIB)
    blocks = [device.take(3 * MIB) for _ in range(6)]
    assert (device.reserved_bytes, device.allocated_bytes) == (20 * MIB, 18 * MIB)
    small = device.take(1)
    assert (device.reserved_bytes, device.allocated_bytes) == (22 * MIB, 18 * MIB + 512)
    device.give_back(blocks[1])
    device.give_back(blocks[2])
    assert device.take(6 * MIB).size == 6 * MIB  # Where the two were.
    assert (device.reserved_bytes, device.retries) == (22 * MIB, 0)
    large = device.take(31 * MIB)
    assert device.reserved_bytes == 54 * MIB
    device.give_back(large)
    device.take(33 * MIB)  # The segment of 32 MiB goes back for it.
    assert (device.reserved_bytes, device.retries, device.largest_bytes) == (56 * MIB, 1, 34 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.take(11 * MIB)
    device.give_back(small)
    device.empty()
    assert device.reserved_bytes == 54 * MIB
    assert device.peak_bytes == 18 * MIB + 34 * MIB + 512  # What is left of 1 MiB is not split off.


def test_a_training_holds_what_its_tensors_take() -> None:
    memory = PaperMemory(2**40, scale=1024)
    with memory:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        weights = 4 * 64 * 64 * 4 * 1024
        assert memory.now_bytes() == weights
        loss = model(torch.ones(32, 64)).square().mean()
        kept = memory.now_bytes() - weights
        assert kept > 4 * 32 * 64 * 4 * 1024  # The inputs of all layers, and what the loss needs.
        loss.backward()
        del loss
        assert memory.now_bytes() == 2 * weights
        assert memory.taken().peak_bytes > 2 * weights
        model.zero_grad()
    assert memory.now_bytes() == weights
