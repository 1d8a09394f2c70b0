"""An engine of DeepSpeed, tuned while it trains."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm, find
from bagua_client.communication.communicator import Communicator, device_for
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.integrations.beginning import Beginning
from bagua_client.integrations.tuned_model import TunedModel, become
from bagua_client.tunable.looks import a_look, seen, together
from bagua_client.zero import Buckets, TunableEngine, default_of, refusal_of

Engine = TypeVar("Engine")
UNCHECKED = "of an engine of DeepSpeed only whole steps are seen, not what they are made of"


class TunedEngine(TunedModel):
    """What :func:`bagua_client.tune` adds to the class of an engine of DeepSpeed.

    The tuning begins with the engine's next step.
    """

    _tunable: TunableEngine | None = None
    algorithm: Algorithm = find(DEFAULT_ALGORITHM)
    """It is never another one: DeepSpeed reduces by itself."""

    def _given_configuration(self) -> Configuration:
        return Configuration() if refusal_of(self) else default_of(Buckets(self))

    def _made(self) -> TunableEngine:
        return tunable_of(self)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the engine's own class does it. In most calls of an accumulation nothing steps."""
        before = self.global_steps
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        if self._tunable is not None and self.global_steps != before:
            self._tunable.step_ends()
        return result


def tunable_of(engine: Any) -> TunableEngine:
    """Made when it is needed first, on all ranks together.

    Raises:
        RuntimeError: none of the engine's sizes can be changed.
    """
    if engine._tunable is None:
        if refusal := refusal_of(engine):
            raise RuntimeError(f"the engine's sizes cannot be changed: {refusal}")
        buckets = Buckets(engine)
        device = device_for(buckets.group, buckets.device)
        communicator = Communicator(buckets.group, device)
        weakref.finalize(engine, communicator.close).atexit = False
        make = partial(TunableEngine, engine, buckets, communicator)
        engine._tunable = together(make, TunableEngine.forget, buckets.group, device)
    tunable: TunableEngine = engine._tunable
    return tunable


def tune_engine(
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
) -> Engine:
    """Make an engine one that is tuned, in place; see :func:`bagua_client.tune`.

    Raises:
        ValueError: another algorithm than the default.
    """
    asked = find(algorithm)
    if asked.name != DEFAULT_ALGORITHM:
        raise ValueError(f"{asked.name} is not for an engine of DeepSpeed, which reduces by itself")
    if not isinstance(engine, TunedEngine):
        reason = become(engine, TunedEngine)
        _begin(engine, Environment.read(), optimizers, reason)
    return engine


def _begin(
    engine: Any, environment: Environment, optimizers: Sequence[torch.optim.Optimizer], reason: str
) -> None:
    """Args:
    reason: why the engine is none of ours; empty: it is.
    """
    refusal = reason or _refusal(engine)
    start = Beginning(
        name=seen(lambda: type(engine.module).__name__, ""),
        group=_group_of(engine),
        refusal=lambda: refusal,
        tunable=partial(tunable_of, engine),
        optimizers=[*optimizers, *_stepping(engine)],
        unchecked=UNCHECKED,
    )
    start.begin(engine, environment)


@a_look
def _refusal(engine: Any) -> str:
    """Why nothing of it can be changed, or not all that is needed can be read; empty: it can."""
    refusal = refusal_of(engine)
    if not refusal:
        Buckets(engine)
    return refusal


def _stepping(engine: Any) -> list[torch.optim.Optimizer]:
    """The optimizer of torch's that makes the step, where there is one."""
    found: object = seen(lambda: engine.optimizer.optimizer, None)
    return [found] if isinstance(found, torch.optim.Optimizer) else []


def _group_of(engine: Any) -> dist.ProcessGroup:
    """The ranks that reduce the engine's gradients together; all, where that is not known."""

    def look() -> dist.ProcessGroup | None:
        return getattr(engine.optimizer, "dp_process_group", None)

    found = seen(look, None) or dist.group.WORLD
    assert found is not None
    return found
