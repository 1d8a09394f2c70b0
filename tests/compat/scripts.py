"""What a Bagua script does: it begins and trains a small model, maybe by modules of the release."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client.launcher import AS_BAGUA
from tests.client.algorithms.small import loss_of, small_model
from tests.outside import BAGUA, folder_of


def release_module(path: str) -> Any:
    """The module at ``bagua/torch_api/PATH``, unmodified; its imports of ``bagua`` find ours."""
    place = folder_of(BAGUA) / "bagua" / "torch_api" / path
    spec = importlib.util.spec_from_file_location(f"users_{place.stem}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [AS_BAGUA, *sys.path]):
        importlib.import_module("bagua.torch_api")
    spec.loader.exec_module(module)
    return module


def begin() -> None:
    if not bagua.communication.is_initialized():
        bagua.init_process_group()


def begun_model() -> Any:
    begin()
    return small_model()


def sgd(*models: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def weights_of(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def apart(values: torch.Tensor) -> float:
    """By how much they differ between ranks at most."""
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return float((high - low).max())
