"""The same training three times: with torch's class, with ours under its name, with ``tune``.

Nothing here imports a framework: what stands in for torch's class must be there before it.
"""

from __future__ import annotations

import enum
import importlib
import os
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import pytest
import torch.distributed as dist

from bagua_client.launcher import replace_torchs_class


class Arm(enum.Enum):
    """Whose class the framework finds, and what is done to the wrapper that it makes."""

    TORCH = "torch"
    NAMED = "named"
    TUNED = "tuned"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        arm: what it trains with.
        folder: on a file system that all ranks see, empty at the start.
        times: so many times as long as usual.
        url: of the service that tunes it; empty: its buckets are cut anew by hand.
    """

    arm: Arm
    folder: str
    times: int = 1
    url: str = ""


@dataclass
class Trained:
    """What a training came to on one rank.

    Attributes:
        values: weights, buffers and losses, by name.
        cuts: the numbers of elements by bucket, of each way in which the buckets were cut.
        configurations: those that were in force; empty with torch's class.
        refusals: why buckets could not be cut by hand.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    cuts: set[tuple[int, ...]] = field(default_factory=set)
    configurations: set[str] = field(default_factory=set)
    refusals: set[str] = field(default_factory=set)


def train(run: Run, scenario: str) -> Trained:
    """On a rank: the training that the function ``module:name`` makes."""
    if run.arm is Arm.NAMED:
        replace_torchs_class()
    module, _, name = scenario.partition(":")
    make = getattr(importlib.import_module(f"tests.integrations.trainings.{module}"), name)
    is_tuned = run.url and run.arm is not Arm.TORCH
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": run.url} if is_tuned else {}
    os.environ.update(variables)
    try:
        trained: Trained = make(run)
    finally:
        for variable in variables:
            del os.environ[variable]
    dist.barrier()  # What one rank has written, another may still read.
    return trained


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip without them. Not imported here: the ranks do that, with ours in torch's place."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
