"""A model that ``fully_shard`` shards, tuned while it trains."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm, find
from bagua_client.communication.agreement import Vote, named
from bagua_client.communication.communicator import device_for
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.integrations.beginning import Beginning
from bagua_client.integrations.tuned_model import TunedModel, become
from bagua_client.layout import digest_of
from bagua_client.sharded.offer import default_of, refusal_of, specs_of
from bagua_client.sharded.traffic import ShardCommunicator, group_of
from bagua_client.sharded.tunable_units import TunableUnits
from bagua_client.torch_private.sharded import Unit, units_of
from bagua_client.torch_private.wrapper import untraced
from bagua_client.tunable.looks import NotTuned, a_look, seen, together

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)
UNCHECKED = (
    "of a model that fully_shard shards it is not known on a GPU how long it waits for parameters"
)
NOT_BEGUN = "the model has not made a forward pass for training yet"


class ShardedModel(TunedModel):
    """What :func:`bagua_client.tune` adds to the class of a model that ``fully_shard`` shards.

    The tuning begins with the first forward pass for training, when all is set on the model.
    """

    _tunable: TunableUnits | None = None
    _has_begun = False
    _algorithm: Algorithm = find(DEFAULT_ALGORITHM)

    def __init_subclass__(cls) -> None:
        """Do not have the model's own class do what it does where another is derived from it: it
        has done so for the class that ours stands for."""

    @property
    def algorithm(self) -> Algorithm:
        """How the parts travel: this model's own instance, once it has begun to train."""
        return self._algorithm if self._tunable is None else self._tunable.algorithm

    def _given_configuration(self) -> Configuration:
        units, refusal = _units_of(self) if self._has_begun else ([], NOT_BEGUN)
        return Configuration() if refusal else default_of(units)

    def report_last_micro_batch(self, is_last: bool) -> None:
        """Say whether the next micro-batch is the last one before the optimizer steps: before its
        forward pass, on all ranks, in every step, from the first one on.

        What is reduced in each micro-batch may then be reduced in the last one only, if that is
        faster: the knob ``deferred_reduction``. Until then gradients are not to be used. Torch's
        ``set_is_last_backward`` says the same. Without tuning it does nothing.
        """
        if self._tunable is not None:
            self._tunable.micro_batches.told_last = is_last

    def _made(self) -> TunableUnits:
        return tunable_of(self)


def tunable_of(model: ShardedModel) -> TunableUnits:
    """Made when it is needed first, on all ranks together.

    Raises:
        RuntimeError: the model cannot be tuned, or not yet; NotTuned, where one rank cannot make
            what its algorithm, torch's, does not need.
    """
    if model._tunable is None:
        units, refusal = _units_of(model) if model._has_begun else ([], NOT_BEGUN)
        if refusal:
            raise RuntimeError(f"the model's settings cannot be changed: {refusal}")
        model._tunable = _new_tunable(cast(torch.nn.Module, model), units, model._algorithm)
    return model._tunable


def tune_sharded(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
) -> Model:
    """Make a sharded model one that is tuned, in place; see :func:`bagua_client.tune`.

    Raises:
        ValueError: the algorithm is unknown, or not for a sharded model; or the model is ours
            already, with another one.
    """
    asked = find(algorithm)
    if "sharded" not in asked.models:
        raise ValueError(f"{asked.name} is not for a model that fully_shard shards")
    if not isinstance(model, ShardedModel):
        reason = become(model, ShardedModel, _algorithm=asked)
        if reason and not asked.is_torchs:
            raise RuntimeError(f"the model cannot have {asked.name!r}: {reason}")
        _in_first_forward(model, lambda: _begin(model, Environment.read(), optimizers, reason))
    elif asked.name not in (DEFAULT_ALGORITHM, model._algorithm.name):
        raise ValueError(
            f"the model is already tuned with algorithm {model._algorithm.name!r}; give "
            f"{asked.name!r} there, or start the script without bagua_client's launcher"
        )
    return model


def tune_if_whole(module: torch.nn.Module) -> None:
    """Have a module that ``fully_shard`` was called on tuned if it turns out to be the model: the
    first whose forward pass begins, with all others in it."""

    def begin() -> None:
        for inner in module.modules():
            if (handle := _waiting.pop(inner, None)) is not None:
                handle.remove()
        if not isinstance(module, TunedModel):
            reason = become(module, ShardedModel)
            _begin(module, Environment.read(), (), reason)

    _waiting[module] = _in_first_forward(module, begin)


_waiting: weakref.WeakKeyDictionary[torch.nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


def _in_first_forward(model: torch.nn.Module, begin: Callable[[], None]) -> RemovableHandle:
    """Call ``begin`` once, where all ranks begin to train: then all is set on the model."""

    def hook(*_: Any) -> None:
        if torch.is_grad_enabled():
            handle.remove()
            begin()

    handle = model.register_forward_pre_hook(untraced(hook), prepend=True)
    return handle


def _begin(
    model: torch.nn.Module,
    environment: Environment,
    optimizers: Sequence[torch.optim.Optimizer],
    reason: str,
) -> None:
    """All ranks begin their first forward pass for training.

    Args:
        reason: why the model is none of ours; empty: it is.
    """
    tuned = cast(ShardedModel, model)
    if not reason:
        tuned._has_begun = True
        if not tuned._algorithm.is_torchs:
            tunable_of(tuned)
    if not environment.asks:
        return
    units, refusal = _units_of(model)
    is_unseen = bool(units) and units[0].device.type == "cuda"
    start = Beginning(
        name=type(model).__name__,
        group=_group_of(units),
        refusal=lambda: reason or refusal,
        tunable=partial(tunable_of, tuned),
        optimizers=optimizers,
        unchecked=UNCHECKED if is_unseen else "",
    )
    start.begin(model, environment)


def _units_of(model: object) -> tuple[list[Unit], str]:
    """The model's units, and why no setting of them can be changed; empty: some can."""
    units: list[Unit] = []

    @a_look
    def look() -> str:
        units.extend(units_of(cast(torch.nn.Module, model)))
        return refusal_of(units) if units else "none of its parameters is sharded"

    refusal = look()
    return units, refusal


def _group_of(units: Sequence[Unit]) -> dist.ProcessGroup:
    """The ranks that train the model; all of the job's, where that is not known. Those of a unit
    where there is no group of them, which is refused: other stages of a pipeline would not come."""
    found = seen(lambda: group_of(units) or units[0].own_group, None) or dist.group.WORLD
    assert found is not None
    return found


def _new_tunable(
    model: torch.nn.Module, units: Sequence[Unit], algorithm: Algorithm
) -> TunableUnits:
    group = _group_of(units)
    device = device_for(group, units[0].device)
    _check_alike(units, group, device)
    shards, copies = (
        [[dist.get_group_rank(group, rank) for rank in ranks] for ranks in sets]
        for sets in ([unit.ranks for unit in units], [unit.ranks_of_copies for unit in units])
    )
    communicator = ShardCommunicator(group, device, shards, copies)
    weakref.finalize(model, communicator.close).atexit = False
    make = partial(TunableUnits, model, units, algorithm, communicator)
    return together(make, TunableUnits.forget, group, device) if algorithm.is_torchs else make()


def _check_alike(units: Sequence[Unit], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group`` train the same model, each its part. All of them call this
    together.

    Raises:
        NotTuned: they do not.
    """

    def look() -> int:
        shapes = [[spec.name, spec.shape, spec.group] for spec in specs_of(units)]
        spread = [[len(unit.ranks), len(unit.ranks_of_copies)] for unit in units]
        return digest_of(shapes, spread)

    if others := Vote(seen(look, -1), group, device).dissenters():
        reason = f"its units on rank {named(others)} are others than on the other ranks"
        if dist.get_rank(group) == others[0]:
            logger.warning("autotune is off: %s", reason)
        raise NotTuned(reason)
