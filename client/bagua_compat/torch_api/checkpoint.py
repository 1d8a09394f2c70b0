"""Checkpoints in Bagua's files, which Bagua can read and whose own it can be given.

In the folder: ``latest_checkpointed_iteration.txt``, and for each iteration
``iter_0000100/mp_rank_00_model_states.pt``. A model with experts (MoE) has a file for each,
``expert_3_mp_rank_00_model_states.pt``, written by the rank that trains it, and each rank's
optimizer, ``expert_parallel_rank_1_mp_rank_00_optim_states.pt``.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_EXPERT = re.compile(r"(.*\.bagua_moe\.experts\.bagua_experts\.)(\d+)(\..*)")
"""A key of an expert's state; the number is counted on its rank, and in files over all ranks."""


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
) -> None:
    """Save what training goes on from. All ranks must call it; it ends when all have written.

    Args:
        iteration: that the training has reached.
        checkpoints_path: a folder that all ranks see; made if it is not there.
    """
    folder = Path(checkpoints_path) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    shared, experts = _split(model.state_dict())
    content: dict[str, Any] = {"iteration": iteration, "model": shared}
    if lr_scheduler is not None:
        content["lr_scheduler"] = lr_scheduler.state_dict()
    if experts:
        for number, state in experts.items():
            _save(state, _expert_file(folder, number))
        steps = None if optimizer is None else optimizer.state_dict()
        _save({"optimizer": steps}, _optimizer_file(folder))
    elif optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
    if _rank() == 0:
        _save(content, _model_file(folder))
    _wait_for_all()  # Else the tracker might name a checkpoint that a rank still writes.
    if _rank() == 0:
        tracker = Path(checkpoints_path) / TRACKER
        new = tracker.with_suffix(".new")
        new.write_text(str(iteration))
        new.replace(tracker)
        logger.info("saved the checkpoint of iteration %d in %s", iteration, folder)
    _wait_for_all()


def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    strict: bool = True,
) -> int:
    """Load the latest checkpoint. All ranks must call it.

    Args:
        strict: raise an error where names in the checkpoint and in the model differ.

    Returns:
        Its iteration; 0 where there is none, and then nothing is changed.

    Raises:
        ValueError: the file that names the latest is damaged.
        KeyError: the checkpoint was saved without what is to be loaded.
    """
    tracker = Path(checkpoints_path) / TRACKER
    if not tracker.is_file():
        logger.warning("rank %d: there is no checkpoint in %s", _rank(), checkpoints_path)
        return 0
    iteration = _latest(tracker)
    folder = Path(checkpoints_path) / f"iter_{iteration:07d}"
    content = torch.load(_model_file(folder), map_location="cpu")
    own_experts = _split(model.state_dict())[1]
    state = content["model"]
    for number in own_experts:
        state.update(_load_expert(folder, number, len(own_experts)))
    model.load_state_dict(state, strict=strict)
    if optimizer is not None:
        found = torch.load(_optimizer_file(folder), map_location="cpu") if own_experts else content
        optimizer.load_state_dict(found["optimizer"])
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(content["lr_scheduler"])
    _wait_for_all()
    logger.info("rank %d: loaded the checkpoint of iteration %d", _rank(), iteration)
    return iteration


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return what all ranks share, and the state of each of this rank's experts by its number among
    all ranks', under names with that number.
    """
    shared: dict[str, Any] = {}
    experts: dict[int, dict[str, Any]] = defaultdict(dict)
    matches = {key: _EXPERT.fullmatch(key) for key in state}
    first = _rank() * len({int(match[2]) for match in matches.values() if match})
    for key, match in matches.items():
        if match is None:
            shared[key] = state[key]
        else:
            number = first + int(match[2])
            experts[number][f"{match[1]}{number}{match[3]}"] = state[key]
    return shared, dict(experts)


def _load_expert(folder: Path, number: int, experts_per_rank: int) -> dict[str, Any]:
    state = torch.load(_expert_file(folder, number), map_location="cpu")
    local = number % experts_per_rank
    return {_EXPERT.sub(rf"\g<1>{local}\g<3>", key): value for key, value in state.items()}


def _latest(tracker: Path) -> int:
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(f"{tracker} must hold the number of an iteration, not {text!r}")
    return int(text)


def _save(content: Any, path: Path) -> None:
    """Save the content whole or not at all."""
    new = path.with_suffix(".new")
    torch.save(content, new)
    new.replace(path)


def _model_file(folder: Path) -> Path:
    return folder / "mp_rank_00_model_states.pt"


def _expert_file(folder: Path, number: int) -> Path:
    return folder / f"expert_{number}_mp_rank_00_model_states.pt"


def _optimizer_file(folder: Path) -> Path:
    return folder / f"expert_parallel_rank_{_rank()}_mp_rank_00_optim_states.pt"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()
