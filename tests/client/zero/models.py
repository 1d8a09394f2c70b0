"""Small models under DeepSpeed's ZeRO, trained beside an untouched one, over gloo."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bagua_client
from bagua_client.integrations.zero_engine import tunable_of

HAS_DEEPSPEED = find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="not installed: deepspeed (make test-deepspeed installs it)"
)
WIDTH = 16
Changes = Mapping[int, Mapping[str, Any]]
"""Before which step which knobs have other values than the default's."""


@dataclass(frozen=True)
class Kind:
    """A way in which an engine is made and used."""

    stage: int = 2
    blocks: int = 4
    micro_batches: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)
    """What the file says of ZeRO, beside the stage and the sizes."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What it says else."""
    checkpoints: bool = False
    frozen: bool = False


class Net(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(kind.blocks)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        if kind.frozen:
            self.blocks[1].requires_grad_(False)
        if kind.checkpoints:
            self.blocks = nn.ModuleList(map(checkpoint_wrapper, self.blocks))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        found: torch.Tensor = self.head(values)
        return found


def deepspeed_on_cpu() -> Any:
    """DeepSpeed, told to train on CPUs; it compiles nothing."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Its CPU has one device; ranks beyond are of other hosts, as far as it knows.
    os.environ.setdefault("LOCAL_SIZE", str(dist.get_world_size()))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed
    from deepspeed.utils import groups, logger

    logger.setLevel("ERROR")
    groups._WORLD_GROUP = None  # A pool's ranks have another group for each function.
    # It would compile an operation of its own for messages in shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def engine_of(kind: Kind) -> Any:
    """An engine with the same weights on all ranks."""
    deepspeed = deepspeed_on_cpu()
    torch.manual_seed(0)
    model = Net(kind)
    sizes = {"reduce_bucket_size": 1500, "allgather_bucket_size": 1500}
    if kind.stage == 3:
        sizes |= {"stage3_prefetch_bucket_size": 600, "stage3_param_persistence_threshold": 20}
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": kind.micro_batches,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": kind.stage, **sizes, **kind.zero},
        **kind.config,
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(
    engine: Any, kind: Kind, changes: Changes, steps: int, first: int = 0,
    after_step: Callable[[], object] = lambda: None,
) -> list[float]:  # fmt: skip
    """The losses of the steps from ``first`` to before ``steps``."""
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for step in range(first, steps):
        if step in changes:
            default = tunable_of(engine).default
            assert engine.reconfigure(replace(default, **changes[step]))
        for part in range(kind.micro_batches):
            torch.manual_seed(1000 * step + 10 * part + dist.get_rank())
            loss = engine(torch.randn(5, WIDTH, dtype=dtype)).float().square().mean()
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        after_step()
    return losses


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, gathered, and this rank's part of the optimizer's state."""
    import deepspeed

    found = {}
    for name, value in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([value]):
            found[name] = value.detach().clone()
    for place, state in enumerate(engine.optimizer.optimizer.state.values()):
        found |= {f"{place} {key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def differs(kind: Kind, changes: Changes, steps: int = 8) -> str:
    """What differs between an untouched engine and ours; empty: nothing. Called on all ranks."""
    untouched = engine_of(kind)
    expected, one = train(untouched, kind, {}, steps), state_of(untouched)
    untouched.destroy()
    ours = bagua_client.tune(engine_of(kind))
    found, other = train(ours, kind, changes, steps), state_of(ours)
    ours.destroy()
    if found != expected:
        return f"other losses: {found} instead of {expected}"
    if list(one) != list(other):
        return f"other names: {list(other)}"
    return ", ".join(name for name in one if not torch.equal(one[name], other[name]))
