"""The four kinds of models that we change keep what every one must."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client.communication import communicator, link
from bagua_client.sharded.offer import WHOLE
from bagua_client.sharded.settings import UnitSettings
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.testing.tunables import Lost, TunableContract
from bagua_client.torch_private import merged_units
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.merged_units import MergedUnits
from bagua_client.torch_private.sharded import Unit
from bagua_client.tunable.recomputation import Block
from bagua_client.zero import Buckets
from tests.client.sharded import models as sharded
from tests.client.zero import models as zero
from tests.ranks import RankPool

SLOW = pytest.mark.slow
WIDTH = 24


def failing(
    owner: Any, name: str, at_call: int, is_done: bool = False, kind: type = RuntimeError
) -> AbstractContextManager[Any]:
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


KEPT: dict[str, Any] = {"recomputed_blocks": 0}
SWITCHED = "while blocks are switched"


def switching() -> AbstractContextManager[Any]:
    """The second block cannot be switched; the first one has been."""
    return failing(Block, "keep", 2)


def _blocks() -> list[nn.Module]:
    """Whose dropout draws random numbers."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)]
    return [*blocks, nn.Linear(WIDTH, WIDTH)]


class Replicated:
    """Under DistributedDataParallel, with two micro-batches."""

    tolerance = 1e-5  # by node, sums are made in another order

    def __init__(self, is_tuned: bool) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*map(checkpoint_wrapper, _blocks()))
        wrapper = bagua_client.DistributedDataParallel if is_tuned else Stock
        self.model: Any = wrapper(layers, gradient_as_bucket_view=dist.get_rank() == 0)
        self._optimizer = torch.optim.SGD(layers.parameters(), 0.05, momentum=0.5)

    def step(self, number: int) -> float:
        torch.manual_seed(1000 * number + dist.get_rank())
        self._optimizer.zero_grad()
        with self.model.no_sync():
            self.model(torch.randn(3, WIDTH)).square().mean().backward()
        loss = self.model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def state(self) -> Mapping[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def trouble(self, place: str) -> AbstractContextManager[Any]:
        return {
            "new reducer": lambda: failing(torchs, "new_reducer", 1),
            "torch's reducer": lambda: failing(dist, "Reducer", 1),
            # At the end of the step after ours, when torch has agreed on its buckets.
            "torch's cut": lambda: failing(torchs, "rebuild", 1, is_done=True),
            SWITCHED: switching,
        }[place]()

    def end(self) -> None:
        return


FIRST: dict[str, Any] = {"bucket_bytes": 2048, "channels": 2}
BY_NODE: dict[str, Any] = {"bucket_bytes": 4096, "hierarchical": "shards"}
REPLICATED = [
    *(Lost(FIRST, place, rank=0) for place in ("torch's reducer", "torch's cut")),
    Lost(BY_NODE, "torch's cut", 3, earlier=FIRST),
    Lost({**BY_NODE, "hierarchical": "leaders", "channels": 2}, "torch's reducer", 1),
    Lost({**BY_NODE, **KEPT}, SWITCHED, 2, earlier={**FIRST, "recomputed_blocks": 2}),
    Lost({**FIRST, **KEPT}, "new reducer", 3, earlier={"recomputed_blocks": 1}),
]


def on(pool: str) -> Any:
    """The fixture ``ranks`` of a contract: those of a pool."""

    @pytest.fixture
    def ranks(self: TunableContract, request: pytest.FixtureRequest) -> RankPool:
        return request.getfixturevalue(pool)

    return ranks


def each_of(*cases: Any) -> Any:
    """Its fixture ``lost``."""

    @pytest.fixture(params=cases, ids=str)
    def lost(self: TunableContract, request: pytest.FixtureRequest) -> Lost:
        return request.param

    return lost


@SLOW
class TestReplicated(TunableContract):
    training = Replicated
    refused = (
        ({"kept_units": 1}, "replicated models do not have the knob kept_units"),
        ({"algorithm": "quantized"}, "quantized is for sharded models"),
        (KEPT, "what its blocks would keep is known after the first steps"),
    )
    different = {"bucket_bytes": 1}, {"bucket_bytes": 2048}
    ranks = on("four_ranks")
    lost = each_of(*REPLICATED)


class Single:
    """By one process, with two micro-batches."""

    tolerance = 0.0

    def __init__(self, is_tuned: bool) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*map(checkpoint_wrapper, _blocks()))
        self.model: Any = bagua_client.tune(layers) if is_tuned else layers
        self._optimizer = torch.optim.SGD(layers.parameters(), 0.05, momentum=0.5)

    def step(self, number: int) -> float:
        torch.manual_seed(number)
        self._optimizer.zero_grad()
        for _ in range(2):
            loss = self.model(torch.randn(3, WIDTH)).square().mean()
            loss.backward()
        self._optimizer.step()
        return loss.item()

    def state(self) -> Mapping[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def trouble(self, place: str) -> AbstractContextManager[Any]:
        return switching()

    def end(self) -> None:
        return


class TestSingle(TunableContract):
    training = Single
    refused = (
        ({"channels": 2}, "single models do not have the knob channels"),
        ({"recomputed_blocks": 4}, "4 blocks cannot be recomputed, as the training recomputes 3"),
        (KEPT, "what its blocks would keep is known after the first steps"),
    )
    test_ranks_that_are_told_different_things_stay_with_the_default = None  # type: ignore[assignment]
    ranks = on("one_rank")
    lost = each_of(*(Lost(KEPT, SWITCHED, 0, earlier=e) for e in ({}, {"recomputed_blocks": 2})))


KIND = sharded.Kind(micro_batches=(2,), awaits="", clips=True, checkpoints=True)


class Sharded:
    """Under ``fully_shard``."""

    tolerance = 0.0
    kind = KIND

    def __init__(self, is_tuned: bool) -> None:
        # Small ones travel in stripes, too; nobody waits long for a rank that can make no group.
        self._patches = [
            mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2),
            mock.patch.object(communicator, "CONNECT_SECONDS", 1.0),
        ]
        for patch in self._patches:
            patch.start()
        model = sharded.sharded(self.kind)
        self.model: Any = bagua_client.tune(model) if is_tuned else model
        self._optimizer: Any = None

    def step(self, number: int) -> float:
        losses, self._optimizer = sharded.train(
            self.model, self.kind, {}, number + 1, self._optimizer, number
        )
        return losses[0]

    def state(self) -> Mapping[str, torch.Tensor]:
        return sharded.state_of(self.model)

    def trouble(self, place: str) -> AbstractContextManager[Any]:
        return {
            "cannot plan": lambda: failing(TunableUnits, "plan", 1, kind=ValueError),
            "cannot prepare": lambda: failing(TunableUnits, "prepare", 1),
            "first group": lambda: failing(dist, "new_group", 1),
            "its first group": lambda: failing(dist, "new_group", 1, is_done=True),
            "second group": lambda: failing(dist, "new_group", 2),
            "before it is put": lambda: failing(UnitSettings, "put", 1),
            "after it is put": lambda: failing(UnitSettings, "put", 1, is_done=True),
            "while units are kept": lambda: failing(Unit, "keep", 2),
            "before units are merged": lambda: failing(MergedUnits, "_join", 1),
            "while units are merged": lambda: failing(MergedUnits, "_join", 2),
            "while hooks are set": lambda: failing(merged_units, "_hook", 1, is_done=True),
            SWITCHED: switching,
        }[place]()

    def end(self) -> None:
        for patch in self._patches:
            patch.stop()


CHANGES: dict[str, dict[str, Any]] = {
    "keep": {"kept_units": 4, "kept_over_micro_batches": "on"},
    "merge": {"bucket_bytes": 700},
    "recompute": {"recomputed_blocks": 1},
    "recompute-and-merge": {"recomputed_blocks": 0, "bucket_bytes": 700, "kept_units": 2},
    "stripe": {"channels": 4},
    "own-scatter-group": {"scatter_group": "own"},
    "striped-own-scatter-group": {"channels": 4, "scatter_group": "own"},
    "precision": {"wire_precision": "bf16"},
    "eight-bits": {"algorithm": "quantized"},
}
EARLIER: list[dict[str, Any]] = [
    {},
    {
        **{"bucket_bytes": 5000, "kept_units": 4, "channels": 2},
        **{"kept_over_micro_batches": "on", "recomputed_blocks": 3},
    },
]
# Each change fails before it is begun or with one that does, and when it is.
PLACES = {
    "cannot plan": ["keep", "merge", "eight-bits"],
    "cannot prepare": ["keep", "recompute-and-merge", "precision"],
    "first group": ["stripe", "own-scatter-group"],
    # Which the other rank has made.
    "its first group": ["stripe", "striped-own-scatter-group"],
    "second group": ["striped-own-scatter-group"],
    "before it is put": ["keep", "recompute", "precision"],
    "after it is put": ["keep", "merge", "own-scatter-group", "eight-bits"],
    "while units are kept": ["keep", "stripe"],
    "before units are merged": ["merge"],
    "while units are merged": ["merge", "recompute-and-merge"],
    "while hooks are set": ["merge"],
    SWITCHED: ["recompute", "recompute-and-merge"],
}
CASES = [(place, change) for place, changes in PLACES.items() for change in changes]
# The others with the slow tests.
QUICK = [
    *(("cannot plan", "keep"), ("first group", "stripe"), ("after it is put", "keep")),
    *(("while units are kept", "keep"), ("while units are merged", "merge")),
    (SWITCHED, "recompute"),
]


def lost_of(number: int, place: str, change: str) -> Lost:
    """Each rank fails in some of the cases, and each of the earlier configurations is in some."""
    earlier = EARLIER[number % 2]
    if place.endswith("group") and change == "own-scatter-group":
        earlier = {}  # Else it takes the group that a second channel has.
    # A change that is not begun ends at the default, one that is taken back at what was before.
    is_begun = place.startswith(("before", "after", "while"))
    return Lost(CHANGES[change], place, number // 2 % 2, is_begun, earlier)


class TestSharded(TunableContract):
    training = Sharded
    refused: tuple[tuple[Mapping[str, Any], str], ...] = (
        ({"kept_units": 5}, "5 units cannot be kept, as only 4 are gathered twice in a step"),
        ({"first_bucket_bytes": 1}, "sharded models do not have the knob first_bucket_bytes"),
        ({"hierarchical": "shards"}, "hierarchical shards is not possible here: the parts of a"),
        ({"algorithm": "bytegrad"}, "bytegrad is for replicated models, and this one is sharded"),
        ({"bucket_bytes": 2**20}, "units cannot be merged: "),
    )
    different = {"kept_units": 2}, {"kept_units": 4}
    ranks = on("two_ranks")
    lost = each_of(
        *(
            pytest.param(lost_of(number, *case), marks=[] if case in QUICK else [SLOW])
            for number, case in enumerate(CASES)
        )
    )


class Split(Sharded):
    """What tensor parallelism has split, under ``fully_shard``."""

    kind = replace(KIND, tensor_ranks=2)


class Experts(Split):
    """Each rank has some of the experts, which are spread over fewer ranks than the others."""

    kind = replace(KIND, width=8, expert_ranks=2, clips=False)


@SLOW
class TestSplit(TestSharded):
    training = Split
    ranks = on("four_ranks")
    lost = each_of(
        Lost(CHANGES["eight-bits"], "after it is put", 0),
        Lost(CHANGES["striped-own-scatter-group"], "second group", 2, is_begun=False),
        Lost(CHANGES["recompute"], "while units are kept", 3, earlier=EARLIER[1]),
    )


class TestExperts(TestSplit):
    training = Experts
    refused = (({"kept_units": 7}, "7 units cannot be kept, as only 6 are gathered twice"),)
    lost = each_of(
        Lost({"bucket_bytes": 300}, "before units are merged", 1, earlier={"kept_units": 4}),
        Lost(CHANGES["keep"], "after it is put", 3),
    )


class Copied(Sharded):
    """By ``replicate`` on the code of ``fully_shard``."""

    kind = replace(KIND, replicates=True)


@SLOW
class TestCopied(TunableContract):
    training = Copied
    refused = (
        ({"kept_units": 1}, WHOLE),
        ({"algorithm": "quantized"}, WHOLE),
        ({"deferred_reduction": "copies"}, WHOLE),
        ({"hierarchical": "shards"}, "hierarchical shards is not possible here"),
    )
    different = {"channels": 2}, {"channels": 4}
    ranks = on("two_ranks")
    lost = each_of(
        Lost({"channels": 4}, "first group", 0, is_begun=False),
        Lost({"bucket_bytes": 700}, "while units are merged", earlier={"channels": 2}),
        Lost({"wire_precision": "bf16", "bucket_bytes": 5000}, "after it is put"),
    )


class Zero:
    """An engine of DeepSpeed."""

    tolerance = 0.0

    def __init__(self, stage: int, is_tuned: bool) -> None:
        self._kind = zero.Kind(stage, checkpoints=True)
        engine = zero.engine_of(self._kind)
        self.model: Any = bagua_client.tune(engine) if is_tuned else engine

    def step(self, number: int) -> float:
        return zero.train(self.model, self._kind, {}, number + 1, number)[0]

    def state(self) -> Mapping[str, torch.Tensor]:
        return zero.state_of(self.model)

    def trouble(self, place: str) -> AbstractContextManager[Any]:
        return switching() if place == SWITCHED else failing(Buckets, place, 1)

    def end(self) -> None:
        self.model.destroy()


@SLOW
@zero.needs_deepspeed
class TestZero2(TunableContract):
    training = partial(Zero, 2)
    refused = (
        ({"prefetch_bytes": 400}, "only ZeRO's stage 3 gathers"),
        ({"channels": 2}, "zero models do not have the knob channels"),
    )
    different = {"bucket_bytes": 400}, {"bucket_bytes": 800}
    ranks = on("two_ranks")
    lost = each_of(*(Lost({"bucket_bytes": 4 * 600, **KEPT}, at) for at in ("put", SWITCHED)))


class TestZero3(TestZero2):
    training = partial(Zero, 3)
    refused = (
        ({"bucket_bytes": 2**20}, "stage 3 keeps the buffer"),
        ({"channels": 2}, "zero models do not have the knob channels"),
    )
