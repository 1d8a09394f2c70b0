"""DistributedDataParallel: torch's own class, whose buckets may be re-cut while it trains."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from bagua_client.algorithms import Algorithm, find
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import MIB, Configuration
from bagua_client.configuration_file import ConfigurationFile
from bagua_client.environment import Environment
from bagua_client.integrations.given_configuration import agreed_file, train_with
from bagua_client.reducer.offer import LEAVES_FIRST_STEP_OUT, configuration_of, refusal_of
from bagua_client.reducer.reconfiguration import Reconfiguration
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.result_line import write_result_line
from bagua_client.torch_private.reducer import (
    caps_of,
    has_reducer,
    leaves_first_step_out,
    user_hook_of,
)
from bagua_client.torch_private.wrapper import WithMoments
from bagua_client.tuning import Tuning

if TYPE_CHECKING:
    from bagua_client.agent import Agent

logger = logging.getLogger(__name__)

Wrapper = TypeVar("Wrapper", bound=TorchDistributedDataParallel)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
DEFAULT_ALGORITHM = "gradient_allreduce"
NO_CONTROL_GROUP = "a rank cannot make the gloo group that a tuning needs, as its log says"


class DistributedDataParallel(WithMoments):
    """:class:`torch.nn.parallel.DistributedDataParallel`, tuned while it trains.

    Takes all of torch's arguments, with torch's defaults; without ``BAGUA_AUTOTUNE=1`` it is
    torch's class and nothing else. ``bucket_cap_mb`` is what the tuning starts from and is
    compared with; where it is not given, ``BAGUA_DEFAULT_BUCKET_SIZE`` (bytes) is, if that is set.
    ``BAGUA_DEFAULT_CHANNELS`` is another part of that default; the job runs with it, tuned or not.

    Args:
        module: as torch's, like all further arguments.
        optimizers: those of the model, whose steps tell where one training step ends and the
            next begins; found by themselves if left out.
        algorithm: the name of a registered algorithm, or an instance of one.

    Raises:
        ValueError: an unknown algorithm, an environment variable that cannot be read; and what
            torch's class raises.
    """

    _tunable: TunableReducer | None = None
    _agent: Agent | None = None
    _not_tuned = "BAGUA_AUTOTUNE=1 is not set"

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        optimizers: Optimizers = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        **kwargs: Any,
    ) -> None:
        environment = Environment.read()
        if environment.default_bucket_bytes is not None:
            given = _TORCHS.bind(None, module, *args, **kwargs).arguments
            if given.get("bucket_cap_mb") is None and not given.get("bucket_cap_mb_list"):
                given["bucket_cap_mb"] = environment.default_bucket_bytes / MIB
                args, kwargs = (), {name: given[name] for name in given if name != "self"}
                module = kwargs.pop("module")
        super().__init__(module, *args, **kwargs)
        _begin(self, environment, algorithm, optimizers)

    @property
    def _is_followed(self) -> bool:  # type: ignore[override]
        return self._tunable is not None

    @property
    def configuration(self) -> Configuration:
        """What is in force, or will be in the next step."""
        if self._tunable is None:
            return configuration_of(caps_of(self))
        return self._tunable.layout_to_come.configuration

    @property
    def is_tuning(self) -> bool:
        """Whether configurations are being tried; changes on all ranks in the same step."""
        return self._agent is not None and self._agent.is_active

    @property
    def tuning(self) -> Tuning:
        """What has come of the tuning by now: its state, the best configuration, the speed-up with
        its interval, the cost."""
        if self._agent is not None:
            return self._agent.outcome.tuning
        tunable, now = self._tunable, self.configuration
        return Tuning(
            state="off",
            reason=self._not_tuned,
            summary=self._not_tuned,
            configuration=now,
            default=now if tunable is None else tunable.default,
            rank=dist.get_rank(self.process_group),
        )

    @property
    def algorithm(self) -> Algorithm:
        """What keeps the replicas together: this model's own instance, with its state."""
        return find(DEFAULT_ALGORITHM) if self._tunable is None else self._tunable.algorithm

    def report_loss(self, loss: torch.Tensor | float) -> None:
        """Tell a tuning the loss of this rank's batch, once in each step, from the first one on.

        A trial that changes the numbers fails where losses under it are worse than before, by more
        than 5 % and more than chance. Nothing waits for the device. Without a tuning it does
        nothing.

        Raises:
            TypeError: neither a tensor nor a number.
        """
        if self._agent is not None:
            self._agent.report_loss(loss)

    def unmeasured(self) -> AbstractContextManager[None]:
        """Around what is no part of a step, such as a validation or the writing of a checkpoint: a
        tuning then leaves out the time from the optimizers' last step to its end. All ranks, after
        the same step and before the next forward pass that is trained. Without a tuning it does
        nothing.

        It is of use where such things are frequent: a few steps that take longer change no median.
        """
        return nullcontext() if self._agent is None else self._agent.unmeasured()

    def reconfigure(self, configuration: Configuration) -> bool:
        """Re-cut the buckets before the next forward pass that synchronises. All ranks must call
        it together, in the same step.

        Returns:
            Whether all ranks agreed; if not, all go back to the default configuration. They
            do not where the configuration does not fit the model, which is logged.

        Raises:
            RuntimeError: the job is being tuned, or the ranks cannot make the process groups
                that the configuration needs; what is in force stays.
        """
        if self.is_tuning:
            raise RuntimeError(
                "the job is being tuned, and a configuration set by hand would be measured as "
                "another; set it when is_tuning is False, or train with BAGUA_AUTOTUNE=0"
            )
        if not has_reducer(self):
            raise RuntimeError("torch carries this model's gradients without a reducer to re-cut")
        if leaves_first_step_out(self):
            raise RuntimeError(LEAVES_FIRST_STEP_OUT)
        tunable = _tunable_of(self)
        communicator = tunable.communicator
        change = Reconfiguration(tunable, configuration, communicator.group, communicator.device)
        tunable.schedule(change.conclude())
        return change.agreed

    def join_hook(self, **kwargs: Any) -> Any:
        """As torch's: while ranks may end their training one by one, nothing is tuned."""
        if self.algorithm.needs_all_ranks:
            raise RuntimeError(
                f"ranks cannot end their training one by one (join) under {self.algorithm.name}"
            )
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook if self._tunable is None else _Joined(hook, self._tunable)

    def __getstate__(self) -> dict[str, Any]:
        """As torch's: a copy is made for this process group anew, and is not tuned."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_tunable", None)
        if state.pop("_agent", None) is not None:
            state["_not_tuned"] = "a copy is not tuned"
        return state

    def _forward_begins(self) -> bool:
        is_uncut = self._tunable is not None and self._tunable.before_forward()
        if self._agent is not None:
            self._agent.outcome.forward_begins()
        return is_uncut

    def _buffers_stay(self) -> bool:
        return self._tunable is not None and self._tunable.algorithm.leaves_gradients

    def _buffers_travel(self) -> AbstractContextManager[None]:
        return nullcontext() if self._tunable is None else self._tunable.waiting()

    def _hook_comes(self) -> None:
        if self._tunable is not None:
            _check_hook(self._tunable.algorithm)
            self._tunable.give_way()

    def _hook_came(self) -> None:
        if self._tunable is not None:
            self._tunable.look_on()
        if self._tunable is not None and self.is_tuning:
            from bagua_client.agent import hook_came

            hook_came(self._tunable)


class _Joined(JoinHook):
    """Torch's ``hook`` for a rank that has no more inputs than the others, and its end."""

    def __init__(self, hook: JoinHook, tunable: TunableReducer) -> None:
        self._hook = hook
        self._tunable = tunable
        tunable.may_join = True

    def main_hook(self) -> None:
        self._tunable.stand_back()
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._tunable.may_join = False


_TORCHS = inspect.signature(TorchDistributedDataParallel.__init__)


def _signature() -> inspect.Signature:
    """Torch's, whatever release it is of, with our own arguments by keyword only."""
    own = inspect.signature(DistributedDataParallel.__init__).parameters
    torchs = [parameter for name, parameter in _TORCHS.parameters.items() if name != "self"]
    return inspect.Signature([*torchs, own["optimizers"], own["algorithm"]])


DistributedDataParallel.__signature__ = _signature()  # type: ignore[attr-defined]


def tune(
    model: Wrapper,
    *,
    optimizers: Optimizers = None,
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
) -> Wrapper:
    """Do to a wrapper that somebody else made what ours would have done. All ranks must call it
    together, before the first step or between two.

    Args:
        model: torch's DistributedDataParallel, or a subclass of it; changed in place.
        optimizers, algorithm: see :class:`DistributedDataParallel`.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is something else.
        ValueError: see :class:`DistributedDataParallel`; or ``model`` is that already, with another
            algorithm.
    """
    if not isinstance(model, TorchDistributedDataParallel):
        raise TypeError(
            "tune() takes a torch.nn.parallel.DistributedDataParallel, not "
            f"{type(model).__name__}; of a compiled model, give the wrapper that was compiled"
        )
    if isinstance(model, DistributedDataParallel):
        _check_same(model, algorithm)
        return model
    environment = Environment.read()
    made_of = type(model)
    if made_of is TorchDistributedDataParallel:
        model.__class__ = DistributedDataParallel  # type: ignore[assignment]
    else:
        bases = DistributedDataParallel, made_of
        model.__class__ = type(made_of.__name__, bases, {"_made_of": made_of})
    _begin(model, environment, algorithm, optimizers)  # type: ignore[arg-type]
    return model


def _check_same(model: DistributedDataParallel, algorithm: str | Algorithm) -> None:
    asked = find(algorithm).name
    if asked not in (DEFAULT_ALGORITHM, model.algorithm.name):
        raise ValueError(
            f"the model is wrapped with algorithm {model.algorithm.name!r} already; ask for "
            f"{asked!r} there, or start the script without bagua_client's launcher"
        )


def _begin(
    wrapper: DistributedDataParallel,
    environment: Environment,
    algorithm: str | Algorithm,
    optimizers: Optimizers,
) -> None:
    listed = _listed(optimizers)
    channels = _channels(wrapper, environment.default_channels)
    if algorithm != DEFAULT_ALGORITHM and user_hook_of(wrapper) is not None:
        _check_hook(find(algorithm))
    if algorithm != DEFAULT_ALGORITHM or channels > 1:
        wrapper._tunable = _new_tunable(wrapper, find(algorithm), channels)
    file = agreed_file(wrapper, path) if (path := environment.configuration) else None
    if environment.autotune:
        _tune(wrapper, environment, listed, file)
    if file is not None and wrapper._agent is None:
        train_with(_tunable_of(wrapper), file)


def _tune(
    wrapper: DistributedDataParallel,
    environment: Environment,
    optimizers: Sequence[torch.optim.Optimizer],
    file: ConfigurationFile | None,
) -> None:
    # Without autotuning not even the agent's code is loaded.
    from bagua_client.agent import start_agent, why_not_admitted

    wrapper._not_tuned = why_not_admitted(wrapper, environment.knobs)
    if not wrapper._not_tuned:
        wrapper._not_tuned = NO_CONTROL_GROUP
        tunable, model = _tunable_of(wrapper), type(wrapper.module).__name__
        wrapper._agent = start_agent(tunable, optimizers, environment, model, file)
    if wrapper._agent is not None:
        # At the end of the process the reporter itself says goodbye, and waits a moment for it.
        weakref.finalize(wrapper, wrapper._agent.close).atexit = False
    elif environment.result is not None and wrapper.tuning.rank == 0:
        write_result_line(environment.result, wrapper.tuning)


def _check_hook(algorithm: Algorithm) -> None:
    if algorithm.name != DEFAULT_ALGORITHM:
        raise RuntimeError(
            f"the model trains with algorithm {algorithm.name!r}, which says how buckets travel; a "
            "communication hook (torch's mixed_precision has one) would take its place"
        )


def _channels(wrapper: DistributedDataParallel, asked: int) -> int:
    """As many as are asked for, where the buckets are ours to carry; the same on all ranks."""
    if asked == 1:
        return 1
    obstacle = refusal_of(wrapper, caps_of(wrapper))
    if not obstacle and user_hook_of(wrapper) is not None:
        obstacle = "buckets travel by the training's own communication hook"
    if obstacle:
        _warn_of_channels(asked, obstacle)
    return 1 if obstacle else asked


def _warn_of_channels(asked: int, obstacle: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("BAGUA_DEFAULT_CHANNELS=%d is more than there can be: %s", asked, obstacle)


def _tunable_of(wrapper: DistributedDataParallel) -> TunableReducer:
    """Made when it is needed first, on all ranks together."""
    if wrapper._tunable is None:
        wrapper._tunable = _new_tunable(wrapper, find(DEFAULT_ALGORITHM))
    return wrapper._tunable


def _new_tunable(
    wrapper: DistributedDataParallel, algorithm: Algorithm, channels: int = 1
) -> TunableReducer:
    group = wrapper.process_group
    on_cpu = dist.get_backend(group) == dist.Backend.GLOO
    communicator = Communicator(group, torch.device("cpu") if on_cpu else wrapper.device)
    most = communicator.most_channels
    if channels > most:
        _warn_of_channels(channels, communicator.obstacle or f"this GPU has room for {most}")
        channels = most
    tunable = TunableReducer(wrapper, algorithm, communicator)
    if channels > 1:
        tunable.start_from(replace(tunable.default, channels=channels))
    return tunable


def _listed(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for optimizer in listed:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizers must be torch optimizers, not {optimizer!r}")
    return listed
