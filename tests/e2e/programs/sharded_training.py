"""What the ranks of an end-to-end test of faults do: train a sharded model that is tuned, and a
twin that is not, while something goes wrong in the midst of a change."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import bagua_client
from bagua_client import Configuration
from bagua_client.communication import communicator, link
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.sharded.settings import UnitSettings
from bagua_client.sharded.traffic import Scatter
from tests.client.sharded.models import WIDTH, Kind, sharded, state_of
from tests.e2e.programs.training import Lines

KIND = Kind(checkpoints=True)
DEFAULT = Configuration(360, recomputed_blocks=KIND.blocks)
"""A block of these models has so many bytes."""
CHANGES = {
    "keep": replace(DEFAULT, kept_units=4, kept_over_micro_batches="on"),
    "merge": replace(DEFAULT, bucket_bytes=5000),
    "recompute": replace(DEFAULT, recomputed_blocks=1),
    "stripe": replace(DEFAULT, channels=4),
    "own-scatter-group": replace(DEFAULT, scatter_group="own"),
    "precision": replace(DEFAULT, wire_precision="bf16"),
    "eight-bits": replace(DEFAULT, algorithm="quantized"),
}
MICRO_BATCHES = 2
STEP_SECONDS = 0.005
MOST_SECONDS = 150.0
"""Only to end a tuning that hangs: the test fails then."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong.

    Attributes:
        what: ``kill``, ``stop`` (for so many seconds) or ``raise``.
        where: ``put``: when a configuration is put in force; ``groups``: when its process groups
            are made; ``scatter``: in a backward pass under it; several with blanks between.
        changes: of which configurations of ``CHANGES``, each once in each of these places.
        rank: on which rank; -1: on both, in turns.
    """

    what: str
    where: str
    changes: tuple[str, ...] = tuple(CHANGES)
    rank: int = -1
    seconds: float = 2.0


@dataclass(frozen=True)
class Report:
    """What became of a training on one rank.

    Attributes:
        steps: how many it made.
        differing: the first step whose losses or the weights that differ from the twin's; empty:
            all are equal, bit for bit.
        in_force: the configurations that steps were made with, each once, in that order.
        state: of the tuning, at the end.
        logged: the client's log lines, with their levels.
    """

    steps: int
    differing: str
    in_force: list[str]
    state: str
    logged: list[str]


def train(most_steps: int, trouble: Trouble) -> Report:
    """Train for ``most_steps``, or until the tuning has ended and ten steps more."""
    lines, logger = Lines(), logging.getLogger("bagua_client")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    with (
        mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2),
        mock.patch.object(communicator, "CONNECT_SECONDS", 5.0),
    ):
        ours: Any = bagua_client.tune(sharded(KIND))
        twin: Any = bagua_client.tune(sharded(KIND))
        with mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "0"}):
            twin(torch.ones(1, WIDTH)).sum().backward()
            tunable_of(twin)
        twin.zero_grad()
        _make(trouble, ours)
        models = [ours, twin]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
        differing, in_force, left, step, is_over = "", [], most_steps, 0, False
        began = time.monotonic()
        while left > 0:
            losses: list[list[float]] = [[], []]
            for part in range(MICRO_BATCHES):  # A change may come between two of them.
                for model, own in zip(models, losses, strict=True):
                    torch.manual_seed(2 * (MICRO_BATCHES * step + part) + dist.get_rank())
                    loss = model(torch.randn(4, WIDTH)).square().mean()
                    loss.backward()
                    own.append(loss.item())
                    if model is ours:
                        now = tunable_of(ours).layout.configuration
                        _follow(twin, now)
            for model, optimizer, own in zip(models, optimizers, losses, strict=True):
                norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                own.append(norm.full_tensor().item())
                optimizer.step()
                optimizer.zero_grad()
            if losses[0] != losses[1] and not differing:
                differing = f"step {step}: {losses}"
            if str(now) not in in_force:
                in_force.append(str(now))
            step, left = step + 1, left - 1
            if ours.tuning.state not in ("waiting", "tuning") and not is_over:
                left, is_over = min(left, 10), True
            time.sleep(STEP_SECONDS)
            assert time.monotonic() - began < MOST_SECONDS, f"not tuned after {step} steps"
        one, other = state_of(twin), state_of(ours)
        unequal = [name for name in one if not torch.equal(one[name], other[name])]
        differing = differing or ", ".join(unequal)
        return Report(step, differing, in_force, ours.tuning.state, lines.lines)


def _follow(twin: Any, now: Configuration) -> None:
    """Nothing else changes the numbers."""
    bits = {"wire_precision": now.wire_precision, "algorithm": now.algorithm}
    if (asked := replace(twin.configuration, **bits)) != twin.configuration:
        assert twin.reconfigure(asked)


def _make(trouble: Trouble, model: Any) -> None:
    """Have it go wrong in this model, which has made no step yet."""
    for where in trouble.where.split():
        _make_there(trouble, where, model)


def _make_there(trouble: Trouble, where: str, model: Any) -> None:
    left = {CHANGES[name]: number for number, name in enumerate(trouble.changes)}

    def go_wrong(configuration: Configuration) -> None:
        number = left.pop(configuration, None)
        if number is not None and dist.get_rank() == (
            number % 2 if trouble.rank < 0 else trouble.rank
        ):
            _go_wrong(trouble)

    def is_ours(part: Any) -> bool:
        tunable = model._tunable
        return tunable is not None and part in (tunable._held.settings, tunable._held.traffic)

    put, scatter, new_group = UnitSettings.put, Scatter.__call__, dist.new_group

    def our_put(self: UnitSettings, layout: Any, *args: Any) -> None:
        if is_ours(self):
            go_wrong(layout.configuration)
        put(self, layout, *args)

    def our_scatter(self: Scatter, *args: Any, **kwargs: Any) -> Any:
        if is_ours(self._traffic):
            go_wrong(self._traffic.configuration)
        return scatter(self, *args, **kwargs)

    def our_group(*args: Any, **kwargs: Any) -> Any:
        # The tuning's own group is made before the first step.
        if model._tunable is not None and model._tunable.order_is_agreed and left:
            go_wrong(next(iter(left)))
        return new_group(*args, **kwargs)

    patches: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "put": (UnitSettings, "put", our_put),
        "scatter": (Scatter, "__call__", our_scatter),
        "groups": (dist, "new_group", our_group),
    }
    owner, name, ours = patches[where]
    setattr(owner, name, ours)


def _go_wrong(trouble: Trouble) -> None:
    own = os.getpid()
    if trouble.what == "raise":
        raise RuntimeError("no room")
    if trouble.what == "stop":
        wakes = f"sleep {trouble.seconds}; kill -CONT {own}"
        subprocess.Popen(["sh", "-c", wakes], start_new_session=True)
    os.kill(own, signal.SIGSTOP if trouble.what == "stop" else signal.SIGKILL)
