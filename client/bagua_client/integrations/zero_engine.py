"""An engine of DeepSpeed, tuned while it trains."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm, find
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.configuration_file import ConfigurationFile
from bagua_client.environment import Environment
from bagua_client.integrations.given_configuration import agreed_file, train_with
from bagua_client.integrations.tuned_model import TunedModel
from bagua_client.result_line import write_result_line
from bagua_client.zero.buckets import Buckets, refusal_of
from bagua_client.zero.offer import default_of
from bagua_client.zero.tunable_engine import TunableEngine

Engine = TypeVar("Engine")
UNCHECKED = "of an engine of DeepSpeed only whole steps are seen, not what they are made of"


class TunedEngine(TunedModel):
    """What :func:`bagua_client.tune` adds to the class of an engine of DeepSpeed.

    The tuning begins with the engine's next step.
    """

    _tunable: TunableEngine | None = None
    algorithm: Algorithm = find(DEFAULT_ALGORITHM)
    """It is never another one: DeepSpeed reduces by itself."""

    @property
    def configuration(self) -> Configuration:
        """The configuration in force, or the one that will be from the next step on."""
        if self._tunable is not None:
            return self._tunable.layout_to_come.configuration
        return Configuration() if refusal_of(self) else default_of(Buckets(self))

    def reconfigure(self, configuration: Configuration) -> bool:
        """Change the sizes: at once, or where a step has begun, at its end. All ranks must call it
        in the same place.

        Returns:
            Whether all ranks agreed; if not, the log has the reason, and all return to the default
            configuration.

        Raises:
            RuntimeError: the job is being tuned; or none of the engine's sizes can be changed.
        """
        return self._reconfigure(tunable_of(self), configuration)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the engine's own class does it. In most calls of an accumulation nothing steps."""
        before = self.global_steps
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        if self._tunable is not None and self.global_steps != before:
            self._tunable.step_ends()
        return result

    @property
    def _tuned_rank(self) -> int:
        return dist.get_rank() if self._tunable is None else self._tunable.communicator.rank


def tunable_of(engine: Any) -> TunableEngine:
    """Made when it is needed first, on all ranks together.

    Raises:
        RuntimeError: none of the engine's sizes can be changed.
    """
    if engine._tunable is None:
        if refusal := refusal_of(engine):
            raise RuntimeError(f"the engine's sizes cannot be changed: {refusal}")
        buckets = Buckets(engine)
        on_cpu = dist.get_backend(buckets.group) == dist.Backend.GLOO
        device = torch.device("cpu") if on_cpu else buckets.device
        communicator = Communicator(buckets.group, device)
        weakref.finalize(engine, communicator.close).atexit = False
        engine._tunable = TunableEngine(engine, buckets, communicator)
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
        kind = type(engine)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        engine.__class__ = type(kind.__name__, (TunedEngine, kind), names)
        _begin(engine, Environment.read(), optimizers)
    return engine


def _begin(
    engine: Any, environment: Environment, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    refusal = refusal_of(engine)
    group = _group_of(engine)
    file = agreed_file(group, environment, lambda: refusal)
    if environment.autotune:
        _tune(engine, group, refusal, environment, optimizers, file)
    if file is not None and engine._agent is None:
        train_with(tunable_of(engine), file)
    if environment.check is not None:
        from bagua_client.checking import check

        def tunable() -> TunableEngine:
            return tunable_of(engine)

        check.begin(group, refusal or UNCHECKED, tunable, optimizers, environment.check)


def _group_of(engine: Any) -> dist.ProcessGroup:
    """The ranks that reduce the engine's gradients together; all, where that is not known."""
    found: dist.ProcessGroup | None = getattr(engine.optimizer, "dp_process_group", None)
    assert dist.group.WORLD is not None
    return dist.group.WORLD if found is None else found


def _tune(
    engine: Any,
    group: dist.ProcessGroup,
    refusal: str,
    environment: Environment,
    optimizers: Sequence[torch.optim.Optimizer],
    file: ConfigurationFile | None,
) -> None:
    from bagua_client.agent import NO_CONTROL_GROUP, start_agent, why_not_admitted

    # By no collective: a rank that is not to be tuned would not come to one.
    engine._not_tuned = why_not_admitted(group, refusal, environment.knobs)
    if not engine._not_tuned:
        engine._not_tuned, name = NO_CONTROL_GROUP, type(engine.module).__name__
        tunable = tunable_of(engine)
        stepping = tunable.buckets.stepping
        known = [*optimizers, *([] if stepping is None else [stepping])]
        engine._agent = start_agent(tunable, known, environment, name, file)
    if engine._agent is not None:
        weakref.finalize(engine, engine._agent.close).atexit = False
    elif environment.result is not None and engine.tuning.rank == 0:
        write_result_line(environment.result, engine.tuning)
