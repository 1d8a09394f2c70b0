"""What mode ``changed`` does: every model that is sharded has other settings every second step.

The launcher's own stand-in for ``fully_shard`` finds the models. What is changed, and how, is as in
a tuning: all ranks vote at the end of a backward pass, and what they agree on is in force from the
next forward pass on. A model that a tuning leaves alone is left alone here, too.
"""

from __future__ import annotations

import os
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from bagua_client import Configuration
from bagua_client.communication import link
from bagua_client.integrations import replacement, sharded_model
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.tunable.reconfiguration import Reconfiguration
from bagua_client.tunable.tunable import Nobody

MOST_CHANNELS = 4
"""Of those that are offered: each is a group of gloo's, with a thread of its own."""
BESIDE_OFFER = {"prefetch": (0, 1, 2, 3), "scatter_buffers": (1, 2, 4)}
"""What a GPU is offered and a CPU is not, as it gains nothing there."""

_test = ""
_counts = Counter[str]()


def follow() -> None:
    """From now on each model that is sharded in this process is one of ours."""
    # Small, so that the small models of tests travel in stripes, too.
    link.SMALLEST_STRIPE_BYTES, link.ALIGNED_ELEMENTS = 16, 2
    sharded_model._begin = _begin
    with mock.patch.dict(os.environ, BAGUA_AUTOTUNE="1"):
        replacement.follow_fully_shard()


@contextmanager
def being_made(test: str, counts: Counter[str]) -> Iterator[None]:
    """Change the models of this test.

    Args:
        counts: of models that were "begun", those "refused", as a tuning would have, and of
            "changed" settings.
    """
    global _test, _counts
    _test, _counts = test, counts
    yield
    _test, _counts = "", Counter()


def _begin(model: Any, *_: Any) -> None:
    """The first forward pass of a model for training begins, on all ranks."""
    model._has_begun = True
    _counts["begun"] += 1
    _, refusal = sharded_model._units_of(model)
    if refusal:
        _counts["refused"] += 1
        return
    tunable = sharded_model.tunable_of(model)
    tunable.attach()
    tunable.report_to(_Changes(tunable))


class _Changes(Nobody):
    """Called at the end of each backward pass."""

    def __init__(self, tunable: TunableUnits) -> None:
        self._tunable = weakref.ref(tunable)
        # The same on all ranks.
        self._random = random.Random(_test)
        self._steps = 0

    def reduced(self) -> None:
        tunable = self._tunable()
        self._steps += 1
        if tunable is None or self._steps % 2 == 0:
            return
        communicator = tunable.communicator
        configuration = self._other(tunable)
        change = Reconfiguration(tunable, configuration, communicator.group, communicator.device)
        layout = change.conclude()
        assert change.agreed, change.reason
        tunable.change(layout)
        _counts["changed"] += 1

    def _other(self, tunable: TunableUnits) -> Configuration:
        """Another configuration than the one in force, of those that are offered."""
        offer, chosen = tunable.offer, self._random.choice
        values = offer.values()
        channels = [int(n) for n in values.get("channels", (1,)) if int(n) <= MOST_CHANNELS]
        groups = ("shared", "own") if len(channels) > 1 else ("shared",)
        reasons = offer.reasons()
        can_prefetch = not any(reason.startswith("prefetch") for reason in reasons)
        has_buffers = tunable.units[0].has_scatter_buffers
        over = values.get("kept_over_micro_batches", ("off",))
        low, high = offer.bucket_bytes
        while True:
            found = replace(
                tunable.default,
                bucket_bytes=chosen((low, (low + high) // 2, high)),
                kept_units=int(chosen(values.get("kept_units", (0,)))),
                channels=chosen(channels),
                prefetch=chosen(BESIDE_OFFER["prefetch"] if can_prefetch else (0,)),
                scatter_group=chosen(groups),
                scatter_buffers=chosen(BESIDE_OFFER["scatter_buffers"] if has_buffers else (1,)),
                kept_over_micro_batches=str(over[_counts["changed"] % len(over)]),
            )
            if found != tunable.layout.configuration:
                return found
