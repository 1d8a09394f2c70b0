"""The classes of mode ``recut``: ours, its buckets cut anew in every second step of a test."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import zip_longest
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import bagua_client
from bagua_client import Configuration
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.reducer.offer import refusal_of
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private.reducer import caps_of
from bagua_client.tunable.tunable import NOBODY, Nobody

SIZES_BYTES = (1, 100 * 1024, 4096, 25 << 20, 1 << 20)

READ_AFTERWARDS = {
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_control_flow_different_across_ranks",
    "test_detect_ddp_is_actually_static",
}
"""Tests that read the reducer after each step, where a tuning may have replaced it. All of their
ranks make all passes."""

counts: Counter[str] = Counter()
"""Of this process: wrappers that were ``wrapped``, those ``refused``, as a tuning would have, and
buckets ``recut``."""


class Recut(bagua_client.DistributedDataParallel):
    """Every second step comes with other buckets, which travel in another way.

    By the rules of a tuning: from after a step that all ranks are in, as they all agreed; a
    training that a tuning leaves alone is left alone here, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        counts["wrapped"] += 1
        if refusal_of(self, caps_of(self)):
            counts["refused"] += 1
            return
        tunable = tunable_of(self)
        tunable.attach()
        tunable.report_to(_Changes(tunable))


class _Changes(Nobody):
    """Called at the end of each step."""

    def __init__(self, tunable: TunableReducer) -> None:
        self._tunable = weakref.ref(tunable)
        self._steps = 0

    def reduced(self) -> None:
        tunable = self._tunable()
        self._steps += 1
        if tunable is None or self._steps % 2:
            return
        if tunable.refusal:
            counts["refused"] += 1
            tunable.report_to(NOBODY)
            return
        tunable.schedule(tunable.plan(_configuration(tunable, self._steps // 2 - 1)))
        # In turns as a trial is observed at first, and again: then torch carries what it can.
        tunable.attach(in_detail=self._steps % 4 == 0)
        counts["recut"] += 1


class RecutByHand(bagua_client.DistributedDataParallel):
    """Every second forward pass comes with other buckets, by the training's own wish."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        counts["wrapped"] += 1
        self._passes = 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._passes % 2 == 0 and torch.is_grad_enabled():
            configuration = _configuration(tunable_of(self), self._passes // 2)
            counts["recut"] += self.reconfigure(configuration)
        self._passes += 1
        return super().forward(*inputs, **named)


def _configuration(tunable: TunableReducer, turn: int) -> Configuration:
    """Another size and another way for each turn."""
    values = tunable.offer.values()
    channels = [int(number) for number in values["channels"]]
    flat = [("off", number) for number in [*channels[1:], channels[0]]]
    by_node = [(str(way), n) for n in channels for way in values["hierarchical"][1:]]
    ways = [way for pair in zip_longest(flat, by_node) for way in pair if way is not None]
    way, number = ways[turn % len(ways)]
    return Configuration(SIZES_BYTES[turn % len(SIZES_BYTES)], way, number)


def distributed_data_parallel(test: str) -> type[DistributedDataParallel]:
    """The class that PyTorch's test of this name gets in mode ``recut``."""
    return RecutByHand if test in READ_AFTERWARDS else Recut
