"""A model that ``fully_shard`` shards, tuned while it trains."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.integrations.tuned_model import TunedModel
from bagua_client.result_line import write_result_line
from bagua_client.sharded.offer import refusal_of
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.torch_private.sharded import Unit, units_of

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)
NO_CONTROL_GROUP = "a rank cannot make the gloo group that a tuning needs; see its log"
UNCHECKED = (
    "of a model that fully_shard shards it is not known on a GPU how long it waits for parameters"
)
NOT_BEGUN = "the model has not made a forward pass for training yet"


class ShardedModel(TunedModel):
    """What :func:`bagua_client.tune` adds to the class of a model that ``fully_shard`` shards.

    The tuning begins with the first forward pass for training, when all is set on the model.
    """

    _tunable: TunableUnits | None = None
    _refusal = NOT_BEGUN

    @property
    def configuration(self) -> Configuration:
        """The configuration in force, or the one that will be from the next step on."""
        if self._tunable is None:
            return Configuration()
        return self._tunable.layout_to_come.configuration

    def reconfigure(self, configuration: Configuration) -> bool:
        """Change the settings, from the next forward pass for training on. All ranks must call it
        in the same step, after the first one.

        Returns:
            Whether all ranks agreed; if not, the log has the reason, and all return to the default
            configuration.

        Raises:
            RuntimeError: the job is being tuned; or the model cannot be tuned, or not yet.
        """
        if self._tunable is None:
            raise RuntimeError(f"the model's settings cannot be changed: {self._refusal}")
        return self._reconfigure(self._tunable, configuration)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """As the model's own class lists them."""
        if self._tunable is not None:
            self._tunable.look_at_parameters()
        listed: Iterator[tuple[str, Any]] = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        return listed

    @property
    def _tuned_rank(self) -> int:
        return dist.get_rank() if self._tunable is None else self._tunable.communicator.rank


def tune_sharded(model: Model, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Model:
    """Make a sharded model one that is tuned, in place; see :func:`bagua_client.tune`."""
    if not isinstance(model, ShardedModel):
        _become(model)
        _in_first_forward(model, lambda: _begin(model, Environment.read(), optimizers))
    return model


def tune_if_whole(module: torch.nn.Module) -> None:
    """Have a module that ``fully_shard`` was called on tuned if it turns out to be the model: the
    first whose forward pass begins, with all others in it."""

    def begin() -> None:
        for inner in module.modules():
            if (handle := _waiting.pop(inner, None)) is not None:
                handle.remove()
        if not isinstance(module, ShardedModel):
            _become(module)
            _begin(module, Environment.read(), ())

    _waiting[module] = _in_first_forward(module, begin)


_waiting: weakref.WeakKeyDictionary[torch.nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


def _become(model: torch.nn.Module) -> None:
    kind = type(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (ShardedModel, kind), names)


def _in_first_forward(model: torch.nn.Module, begin: Callable[[], None]) -> RemovableHandle:
    """Call ``begin`` once, where all ranks begin to train: then all is set on the model."""

    def hook(*_: Any) -> None:
        if torch.is_grad_enabled():
            handle.remove()
            begin()

    handle = model.register_forward_pre_hook(hook, prepend=True)
    return handle


def _begin(
    model: torch.nn.Module, environment: Environment, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """All ranks begin their first forward pass for training."""
    tuned = cast(ShardedModel, model)
    units: list[Unit] = []
    try:
        units = units_of(model)
        tuned._refusal = refusal_of(units) if units else "none of its parameters is sharded"
    except (AttributeError, ValueError) as error:  # Names of torch's may be others some day.
        tuned._refusal = str(error)
    if not tuned._refusal:
        tuned._tunable = _new_tunable(model, units)
    if environment.configuration and dist.get_rank() == 0:
        logger.warning(
            "BAGUA_CONFIGURATION is not used: a sharded model takes its configuration by "
            "reconfigure()"
        )
    if environment.autotune:
        _tune(tuned, environment, optimizers)
    if environment.check is not None and (tunable := tuned._tunable) is not None:
        from bagua_client.agent import check

        on_gpu = tunable.communicator.device.type == "cuda"
        group = tunable.communicator.group
        check.begin(group, UNCHECKED * on_gpu, lambda: tunable, optimizers, environment.check)


def _new_tunable(model: torch.nn.Module, units: Sequence[Unit]) -> TunableUnits:
    shards = units[0].ranks
    ranks = sorted(rank for each in shards for rank in each)
    group = units[0].own_group if len(shards) == 1 else dist.group.WORLD
    assert group is not None
    on_cpu = dist.get_backend(group) == dist.Backend.GLOO
    device = torch.device("cpu") if on_cpu else units[0].device
    places = {rank: place for place, rank in enumerate(ranks)}
    parts = [[places[rank] for rank in each] for each in shards]
    communicator = Communicator(group, device, parts)
    weakref.finalize(model, communicator.close).atexit = False
    return TunableUnits(model, units, communicator)


def _tune(
    model: ShardedModel, environment: Environment, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    from bagua_client.agent import start_agent, why_not_admitted

    tunable = model._tunable
    if tunable is None:
        model._not_tuned = model._refusal
        if dist.get_rank() == 0:
            logger.warning("autotune is off: %s", model._refusal)
    else:
        group = tunable.communicator.group
        model._not_tuned = why_not_admitted(group, "", environment.knobs)
        if not model._not_tuned:
            model._not_tuned, name = NO_CONTROL_GROUP, type(model).__name__
            model._agent = start_agent(tunable, optimizers, environment, name)
    if model._agent is not None:
        weakref.finalize(model, model._agent.close).atexit = False
    elif environment.result is not None and model.tuning.rank == 0:
        write_result_line(environment.result, model.tuning)
