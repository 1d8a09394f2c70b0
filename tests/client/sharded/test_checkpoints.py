"""Checkpoints that are taken of a model in mid-tuning, and loaded into one, are those of an
untouched model, with the optimizer's state, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import bagua_client
from bagua_client.communication import link
from tests.client.sharded.models import MERGES, Kind, sharded, train
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
CHANGED_AT, SAVED_AT, END = 3, 5, 8
ALL = {"bucket_bytes": 5000, "kept_units": 4, "channels": 4, "scatter_group": "own"}
CASES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "kept": (Kind(), {"kept_units": 3}),
    "merged-in-part": (Kind(), {"bucket_bytes": 700, "kept_units": 3}),
    "own-scatter-group": (Kind(), {"channels": 2, "scatter_group": "own"}),
    "compiled": (Kind(compiles="blocks", checkpoints=True, param_dtype=torch.bfloat16), ALL),
    "offloaded-and-tied": (Kind(offloads=True, tied=True, clips=True), ALL),
    "frozen-and-evaluated": (Kind(frozen=True, between="evaluation"), ALL),
}


def _full(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a checkpoint has, in one flat dictionary; the tensors on rank 0 only."""
    weights, state = get_state_dict(model, optimizer, options=FULL)
    return _flat({"model": weights, "optimizer": state})


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict | list | tuple):
        return {name: tree.clone() if isinstance(tree, torch.Tensor) else tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = {f"{name}/": len(tree)}
    for key, value in pairs:
        found |= _flat(value, f"{name}/{key}")
    return found


def _save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def _load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=folder)
    found = set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"]
    )
    assert not found.missing_keys
    assert not found.unexpected_keys


def _load_full(model: nn.Module, optimizer: Any, full: tuple[Any, Any]) -> None:
    weights, state = full
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # One after the other: ``set_state_dict`` takes the empty one of the other ranks for none.
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def difference(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if list(expected) != list(found):
        return [f"other names: {[*expected]} and {[*found]}"]
    return [
        name
        for name, value in expected.items()
        if not (
            torch.equal(value, found[name])
            if isinstance(value, torch.Tensor)
            else value == found[name]
        )
    ]


def _checkpointed(kind: Kind, change: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """What differs from an untouched training; called on all ranks."""
    with mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2):
        return _compared(kind, change, folder)


def _compared(kind: Kind, change: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    untouched = sharded(kind)
    losses, optimizer = train(untouched, kind, {}, SAVED_AT)
    _save(untouched, optimizer, folder / "untouched")
    saved = _full(untouched, optimizer)
    after, _ = train(untouched, kind, {}, END, optimizer, SAVED_AT)
    end = _full(untouched, optimizer)
    found: dict[str, list[str]] = {}

    def go_on(name: str, model: Any, optimizer: Any, changes: Any) -> None:
        assert len(optimizer.state) > 0
        found[f"{name}: loaded"] = difference(saved, _full(model, optimizer))
        now, _ = train(model, kind, changes, END, optimizer, SAVED_AT)
        found[f"{name}: losses"] = [] if now == after else [f"{now} instead of {after}"]
        found[f"{name}: end"] = difference(end, _full(model, optimizer))

    # Taken in mid-tuning, after which the training goes on.
    ours: Any = bagua_client.tune(sharded(kind))
    now, own = train(ours, kind, {CHANGED_AT: change}, SAVED_AT)
    found["before"] = [] if now == losses else ["losses"]
    _save(ours, own, folder / "ours")
    # On a CPU it shares the optimizer's numbers of steps, which go on counting.
    full = copy.deepcopy(get_state_dict(ours, own, options=FULL))
    go_on("taken", ours, own, {})
    # Taken back in the same training, as after a step that went wrong: what is in force stays.
    _load(ours, own, folder / "ours")
    go_on("taken back", ours, own, {})
    assert ours.configuration.values.items() >= change.items()

    model: Any = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _load(model, optimizer, folder / "ours")
    go_on("resumed untouched", model, optimizer, {})
    for name, start in (("stock's", "untouched"), ("ours", "ours")):
        model = bagua_client.tune(sharded(kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _load(model, optimizer, folder / start)
        go_on(f"{name} resumed and tuned", model, optimizer, _after(change, model))
    model = bagua_client.tune(sharded(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _load_full(model, optimizer, full)
    go_on("resumed from one file", model, optimizer, _after(change, model))
    return {name: differences for name, differences in found.items() if differences}


def _after(change: dict[str, Any], model: Any) -> dict[int, dict[str, Any]]:
    # Merged units need two more steps; the others are there at once.
    del model
    return {SAVED_AT + 1: {k: v for k, v in change.items() if k != "bucket_bytes"}}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(*case, id=name, marks=[MERGES] * ("bucket_bytes" in case[1]))
        for name, case in CASES.items()
    ],
)
def test_they_are_the_same_whatever_is_in_force_and_however_it_trains(
    two_ranks: RankPool, kind: Kind, change: dict[str, Any], tmp_path: Path
) -> None:
    assert two_ranks.run(_checkpointed, kind, change, tmp_path) == [{}] * 2


@MERGES
def test_copies_of_a_sharded_model(four_ranks: RankPool, tmp_path: Path) -> None:
    found = four_ranks.run(_checkpointed, Kind(replicas=2), ALL, tmp_path)
    assert found == [{}] * 4
