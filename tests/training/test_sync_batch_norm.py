"""Ranks with parts of a batch compute what one process does with all of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua_training.sync_batch_norm import SyncBatchNorm
from tests.ranks import RankPool

Outcome = dict[str, Tensor]


def made(options: dict[str, Any]) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3, **options)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def batches(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs, far from 0, and the gradients that come back to them."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, sum(sizes), 3, 4, 2)
    inputs, gradients = torch.randn(shape, generator=generator)
    return 100 + 5 * inputs, gradients


def trained(layer: nn.Module, input: Tensor, gradient: Tensor) -> Outcome:
    """Two steps, in double precision, and an evaluation."""
    layer = layer.double()
    found: Outcome = {}
    for step in range(2):
        taken = (input.double() * (step + 1)).requires_grad_()
        out = layer(taken)
        out.backward(gradient.double())
        found |= {f"out {step}": out.detach(), f"input {step}": taken.grad}  # type: ignore[dict-item]
    found |= {f"grad of {name}": p.grad for name, p in layer.named_parameters()}  # type: ignore[misc]
    found |= {f"buffer {name}": buffer.clone() for name, buffer in layer.named_buffers()}
    found["evaluated"] = layer.eval()(input.double()).detach()
    return found


def _of_rank(sizes: tuple[int, ...], options: dict[str, Any]) -> Outcome:
    layer = SyncBatchNorm.convert_sync_batchnorm(made(options))
    mine = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
    inputs, gradients = batches(sizes)
    return trained(layer, inputs[mine], gradients[mine])


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((4, 4), {}),
        ((0, 5), {}),
        ((1, 6), {"affine": False}),
        ((1, 6), {"momentum": None}),
        ((0, 5), {"track_running_stats": False}),
    ],
)
def test_two_ranks_equal_one_process_on_the_joined_batch(
    two_ranks: RankPool, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    whole = trained(made(options), *batches(sizes))
    parts = two_ranks.run(_of_rank, sizes, options)
    for name, expected in whole.items():
        if name == "evaluated" and "track_running_stats" in options:
            continue  # of each rank's own batch then
        if name.startswith("grad of"):
            found = parts[0][name] + parts[1][name]
        elif name.startswith("buffer"):
            torch.testing.assert_close(parts[0][name], parts[1][name])
            found = parts[0][name]
        else:
            found = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _all_but_one_value() -> str:
    rows = 1 if dist.get_rank() == 0 else 0
    try:
        SyncBatchNorm(2)(torch.ones(rows, 2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_single_value_is_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    said = two_ranks.run(_all_but_one_value)
    assert all(
        each.startswith("the ranks together have a single value for each channel") for each in said
    )


def test_layers_are_replaced_wherever_they_are_and_keep_their_tensors() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2)), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    weight = model[1][0].weight  # type: ignore[index]
    model.eval()
    found = SyncBatchNorm.convert_sync_batchnorm(model)
    assert found is model
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    assert len(layers) == 2
    assert layers[0].weight is weight
    assert not layers[0].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_alone_it_is_an_ordinary_one() -> None:
    for options in ({}, {"affine": False}, {"momentum": None}):
        layer = SyncBatchNorm.convert_sync_batchnorm(made(options))
        found, expected = (trained(each, *batches((5,))) for each in (layer, made(options)))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
