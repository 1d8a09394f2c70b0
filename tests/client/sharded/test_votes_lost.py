"""A change that one rank cannot make: all ranks return to what they had or to the default, and the
training goes on as if nobody had asked. Later the same change is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bagua_client
from bagua_client.communication import communicator, link
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.sharded.settings import UnitSettings
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.torch_private import merged_units
from bagua_client.torch_private.merged_units import MergedUnits
from bagua_client.torch_private.sharded import Unit
from tests.client.sharded.models import Kind, sharded, state_of, train
from tests.ranks import RankPool

SLOW = [pytest.mark.slow]
FAILS_AT, AGAIN_AT, END = 5, 7, 10
CHANGES: dict[str, dict[str, Any]] = {
    "keep": {"kept_units": 4},
    "merge": {"bucket_bytes": 700},
    "stripe": {"channels": 4},
    "own-scatter-group": {"scatter_group": "own"},
    "striped-own-scatter-group": {"channels": 4, "scatter_group": "own"},
    "precision": {"wire_precision": "bf16"},
    "eight-bits": {"algorithm": "quantized"},
}
EARLIER: dict[str, dict[str, Any]] = {
    "default": {},
    "changed": {"bucket_bytes": 5000, "kept_units": 4, "channels": 2},
}
MAKES_GROUPS = ("stripe", "own-scatter-group", "striped-own-scatter-group")


def _failing(
    owner: Any, name: str, at_call: int, is_done: bool = False, kind: type = RuntimeError
) -> Any:
    """It raises once, in the call ``at_call``; ``is_done``: after it has done its work."""
    function: Callable[..., Any] = getattr(owner, name)
    calls: list[str] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) != at_call:
            return function(*args, **kwargs)
        if is_done:
            function(*args, **kwargs)
        raise kind("no room")

    return mock.patch.object(owner, name, fail)


def _trouble(place: str) -> AbstractContextManager[Any]:
    found: AbstractContextManager[Any] = {
        "cannot plan": lambda: _failing(TunableUnits, "plan", 1, kind=ValueError),
        "cannot prepare": lambda: _failing(TunableUnits, "prepare", 1),
        "first group": lambda: _failing(dist, "new_group", 1),
        "its first group": lambda: _failing(dist, "new_group", 1, is_done=True),
        "second group": lambda: _failing(dist, "new_group", 2),
        "before it is put": lambda: _failing(UnitSettings, "put", 1),
        "after it is put": lambda: _failing(UnitSettings, "put", 1, is_done=True),
        "while units are kept": lambda: _failing(Unit, "keep", 2),
        "before units are merged": lambda: _failing(MergedUnits, "_join", 1),
        "while units are merged": lambda: _failing(MergedUnits, "_join", 2),
        "while hooks are set": lambda: _failing(merged_units, "_hook", 1, is_done=True),
    }[place]()
    return found


def _asked(model: Any, change: dict[str, Any]) -> bool:
    return bool(model.reconfigure(replace(tunable_of(model).default, **change)))


def _vote_lost(
    earlier: dict[str, Any], change: dict[str, Any], place: str, failing_rank: int
) -> tuple[str, list[str]]:
    """What differs from a training in which nothing failed; what was in force after the failure,
    and at the end."""
    small = mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2)
    # A rank that waits for one that cannot make its group does not wait long.
    with small, mock.patch.object(communicator, "CONNECT_SECONDS", 1.0):
        # It is sent in fewer bits from the same step on.
        precision = {k: change[k] for k in change if k in ("wire_precision", "algorithm")}
        untouched = bagua_client.tune(sharded(Kind())) if precision else sharded(Kind())
        asked = {AGAIN_AT: precision} if precision else {}
        expected, _ = train(untouched, Kind(), asked, END)

        ours: Any = bagua_client.tune(sharded(Kind()))
        losses, optimizer = train(ours, Kind(), {3: earlier}, FAILS_AT)
        in_force = []
        fails = dist.get_rank() == failing_rank
        with _trouble(place) if fails else nullcontext():
            _asked(ours, change)
            losses += train(ours, Kind(), {}, FAILS_AT + 1, optimizer, FAILS_AT)[0]
        in_force.append(str(tunable_of(ours).layout.configuration))
        losses += train(ours, Kind(), {}, AGAIN_AT, optimizer, FAILS_AT + 1)[0]
        assert _asked(ours, change)
        losses += train(ours, Kind(), {}, END, optimizer, AGAIN_AT)[0]
        in_force.append(str(tunable_of(ours).layout.configuration))
        if losses != expected:
            return f"losses {losses} instead of {expected}", in_force
        one, other = state_of(untouched), state_of(ours)
        differing = [name for name in one if not torch.equal(one[name], other[name])]
        return ", ".join(differing), in_force


def _described(change: dict[str, Any]) -> str:
    return str(replace(bagua_client.Configuration(360), **change))


PLACES = {
    "cannot plan": CHANGES,
    "cannot prepare": [name for name in CHANGES if name not in MAKES_GROUPS],
    "first group": MAKES_GROUPS,
    # Which the other rank has made.
    "its first group": MAKES_GROUPS,
    "second group": ("striped-own-scatter-group",),
    "before it is put": CHANGES,
    "after it is put": CHANGES,
    "while units are kept": CHANGES,
    "before units are merged": ("merge",),
    "while units are merged": ("merge",),
    "while hooks are set": ("merge",),
}
CASES = [(place, change) for place, changes in PLACES.items() for change in changes]
FIRST = [(place, next(iter(changes))) for place, changes in PLACES.items()]


@pytest.mark.parametrize(
    ("number", "place", "change"),
    [
        pytest.param(number, *case, id=" ".join(case), marks=[] if case in FIRST else SLOW)
        for number, case in enumerate(CASES)
    ],
)
def test_the_training_goes_on_as_if_nobody_had_asked(
    two_ranks: RankPool, number: int, place: str, change: str
) -> None:
    # Each rank fails in some of the cases, and each of the earlier configurations is in some.
    earlier, failing_rank = list(EARLIER)[number % 2], number // 2 % 2
    if place.endswith("group") and change == "own-scatter-group":
        earlier = "default"  # Else it takes the group that a second channel has.
    asked = EARLIER[earlier], CHANGES[change]
    found = two_ranks.run(_vote_lost, *asked, place, failing_rank, timeout_seconds=60)
    # A change that is not begun ends at the default, one that is taken back at what was before.
    is_begun = place.startswith(("before", "after", "while"))
    back = EARLIER[earlier] if is_begun else {}
    assert found == [("", [_described(back), _described(CHANGES[change])])] * 2
