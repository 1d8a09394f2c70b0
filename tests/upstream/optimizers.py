"""Every optimizer of two collections from PyPI, fused and plain: are weights and states alike?

    make upstream-optimizers                  # 30 steps of each
    make upstream-optimizers ARGS="--steps 120 --claimed"

Each is made with its defaults, and where it can be told to loop (``foreach=False``) a second time
so. ``--claimed`` passes ``element_wise=True`` for all, so that only the trial stands between an
optimizer and wrong numbers. What fails without fusing, too, is left out. Ends with 1 if a fused
optimizer computes something else than the plain one, or raises.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagua_training.optimizers import fuse_optimizer

COLLECTIONS = ("torch.optim", "torch_optimizer", "pytorch_optimizer")
TOLERANCE = 1e-4
"""Of the largest value of a tensor."""
LEFT_OUT, REFUSED, PLAIN, FUSED, WRONG, CRASHED = (
    "left out",
    "refused at once",
    "plain",
    "fused",
    "WRONG",
    "CRASHED",
)


def optimizers() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Their names, classes, and what they are made with beside the parameters."""
    for name in COLLECTIONS:
        for key, made in sorted(vars(importlib.import_module(name)).items()):
            if inspect.isclass(made) and issubclass(made, Optimizer) and made is not Optimizer:
                yield f"{name}.{key}", made, {}
                if "foreach" in inspect.signature(made).parameters:
                    yield f"{name}.{key}(foreach=False)", made, {"foreach": False}


def trained(optimizer: Any, model: nn.Module, name: str, steps: int) -> None:
    """So many steps of the method ``name``."""
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(8, 9, generator=generator)).square().mean().backward()
        getattr(optimizer, name)()


def made_with(made: Any, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(9, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))
    )
    torch.manual_seed(1)
    return model, made(model.parameters(), **options)


def difference(found: Any, plain: Any) -> bool:
    """Whether two states, of whatever they are made, are not alike."""
    if isinstance(plain, Tensor):
        if not isinstance(found, Tensor) or found.shape != plain.shape:
            return True
        ours, theirs = found.detach().double(), plain.detach().double()
        largest = float(theirs.abs().nan_to_num().max()) if theirs.numel() else 0.0
        return not torch.allclose(ours, theirs, 0, TOLERANCE * largest, equal_nan=True)
    if isinstance(plain, dict):
        return found.keys() != plain.keys() or any(difference(found[k], plain[k]) for k in plain)
    if isinstance(plain, list | tuple):
        return len(found) != len(plain) or any(map(difference, found, plain))
    is_number = isinstance(plain, bool | int | float | str)
    return type(found) is not type(plain) or (is_number and found != plain and plain == plain)


def outcome(made: Any, options: dict[str, Any], steps: int, is_claimed: bool) -> tuple[str, str]:
    """Which of the above it is, and a reason or a detail."""
    try:
        plain_model, plain = made_with(made, options)
        trained(plain, plain_model, "step", steps)
    except Exception as error:
        return LEFT_OUT, f"{type(error).__name__}: {error}"
    model, optimizer = made_with(made, options)
    try:
        fuse_optimizer(optimizer, element_wise=is_claimed)
    except ValueError as error:
        return REFUSED, str(error)
    try:
        trained(optimizer, model, "fuse_step", steps)
    except Exception as error:
        return CRASHED, f"{type(error).__name__}: {error}"
    for what, ours, theirs in (
        ("weights", list(model.parameters()), list(plain_model.parameters())),
        (
            "gradients",
            [p.grad for p in model.parameters()],
            [p.grad for p in plain_model.parameters()],
        ),
        ("state", optimizer.state_dict(), plain.state_dict()),
    ):
        if difference(ours, theirs):
            return WRONG, what
    refusal = optimizer._bagua_fused_step.refusal
    return (PLAIN, refusal) if refusal or not optimizer._bagua_fused_count else (FUSED, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--claimed", action="store_true", help="pass element_wise=True")
    parser.add_argument("--reasons", action="store_true", help="print why each is plain")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("bagua_training").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, tuple[str, str]] = {}
    for name, made, arguments in optimizers():
        found[name] = outcome(made, arguments, options.steps, options.claimed)
    for name, (kind, reason) in found.items():
        if kind in (WRONG, CRASHED) or (options.reasons and kind != FUSED):
            print(f"{kind}: {name}: {reason}")
    print("fused:", ", ".join(name for name, (kind, _) in found.items() if kind == FUSED))
    counts = Counter(kind for kind, _ in found.values())
    print(f"{len(found)}, each {options.steps} steps:", dict(counts))
    return int(counts[WRONG] + counts[CRASHED] > 0)


if __name__ == "__main__":
    sys.exit(main())
