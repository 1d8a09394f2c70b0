"""What is changed is in force, on all ranks in the same step."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_state

import bagua_client
from bagua_client import Configuration
from bagua_client.integrations import sharded_model
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.integrations.tuned_model import become
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.torch_private.merged_units import families, why_not
from tests.client.listening import logged
from tests.client.sharded import models
from tests.client.sharded.models import MERGES, Kind, Net, sharded, state_of, train
from tests.ranks import RankPool


def tuned(steps: int = 3) -> tuple[Any, TunableUnits]:
    """A model, at which ours looks from its second step on, after so many more."""
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, 1)
    tunable = tunable_of(model)
    train(model, Kind(), {}, steps)
    return model, tunable


def changed(model: Any, **changes: Any) -> Configuration:
    """What is in force in the step after a change."""
    assert model.reconfigure(replace(tunable_of(model).default, **changes))
    train(model, Kind(), {}, 1)
    found: Configuration = model.configuration
    return found


def _gathers(changes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    kind, found = Kind(), []
    model: Any = bagua_client.tune(sharded(kind))
    train(model, kind, {}, 1)
    tunable_of(model).attach()
    train(model, kind, {}, 3)
    seen: Any = tunable_of(model).observation
    seen.gather_begins = gathers = mock.Mock(wraps=seen.gather_begins)
    seen.scatter_begins = scatters = mock.Mock(wraps=seen.scatter_begins)
    for change in changes:
        assert model.reconfigure(replace(tunable_of(model).default, **change))
        gathers.reset_mock()
        scatters.reset_mock()
        train(model, kind, {}, 1)
        found.append((gathers.call_count, scatters.call_count))
    return found


def _channels() -> list[tuple[list[Any], bool]]:
    """What is offered on CPUs, and on GPUs of one host; and whether a reason is told."""
    _, tunable = tuned()
    found = []
    for kind in ("cpu", "cuda"):
        tunable.communicator.device = torch.device(kind, 0)
        offer = tunable.offer
        has_reason = any(why.startswith("one channel:") for why in offer.reasons())
        found.append(([*offer.values().get("channels", ())], has_reason))
    return found


def test_between_the_gpus_of_one_host_there_is_one_channel(two_ranks: RankPool) -> None:
    for every, one in two_ranks.run(_channels):
        assert every == ([1, 2, 4, 8], False)
        assert one == ([], True)


def _on_no_device(is_ours: bool) -> str:
    """What a model says whose weights nobody has made."""
    with torch.device("meta"):
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    ours = {"BAGUA_AUTOTUNE": str(int(is_ours)), "BAGUA_AUTOTUNE_URL": "http://127.0.0.1:1"}
    with mock.patch.dict(os.environ, ours), pytest.raises(RuntimeError) as caught:
        (bagua_client.tune(model) if is_ours else model)(torch.ones(2, 4))
    return str(caught.value)


def test_where_torch_refuses_the_first_pass_its_own_error_comes(two_ranks: RankPool) -> None:
    stock = two_ranks.run(_on_no_device, False)
    assert two_ranks.run(_on_no_device, True) == stock


@MERGES
def test_what_is_kept_or_merged_is_gathered_less(two_ranks: RankPool) -> None:
    # Five units: four blocks, of which all are gathered again, and the rest of the model.
    expected = {
        (): (9, 5),
        (("kept_units", 2),): (7, 5),
        (("kept_units", 4),): (5, 5),
        (("bucket_bytes", 700),): (5, 3),
        (("bucket_bytes", 5000),): (3, 2),
        (("bucket_bytes", 5000), ("kept_units", 4)): (2, 2),
    }
    changes = [*map(dict, expected), {}]
    assert two_ranks.run(_gathers, changes) == [[*expected.values(), (9, 5)]] * 2


def _before_the_first_step() -> str:
    model: Any = bagua_client.tune(sharded(Kind()))
    with pytest.raises(RuntimeError) as caught:
        model.reconfigure(Configuration())
    return str(caught.value)


def test_before_its_first_step_nothing_can_be_set(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_before_the_first_step):
        assert said.endswith("the model has not made a forward pass for training yet")


def _with_an_open_pass() -> list[Any]:
    """The gradients of a pass whose backward pass comes after a change; how that went."""
    found = []
    for changes in ((), ({"bucket_bytes": 5000}, {"kept_units": 4})):
        model, tunable = tuned()
        first, second = model(torch.ones(2, 9)), model(torch.full((2, 9), 2.0))
        first.sum().backward()
        for change in changes:
            assert model.reconfigure(replace(tunable.default, **change))
            third = model(torch.ones(2, 9))
            found.append(len(tunable.layout.partition))
        if not changes:
            third = model(torch.ones(2, 9))
        second.sum().backward()
        third.sum().backward()
        found.append([parameter.grad.full_tensor().tolist() for parameter in model.parameters()])
    return found


@MERGES
def test_nothing_is_merged_while_a_backward_pass_is_to_come(two_ranks: RankPool) -> None:
    for stock, merged, kept, ours in two_ranks.run(_with_an_open_pass):
        assert (merged, kept) == (5, 5)
        assert ours == stock


def _accumulating_copies() -> tuple[int, int, str]:
    """Steps that were seen of three; how many units communicate after a change that was asked for
    in the middle of one; and what differs then."""
    kind = Kind(replicas=2, micro_batches=(2,), awaits="all-reduce")
    models: list[Any] = [sharded(kind), bagua_client.tune(sharded(kind))]
    for model in models:
        train(model, kind, {}, 1)
    tunable = tunable_of(models[1])
    tunable.attach()
    with mock.patch.object(tunable.listener, "reduced") as reduced:
        for model in models:
            train(model, kind, {}, 3)
    seen = reduced.call_count
    for model in models:
        model.set_requires_all_reduce(False)
        model(torch.ones(2, 9)).square().mean().backward()
    assert models[1].reconfigure(replace(tunable.default, bucket_bytes=5000))
    for model in models:
        train(model, kind, {}, 2)
    one, other = (state_of(model) for model in models)
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    return seen, len(tunable.layout.partition), ", ".join(differing)


@MERGES
def test_in_the_middle_of_a_step_of_several_copies_nothing_is_merged(four_ranks: RankPool) -> None:
    """There a unit has the sum over its own copy, which waits for that over all."""
    assert four_ranks.run(_accumulating_copies) == [(3, 5, "")] * 4


def _merged_after(breaks: bool) -> int:
    """How many units communicate, where the first pass of a watched step may have broken."""
    model, tunable = tuned(1)
    broken = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0 if breaks else None)
    with nullcontext() if not breaks else pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 9))
    broken.remove()
    model.reset_iter_state()
    train(model, Kind(), {}, 2)
    changed(model, bucket_bytes=5000)
    return len(tunable.layout.partition)


@MERGES
@pytest.mark.parametrize("breaks", [False, True])
def test_a_forward_pass_that_broke_says_nothing_of_the_order(
    two_ranks: RankPool, breaks: bool
) -> None:
    assert two_ranks.run(_merged_after, breaks) == [2, 2]


def _with_a_compiled_step() -> tuple[bool, bool]:
    """Whether units can be kept, and merged, where the training compiles its optimizer's step."""
    model: Any = bagua_client.tune(sharded(Kind()))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step = torch.compile(optimizer.step)
    with torch.compiler.set_stance("force_eager"):  # It takes as long as all else.
        train(model, Kind(), {}, 1, optimizer)
        default = tunable_of(model).default
        train(model, Kind(), {}, 3, optimizer)
    kept = model.reconfigure(replace(default, kept_units=4))
    return kept, model.reconfigure(replace(default, bucket_bytes=5000))


@MERGES
def test_nothing_is_merged_where_that_compiles_the_optimizers_step_anew(
    two_ranks: RankPool,
) -> None:
    assert two_ranks.run(_with_a_compiled_step) == [(True, False)] * 2


def _set_apart() -> tuple[int, int]:
    """How many units communicate after a change, before and after one differs from the others."""
    (model, tunable), found = tuned(), []
    for bucket_bytes in (5000, 360, 5000):
        changed(model, bucket_bytes=bucket_bytes)
        found.append(len(tunable.layout.partition))
        if bucket_bytes == 360:
            model.blocks[1].set_reshard_after_backward(False, recurse=False)
    return found[0], found[-1]


@MERGES
def test_units_that_the_training_has_set_apart_are_not_merged(two_ranks: RankPool) -> None:
    assert two_ranks.run(_set_apart) == [(2, 5)] * 2


def _of_another_torch() -> tuple[list[str], int, list[bool], str]:
    """Where torch's hooks take other arguments: what is not tuned, and how many units are kept
    after a change. Where a name is gone: whether others can be merged, before and while; why."""
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, 1)

    def other_hooks(modules: Any, before: Any, after: Any) -> None:
        """As releases before 2.13 have it."""

    with mock.patch.object(_fsdp_state, "_register_group_forward_hooks", other_hooks):
        tunable = tunable_of(model)
    train(model, Kind(), {}, 4)
    assert model.reconfigure(replace(tunable.default, kept_units=4))
    train(model, Kind(), {}, 1)
    units, group = tunable.units, vars(tunable.units[1].group)
    alike = [len(set(families(units))) < len(units)]
    gone = group.pop("reduce_scatter_unused_params")
    alike.append(len(set(families(units))) < len(units))
    lacking = why_not(units)
    group["reduce_scatter_unused_params"] = gone
    return tunable.offer.reasons(), tunable.layout.configuration.kept_units, alike, lacking


@MERGES
def test_where_torch_lacks_what_merging_takes_it_is_told_and_all_else_is_tuned(
    two_ranks: RankPool,
) -> None:
    lacks = f"torch {torch.__version__} lacks what this takes: "
    for reasons, kept, alike, lacking in two_ranks.run(_of_another_torch):
        hooks = "hooks of several modules that take five arguments"
        assert f"units that communicate as one: {lacks}{hooks}" in reasons
        assert (kept, alike) == (4, [True, False])
        assert lacking == f"{lacks}group.reduce_scatter_unused_params"


def _awaited_sums() -> list[bool]:
    """Whether what reads gradients has waited for the sums of each kind of release."""
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, 2)
    unit = tunable_of(model).units[1]
    own, by_stream, waited = object(), object(), []
    told = mock.patch.object(torch.cpu.Stream, "wait_event", lambda _, event: waited.append(event))
    ends = {"s": by_stream}
    context = mock.patch.object(unit.group.comm_ctx, "_last_post_reduce_events", ends, create=True)
    with told, context, mock.patch.object(unit.group, "_post_reduce_event", own, create=True):
        _ = unit.gradients
    return [own in waited, by_stream in waited]


def test_gradients_are_read_once_torch_has_summed_them_up(two_ranks: RankPool) -> None:
    """On a GPU torch does so on a stream of its own, for which a pass that is not the last does not
    wait."""
    assert two_ranks.run(_awaited_sums) == [[True, True]] * 2


def _set_later() -> tuple[list[bool], list[int]]:
    """For each unit, after a change: whether it is kept, and how many it gathers ahead, where the
    training has set both after the change before."""
    model, tunable = tuned()
    changed(model, prefetch=1)
    model.set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    changed(model, scatter_buffers=2)
    kept = [unit.group.post_forward_mesh_info is None for unit in tunable.units]
    return kept, [len(unit.state._states_to_forward_prefetch) for unit in tunable.units]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"), reason="torch before 2.13"
)
def test_what_the_training_sets_later_is_what_a_change_goes_back_to(two_ranks: RankPool) -> None:
    assert two_ranks.run(_set_later) == [([True] * 5, [0, 2, 0, 0, 0])] * 2


def _goes_on() -> tuple[int, int]:
    """How many backward passes were seen after one that broke; how many units communicate after a
    change, which waits for passes that are still to come back."""
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, 1)
    tunable = tunable_of(model)
    tunable.attach()
    train(model, Kind(), {}, 1)
    first = model.blocks[0]

    def break_backward(_: Any, __: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]

    broken = first.register_forward_hook(break_backward)
    loss = model(torch.ones(2, 9)).square().mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    broken.remove()
    model.reset_iter_state()
    model.zero_grad()
    with mock.patch.object(tunable.listener, "reduced") as reduced:
        train(model, Kind(), {}, 5)
    del loss
    changed(model, bucket_bytes=5000)
    return reduced.call_count, len(tunable.layout.partition)


@MERGES
def test_after_a_backward_pass_that_broke_steps_are_seen_again(two_ranks: RankPool) -> None:
    assert two_ranks.run(_goes_on) == [(5, 2)] * 2


def _untouched() -> list[tuple[int, int, int]]:
    """Of a model of torch's, and of one that may be tuned: its hooks, and the process's groups."""
    found = []
    for is_ours in (False, True):
        model: Any = sharded(Kind())
        if is_ours:
            bagua_client.tune(model)
        train(model, Kind(), {}, 2)
        hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
        found.append((*hooks, len(distributed_c10d._world.pg_map)))
    return found


def test_without_tuning_nothing_of_ours_is_there(two_ranks: RankPool) -> None:
    for stock, ours in two_ranks.run(_untouched):
        assert ours == stock


def _with_other_units() -> str:
    """What is said where one half of a mesh with tensor parallelism has sharded each block, and the
    other half the model only, which train together by torch alone."""
    kind = Kind(tensor_ranks=2)

    def only_the_model(module: Any, **options: Any) -> Any:
        return fully_shard(module, **options) if isinstance(module, Net) else module

    is_other = dist.get_rank() % 2 == 1
    with mock.patch.object(models, "fully_shard", only_the_model if is_other else fully_shard):
        model: Any = bagua_client.tune(sharded(kind))
    train(model, kind, {}, 1)
    with pytest.raises(RuntimeError) as caught:
        tunable_of(model)
    train(model, kind, {}, 3)
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_have_other_units_than_the_others_are_not_tuned(four_ranks: RankPool) -> None:
    said = "its units on rank 1, 3 are others than on the other ranks"
    assert four_ranks.run(_with_other_units) == [said] * 4


def _carriers() -> list[str]:
    """What reduces a unit's gradients, with nobody watching: by default and in fewer bits."""
    (model, tunable), found = tuned(5), []
    for changes in ({}, {"wire_precision": "bf16"}, {"algorithm": "quantized"}, {}):
        changed(model, **changes)
        comm = tunable.units[0].group._reduce_scatter_comm
        found.append(type(comm).__module__.partition(".")[0])
    return found


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_all_gather"), reason="torch before 2.9 sends it all itself"
)
def test_what_changes_the_numbers_is_in_force_where_nobody_watches(two_ranks: RankPool) -> None:
    expected = ["torch", "bagua_client", "bagua_client", "torch"]
    assert two_ranks.run(_carriers) == [expected, expected]


def _is_gone() -> bool:
    """Whether a model that nobody holds any more is gone."""
    model, _ = tuned(0)
    changed(model, kept_units=2, channels=2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    return gone() is None


def test_a_model_that_is_gone_leaves_its_memory(two_ranks: RankPool) -> None:
    assert two_ranks.run(_is_gone) == [True, True]


# BAGUA_CONFIGURATION: a sharded model trains with what a file says, or as torch has it.


ASKED = {"bucket_bytes": 5000, "kept_units": 4, "channels": 2}


def _train(path: str) -> tuple[list[tuple[int, int, int]], bool, list[str]]:
    """What is in force after each step, whether it equals an untouched model, and what is said."""
    kind, seen = Kind(), []
    untouched: Any = sharded(kind)
    expected, optimizer = train(untouched, kind, {}, 1)
    ours: Any = bagua_client.tune(sharded(kind))
    with logged() as lines:
        with mock.patch.dict(os.environ, {"BAGUA_CONFIGURATION": path}):
            found, other = train(ours, kind, {}, 1)
        for _ in range(6):
            expected += train(untouched, kind, {}, 1, optimizer)[0]
            found += train(ours, kind, {}, 1, other)[0]
            now = ours.configuration
            seen.append((now.kept_units, now.channels, now.bucket_bytes))
    one, two = state_of(untouched), state_of(ours)
    are_equal = found == expected and all(one[name].equal(two[name]) for name in one)
    return seen, are_equal, [line for line in lines if line.startswith("BAGUA_CONFIGURATION")]


@MERGES
def test_it_is_in_force_from_the_second_step_and_merges_once_the_order_is_known(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"configuration": ASKED}))
    (seen, are_equal, lines), other = two_ranks.run(_train, str(path))
    assert are_equal
    assert other == (seen, are_equal, [])
    assert seen[0] == (4, 2, 360)
    assert seen[-1] == (4, 2, 5000)
    assert lines == ["BAGUA_CONFIGURATION: bucket 4.88 KiB, 2 channels, 4 units kept (tuned.json)"]


def _at_first() -> bool:
    _, tunable = tuned()
    asked = replace(tunable.default, kept_units=2, bucket_bytes=5000)
    several = replace(asked, kept_over_micro_batches="on", deferred_reduction="on")
    return tunable.offer.at_first(several) == replace(tunable.default, kept_units=2)


def test_nothing_is_left_to_other_micro_batches_before_these_are_known(
    two_ranks: RankPool,
) -> None:
    assert two_ranks.run(_at_first) == [True, True]


def test_what_the_model_cannot_have_is_said_and_not_used(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"configuration": {"bucket_bytes": 360, "kept_units": 9}}))
    (seen, are_equal, lines), _ = two_ranks.run(_train, str(path))
    assert are_equal
    assert seen[-1] == (0, 1, 360)
    assert "9 units cannot be kept, as only 4 are gathered twice" in lines[0]


# The launcher follows ``fully_shard`` where a tuning is asked for, and nowhere else.


PROGRAM = """
import torch.distributed.fsdp as fsdp
torchs = [fsdp.fully_shard]  # What a module holds by a name is replaced, too.
from bagua_client.integrations.replacement import follow_fully_shard
follow_fully_shard()
follow_fully_shard()
ours = fsdp.fully_shard
print(ours in torchs, getattr(ours, "__wrapped__", None) in torchs, ours.__name__)
assert callable(ours.state)  # As torch's has it.
"""


@pytest.mark.parametrize(
    ("autotune", "said"),
    [
        pytest.param("0", "True False fully_shard", marks=pytest.mark.slow),
        ("1", "False True fully_shard"),
    ],
)
def test_it_is_followed_where_a_tuning_is_asked_for(autotune: str, said: str) -> None:
    environment = {**os.environ, "BAGUA_AUTOTUNE": autotune}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == said, done.stderr


class _Particular(nn.Module):
    """As transformers' models do it: reads the annotations of what is derived from it."""

    derived: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        get_type_hints(cls)
        _Particular.derived.append(cls)


def test_what_a_models_class_does_where_another_is_derived_from_it_is_left_to_the_user() -> None:
    model = _Particular()
    assert become(model, sharded_model.ShardedModel) == ""
    assert isinstance(model, sharded_model.ShardedModel)
    assert _Particular.derived == []
    get_type_hints(type(model))
