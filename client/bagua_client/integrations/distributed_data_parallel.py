"""DistributedDataParallel: torch's own class, whose buckets may be re-cut while it trains."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm, find
from bagua_client.communication.agreement import REFUSAL, UNSET, Vote, agreed
from bagua_client.communication.communicator import Communicator, device_for
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.integrations.beginning import Beginning
from bagua_client.integrations.sharded_model import tune_sharded
from bagua_client.integrations.single_model import is_alone, tune_single
from bagua_client.integrations.tuned_model import WHILE_TUNED, TunedModel, become
from bagua_client.integrations.zero_engine import tune_engine
from bagua_client.reducer.offer import (
    LEAVES_FIRST_STEP_OUT,
    configuration_of,
    describe_hook,
    refusal_of,
)
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import (
    DEFAULT_CAPS,
    caps_of,
    has_reducer,
    leaves_first_step_out,
    user_hook_of,
)
from bagua_client.torch_private.sharded import is_sharded
from bagua_client.torch_private.wrapper import (
    WithMoments,
    is_composed,
    parameters_of,
    signature_of_wrapper,
)
from bagua_client.tunable.looks import NotTuned, a_look, seen, together
from bagua_client.tuning import write_result_line
from bagua_client.zero import is_engine
from bagua_wire.knobs import MIB

logger = logging.getLogger(__name__)

COMPOSED = (
    "torch's composable replicate() makes the model's wrapper in the first forward pass; without "
    "tune(), a script that python -m bagua_client --autotune starts is tuned then"
)
CHANGED = "the model has another process group than it was wrapped with"
DESTROYED = "the process group that the model was wrapped with was destroyed"
CHANNELS, SIZE = "BAGUA_DEFAULT_CHANNELS", "BAGUA_DEFAULT_BUCKET_SIZE"
DIFFERS = "it has another value on rank {} than on the other ranks; set the same value on all ranks"

Wrapper = TypeVar("Wrapper", bound=torch.nn.Module)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Joined(JoinHook):
    """Torch's ``hook`` for a rank that has no more inputs than the others, and its end."""

    def __init__(self, hook: JoinHook, tunable: TunableReducer) -> None:
        self._hook = hook
        self._tunable = tunable
        tunable.joins(True)

    def main_hook(self) -> None:
        self._tunable.stand_back()
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._tunable.joins(False)


class DistributedDataParallel(TunedModel, WithMoments):
    """:class:`torch.nn.parallel.DistributedDataParallel`, tuned while it trains.

    Takes all of torch's arguments, with torch's defaults; without ``BAGUA_AUTOTUNE=1`` it behaves
    as torch's class. The tuning starts from ``bucket_cap_mb``, and speed-ups are relative to it; if
    it is not given, ``BAGUA_DEFAULT_BUCKET_SIZE`` (bytes) is used, if set.
    ``BAGUA_DEFAULT_CHANNELS`` sets the channels to start from; it also counts without tuning.

    Args:
        module: as torch's, like all further arguments.
        optimizers: the optimizers of the model; their steps tell where a training step ends. Left
            out, they are found when they step.
        algorithm: the name of a registered algorithm, or an instance of one.

    Raises:
        ValueError: the algorithm is unknown, or an environment variable has an invalid value; and
            what torch's class raises.
    """

    _tunable: TunableReducer | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        optimizers: Optimizers = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        **kwargs: Any,
    ) -> None:
        environment = Environment.read()
        size_bytes = environment.default_bucket_bytes
        if size_bytes is not None:
            if sized := _sized(size_bytes, module, *args, **kwargs):
                args, kwargs = (), sized
                module = kwargs.pop("module")
            else:
                size_bytes = None
        super().__init__(module, *args, **kwargs)
        # All ranks ask, or none: one where the look fails asks, too.
        is_default = environment.asks and seen(lambda: caps_of(self) == DEFAULT_CAPS, True)
        if size_bytes is not None or is_default:
            agree_on_size(self, size_bytes)
        _begin(self, environment, algorithm, optimizers)

    @property
    def _is_followed(self) -> bool:  # type: ignore[override]
        return self._tunable is not None

    def _given_configuration(self) -> Configuration:
        return configuration_of(caps_of(self))

    @property
    def _tuned_rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that keeps the replicas together: this model's own instance."""
        return find(DEFAULT_ALGORITHM) if self._tunable is None else self._tunable.algorithm

    def reconfigure(self, configuration: Configuration) -> bool:
        """Re-cut the buckets: at once between two steps, else at the end of the step under way. All
        ranks must call it in the same step.

        Returns:
            Whether all ranks agreed and could do it; if not, the log has the reason. All return to
            the default configuration if it does not fit the model or the ranks disagree, or if the
            process groups that it needs could not be made. They keep what they had if a rank
            could not make the buckets.

        Raises:
            RuntimeError: the job is being tuned, or the ranks cannot have the process groups that
                the configuration needs; what is in force stays.
        """
        if self.is_tuning:
            raise RuntimeError(WHILE_TUNED)
        if not has_reducer(self):
            raise RuntimeError(
                "torch reduces this model's gradients without its C++ reducer, so there are no "
                "buckets to re-cut"
            )
        if leaves_first_step_out(self):
            raise RuntimeError(LEAVES_FIRST_STEP_OUT)
        return super().reconfigure(configuration)

    def _made(self) -> TunableReducer:
        return tunable_of(self)

    def join_hook(self, **kwargs: Any) -> Any:
        """Return torch's hook: while ranks may end their training one by one, nothing is tuned."""
        if self.algorithm.needs_all_ranks:
            raise RuntimeError(
                f"ranks cannot end their training one by one (join) under {self.algorithm.name}"
            )
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook if self._tunable is None else Joined(hook, self._tunable)

    def __getstate__(self) -> dict[str, Any]:
        """Copied as torch's class is: a copy is made for this process group anew, and is not
        tuned."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_tunable", None)
        if state.pop("_agent", None) is not None:
            state["_not_tuned"] = "a copy is not tuned"
        return state

    def _forward_begins(self) -> None:
        if self._tunable is not None:
            communicator = self._tunable.communicator
            if communicator.is_left or communicator.group is not self.process_group:
                self._leave(self._tunable)
        if self._tunable is not None:
            self._tunable.before_forward()
            if self._agent is not None:
                self._tunable.observers.call(self._agent.outcome.forward_begins)

    def _leave(self, tunable: TunableReducer) -> None:
        """Go on as torch's class, on this rank alone: the ranks that the model was wrapped for
        are not those that it trains with now."""
        reason = CHANGED if self.process_group is not tunable.communicator.group else DESTROYED
        if tunable.communicator.rank == 0:
            logger.warning("autotune is off: %s; the training goes on as torch has it", reason)
        if self._agent is not None:
            self._agent.close(reason)
        tunable.leave()
        tunable.give_back()
        self._tunable, self._not_tuned = None, reason

    def _buffers_stay(self) -> bool:
        return self._tunable is not None and self._tunable.algorithm.leaves_gradients

    def _buffers_travel(self) -> AbstractContextManager[None]:
        return nullcontext() if self._tunable is None else self._tunable.listener.waiting()

    def _hook_comes(self) -> None:
        if self._tunable is not None:
            _check_hook(self._tunable.algorithm)
            self._tunable.give_way()

    def _hook_came(self) -> None:
        if self._tunable is not None:
            self._tunable.look_on()
            self._tunable.observers.call(self._look_at_hook, self._tunable)

    def _look_at_hook(self, tunable: TunableReducer) -> None:
        hook = tunable.offer.hook
        # Where it ends the tuning, the agent says so.
        if self.is_tuning and hook is not None and not tunable.refusal:
            from bagua_client.agent import tell_left_alone

            tell_left_alone(tunable, [describe_hook(hook)])


_TORCHS = signature_of_wrapper()


def _signature() -> inspect.Signature:
    """Return torch's signature, whatever its release, with our own arguments by keyword only."""
    own = inspect.signature(DistributedDataParallel.__init__).parameters
    torchs = [parameter for name, parameter in _TORCHS.parameters.items() if name != "self"]
    return inspect.Signature([*torchs, own["optimizers"], own["algorithm"]])


def _sized(size_bytes: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of torch's class by their names, with that size of a bucket; empty: another one
    is given, or what is given is for the class to refuse."""
    try:
        given = _TORCHS.bind(None, *args, **kwargs).arguments
    except TypeError:
        return {}
    if given.get("bucket_cap_mb") is not None or given.get("bucket_cap_mb_list"):
        return {}
    given["bucket_cap_mb"] = size_bytes / MIB
    return {name: value for name, value in given.items() if name != "self"}


DistributedDataParallel.__signature__ = _signature()  # type: ignore[attr-defined]


def tune(
    model: Wrapper, *, optimizers: Optimizers = None, algorithm: str | Algorithm = DEFAULT_ALGORITHM
) -> Wrapper:
    """Have a model tuned that is wrapped or sharded already, or that this process trains by itself,
    in place. All ranks must call it, before the first step or between two steps.

    Args:
        model: torch's DistributedDataParallel, or a subclass of it; or a model on which
            ``fully_shard`` was called last, which gets the methods of :class:`ShardedModel`; or an
            engine of DeepSpeed, which gets those of :class:`TunedEngine`; or, in a process that
            trains by itself, any module, which gets those of :class:`SingleModel`.
        optimizers, algorithm: see :class:`DistributedDataParallel`; of a sharded model it is one
            that is for such models, of an engine of DeepSpeed or a single process the default.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is none of these.
        ValueError: see :class:`DistributedDataParallel`; or ``model`` is already ours, with another
            algorithm.
    """
    if is_sharded(model) and not (algorithm == DEFAULT_ALGORITHM and is_alone(model)):
        return tune_sharded(model, _listed(optimizers), algorithm)
    if is_engine(model):
        return tune_engine(model, _listed(optimizers), algorithm)
    if is_composed(model):
        return _leave_alone(model)
    if not isinstance(model, TorchDistributedDataParallel):
        if is_alone(model):
            return tune_single(model, _listed(optimizers), algorithm)
        raise TypeError(
            "tune() takes a torch.nn.parallel.DistributedDataParallel, a model that fully_shard "
            "was called on or an engine of DeepSpeed, and any model where a process trains by "
            "itself, not "
            f"{type(model).__name__}; for a compiled model, give the wrapper that was compiled"
        )
    if isinstance(model, DistributedDataParallel):
        _check_same(model, algorithm)
        return model
    environment, listed = Environment.read(), _listed(optimizers)
    made_of = type(model)
    if made_of is TorchDistributedDataParallel:
        model.__class__ = DistributedDataParallel  # type: ignore[assignment]
    elif reason := become(model, DistributedDataParallel, _made_of=made_of):
        if algorithm != DEFAULT_ALGORITHM:
            raise RuntimeError(f"the model cannot have {find(algorithm).name!r}: {reason}")
        _start(cast(Any, model), listed, lambda: reason).begin(model, environment)
        return model
    _begin(model, environment, algorithm, listed)  # type: ignore[arg-type]
    return model


def _leave_alone(model: Wrapper) -> Wrapper:
    """Torch makes the wrapper of such a model in its first forward pass, and keeps it to itself."""
    environment = Environment.read()
    if not environment.autotune or become(model, TunedModel, _not_tuned=COMPOSED):
        return model
    if dist.get_rank() == 0:
        logger.warning("autotune is off: %s", COMPOSED)
        if environment.result is not None:
            write_result_line(environment.result, cast(TunedModel, model).tuning)
    return model


def _check_same(model: DistributedDataParallel, algorithm: str | Algorithm) -> None:
    asked = find(algorithm).name
    if asked not in (DEFAULT_ALGORITHM, model.algorithm.name):
        raise ValueError(
            f"the model is already wrapped with algorithm {model.algorithm.name!r}; give "
            f"{asked!r} there, or start the script without bagua_client's launcher"
        )


def _begin(
    wrapper: DistributedDataParallel,
    environment: Environment,
    algorithm: str | Algorithm,
    optimizers: Optimizers,
) -> None:
    listed = _listed(optimizers)
    channels = channels_of(wrapper, environment)
    if algorithm != DEFAULT_ALGORITHM and user_hook_of(wrapper) is not None:
        _check_hook(find(algorithm))
    if algorithm != DEFAULT_ALGORITHM or channels > 1:
        with suppress(NotTuned):
            wrapper._tunable = new_tunable(wrapper, find(algorithm), channels)
    _start(wrapper, listed, partial(_refusal_of, wrapper)).begin(wrapper, environment)


def _start(
    wrapper: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    refusal: Callable[[], str],
) -> Beginning:
    tunable, name = partial(tunable_of, wrapper), type(wrapper.module).__name__
    group = wrapper.process_group
    return Beginning(name, group, refusal, tunable, optimizers, wrapper=wrapper)


@a_look
def _refusal_of(wrapper: DistributedDataParallel) -> str:
    return refusal_of(wrapper, caps_of(wrapper))


def _check_hook(algorithm: Algorithm) -> None:
    if algorithm.name != DEFAULT_ALGORITHM:
        raise RuntimeError(
            f"the model trains with algorithm {algorithm.name!r}, which communicates the buckets; "
            "a communication hook (torch's mixed_precision has one) would do that instead"
        )


def tunable_of(wrapper: DistributedDataParallel) -> TunableReducer:
    """The wrapper's reducer, made when it is needed first, on all ranks together."""
    if wrapper._tunable is None:
        wrapper._tunable = new_tunable(wrapper, find(DEFAULT_ALGORITHM))
    return wrapper._tunable


def _listed(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for optimizer in listed:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizers must be torch optimizers, not {optimizer!r}")
    return listed


# The reducer that a wrapper is tuned by, and the buckets and channels that it starts with


def channels_of(wrapper: DistributedDataParallel, environment: Environment) -> int:
    """The number of channels asked for; 1 where the buckets are not ours to carry, or the ranks ask
    for different numbers. The same on all ranks."""
    asked = environment.default_channels
    if not environment.asks:
        return 1
    answer = UNSET if asked == 1 else str(asked)
    if asked > 1 and (obstacle := _channels_obstacle(wrapper)):
        answer = f"{REFUSAL}{obstacle}"
    return asked if agreed(wrapper.process_group, CHANNELS, answer, DIFFERS) else 1


@a_look
def _channels_obstacle(wrapper: DistributedDataParallel) -> str:
    if obstacle := refusal_of(wrapper, torchs.caps_of(wrapper)):
        return obstacle
    is_theirs = torchs.user_hook_of(wrapper) is not None
    return "the training's own communication hook carries the buckets" if is_theirs else ""


def agree_on_size(wrapper: DistributedDataParallel, size_bytes: int | None) -> None:
    """Cut a new wrapper's buckets as torch does by default, unless all ranks cut them to this size.

    Args:
        size_bytes: what they were cut to; None: it is not set on this rank.
    """
    group = wrapper.process_group
    if not seen(lambda: torchs.has_reducer(wrapper), True) or dist.get_world_size(group) == 1:
        return
    answer = UNSET if size_bytes is None else str(size_bytes)
    if not agreed(group, SIZE, answer, DIFFERS) and size_bytes is not None:
        hook = torchs.user_hook_of(wrapper)
        torchs.new_reducer(wrapper, parameters_of(wrapper), torchs.DEFAULT_CAPS)
        wrapper.bucket_bytes_cap = torchs.DEFAULT_CAPS.bucket_bytes
        if hook is not None:
            torchs.register_user_hook(wrapper, hook, None)


def new_tunable(
    wrapper: DistributedDataParallel, algorithm: Algorithm, channels: int = 1
) -> TunableReducer:
    """The reducer of ``wrapper``, with a communicator of its own. All ranks call it together.

    Args:
        channels: to start from, as far as there is room for them on all ranks.

    Raises:
        NotTuned: a rank cannot make it, and the algorithm is the default, which torch has anyway.
        ValueError: another algorithm does not work for this model.
    """
    group = wrapper.process_group
    communicator = Communicator(group, device_for(group, wrapper.device))
    if channels > 1:
        # GPUs of different kinds have room for different numbers.
        room = seen(lambda: communicator.most_channels, 1)
        most = min(Vote(room, group, communicator.device).values())
        if channels > most and communicator.rank == 0:
            obstacle = communicator.obstacle or f"a GPU has room for {most}"
            logger.warning("BAGUA_DEFAULT_CHANNELS=%d is not possible here: %s", channels, obstacle)
        channels = min(channels, most)
    make = partial(TunableReducer, wrapper, algorithm, communicator)
    if algorithm.name == DEFAULT_ALGORITHM:
        tunable = together(make, TunableReducer.forget, group, communicator.device)
    else:
        tunable = make()
    weakref.finalize(wrapper, communicator.close).atexit = False
    if channels > 1:
        tunable.start_from(replace(tunable.default, channels=channels))
    return tunable
