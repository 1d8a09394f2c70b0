"""A model that a process trains by itself, tuned while it trains."""

from __future__ import annotations

import atexit
import copy
import copyreg
import logging
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm, find
from bagua_client.announcement import announce
from bagua_client.environment import Environment
from bagua_client.integrations.beginning import Beginning
from bagua_client.integrations.tuned_model import TunedModel, become
from bagua_client.single import TunableSingle, refusal_of, trains
from bagua_client.torch_private.wrapper import is_composed, uncompiled
from bagua_client.tunable.looks import seen, together

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)
CPU = torch.device("cpu")
NOT_BEGUN = "the model has not made a forward pass for training yet"
WARNS_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
OURS = ("_tunable", "_agent", "_not_tuned", "_called")
FIRST_FSDP = "FullyShardedDataParallel"
OF_FIRST_FSDP = (
    "FullyShardedDataParallel, FSDP's first version, has nothing to set while it trains; what "
    "fully_shard shards is tuned"
)
WRAPPERS = "DistributedDataParallel", FIRST_FSDP, "DeepSpeedEngine"
"""Classes whose objects are tuned otherwise; on one rank ``fully_shard`` gathers nothing."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class SingleModel(TunedModel):
    """What :func:`bagua_client.tune` adds to the class of a model that a process trains by itself.

    The tuning begins with the first forward pass for training, when all is set on the model. Copies
    of the model, and what is saved of it, are of the model's own class, and not tuned.
    """

    _tunable: TunableSingle | None = None
    _called: weakref.ref[torch.nn.Module] | None = None
    _made_of: type
    algorithm: Algorithm = find(DEFAULT_ALGORITHM)
    """It is never another one: nothing is reduced."""

    def __init_subclass__(cls) -> None:
        """Do not have the model's own class do what it does where another is derived from it: it
        has done so for the class that ours stands for."""

    @property
    def _tuned_rank(self) -> int:
        return 0

    def _made(self) -> TunableSingle:
        return tunable_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_it_was(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        found: Any = super().__reduce_ex__(protocol)
        if not isinstance(found, tuple):
            return found
        make, given, *rest = (self._made_of if each is type(self) else each for each in found)
        given = tuple(self._made_of if each is type(self) else each for each in cast(Any, given))
        if make is getattr(copyreg, "__newobj__", None):  # Pickle would compare the classes.
            make, given = vars(copyreg)["_reconstructor"], (self._made_of, object, None)
        if rest and isinstance(rest[0], dict):
            rest[0] = _without_ours(rest[0], self._tunable)
        return make, given, *rest


def _without_ours(state: dict[str, Any], tunable: TunableSingle | None) -> dict[str, Any]:
    """Such a state of a module, without what we have put there."""
    kept = {name: value for name, value in state.items() if name not in OURS}
    ours = frozenset() if tunable is None else tunable.hooks
    for name in HOOKS:
        if name in kept:
            kept[name] = OrderedDict((n, hook) for n, hook in kept[name].items() if n not in ours)
    return kept


@contextmanager
def _as_it_was(model: SingleModel) -> Iterator[None]:
    """For a while it is of its own class, without what we have put there."""
    ours, state = type(model), dict(vars(model))
    kept = _without_ours(state, model._tunable)
    try:
        object.__setattr__(model, "__class__", model._made_of)
        vars(model).clear()
        vars(model).update(kept)
        yield
    finally:
        vars(model).clear()
        vars(model).update(state)
        object.__setattr__(model, "__class__", ours)


def tunable_of(model: SingleModel) -> TunableSingle:
    """Made when it is needed first.

    Raises:
        RuntimeError: the model cannot be tuned, or not yet; NotTuned, where it cannot be looked at.
    """
    if model._tunable is None:
        called = None if model._called is None else model._called()
        module = cast(torch.nn.Module, model)
        refusal = NOT_BEGUN if called is None else refusal_of(module)
        if refusal or called is None:
            raise RuntimeError(f"the model's settings cannot be changed: {refusal}")
        make = partial(TunableSingle, module, called)
        model._tunable = together(make, TunableSingle.forget, None, CPU)
    return model._tunable


def is_alone(model: object) -> bool:
    """Whether this process trains a model by itself: it has no process group, or one of its own,
    with no launcher that has started others with it, and nothing that communicates in the model."""
    if not isinstance(model, torch.nn.Module):
        return False
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1 and not any(map(_communicates, model.modules()))
    return os.environ.get("WORLD_SIZE", "1") in ("", "1")


def _communicates(module: torch.nn.Module) -> bool:
    return any(_is(module, name) for name in WRAPPERS) or is_composed(module)


def _is(module: torch.nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)


def tune_single(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
) -> Model:
    """Make a model one that is tuned, in place; see :func:`bagua_client.tune`.

    Raises:
        ValueError: another algorithm than the default.
    """
    asked = find(algorithm)
    if asked.name != DEFAULT_ALGORITHM:
        raise ValueError(f"{asked.name} is not for a model that a process trains by itself")
    ours = uncompiled(model)
    if not isinstance(ours, SingleModel):
        reason = _become_single(ours)
        reference = weakref.ref(ours)

        def begin(called: torch.nn.Module) -> None:
            if (found := reference()) is not None:
                _begin(found, called, optimizers, reason)

        handle = _at_first_forward(lambda called: uncompiled(called) is reference(), begin)
        weakref.finalize(ours, handle.remove).atexit = False
    return model


def follow_first_model() -> None:
    """Have the model tuned, or checked, that this process turns out to train by itself, if that is
    asked for: the first that a forward pass for training begins with. Where it is trained by
    several processes in a way that is not tuned, rank 0 says so."""
    environment = Environment.read()
    given = environment.configuration, environment.check
    if not environment.autotune and not any(each is not None for each in given):
        return

    def begin(called: torch.nn.Module) -> None:
        model = uncompiled(called)
        if not isinstance(model, TunedModel) and is_alone(model):
            _begin(model, called, (), _become_single(model))
        elif environment.autotune:
            _tell_if_not_tuned(model)

    _at_first_forward(lambda _: True, begin)


def _tell_if_not_tuned(model: torch.nn.Module) -> None:
    """At once where it is FSDP's first version; else, as a model may be wrapped later, at the end
    of the process, if none was."""
    is_joined = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_joined else int(os.environ.get("RANK") or 0)
    if rank != 0:
        return
    if seen(lambda: any(_is(module, FIRST_FSDP) for module in model.modules()), False):
        logger.warning("autotune is off: %s", OF_FIRST_FSDP)
    else:
        atexit.register(_tell_if_nothing_began)


def _tell_if_nothing_began() -> None:
    if not Beginning.has_begun:
        announce(
            logger,
            "autotune: nothing was tuned, as no model of this training was in a "
            "DistributedDataParallel or a DeepSpeedEngine, or sharded by fully_shard",
        )


def _become_single(model: torch.nn.Module) -> str:
    return become(model, SingleModel, _made_of=type(model))


def _at_first_forward(
    is_meant: Callable[[torch.nn.Module], bool], begin: Callable[[torch.nn.Module], None]
) -> RemovableHandle:
    """Call ``begin`` once, where the first forward pass begins of a module that is meant and
    trained; all modules are looked at until then."""
    # Torch warns of it where a compiled model is called meanwhile.
    warnings.filterwarnings("ignore", WARNS_OF_HOOKS)

    def hook(called: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not seen(lambda: is_meant(called), False):
            return
        if seen(lambda: trains(called), False) and not _is_lazy(called):
            handle.remove()
            begin(called)

    handle = register_module_forward_pre_hook(hook)
    return handle


def _is_lazy(model: torch.nn.Module) -> bool:
    """Whether its first forward pass makes some of its parameters."""
    return any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters())


def _begin(
    model: torch.nn.Module,
    called: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    reason: str,
) -> None:
    """The model begins its first forward pass for training.

    Args:
        called: what the training calls; see :class:`TunableSingle`.
        reason: why the model is none of ours; empty: it is.
    """
    tuned = cast(SingleModel, model)
    if not reason:
        tuned._called = weakref.ref(called)
    start = Beginning(
        name=type(model).__name__,
        group=None,
        refusal=lambda: reason or refusal_of(model),
        tunable=partial(tunable_of, tuned),
        optimizers=optimizers,
    )
    environment = Environment.read()
    start.begin(model, environment)
    is_left = environment.configuration is None and environment.check is None
    if not reason and tuned._agent is None and is_left:
        if tuned._tunable is not None:
            tuned._tunable.forget()
        tuned._tunable = None  # Made anew where it is needed.
