"""DistributedDataParallel: torch's interface over this project's reducer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm, find
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.reducer.hooks import attach
from bagua_client.reducer.reconfiguration import Reconfiguration
from bagua_client.reducer.reducer import Reducer
from bagua_client.reducer.replicas import Replicas

if TYPE_CHECKING:
    from bagua_client.agent import Agent


logger = logging.getLogger(__name__)

OFF = 0
"""The vote of a rank that is not to be tuned; of others it is the format of their reports."""


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that its replicas train together; buckets may change between steps.

    Used like :class:`torch.nn.parallel.DistributedDataParallel`, but ``state_dict`` has the
    module's own keys. With ``BAGUA_AUTOTUNE=1`` the configuration is tuned while the job runs.

    Args:
        module: on the device it trains on; its replicas must be alike on all ranks.
        optimizers: needed by algorithms that communicate after the optimizer's step.
        algorithm: the name of a registered algorithm, or an instance of one.
        process_group: the ranks that train together; None: all.
        broadcast_buffers: take over rank 0's buffers before each forward pass.
        find_unused_parameters: parameters may take no part in a step's loss. Buckets that hold
            such a parameter wait for the end of the backward pass.
        gradient_as_bucket_view: ``parameter.grad`` is a view into its bucket, which saves a
            copy of all gradients.

    Raises:
        RuntimeError: torch.distributed is not initialised, or the replicas differ.
        ValueError: nothing to train, sparse gradients, or an unknown algorithm.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        algorithm: str | Algorithm = "gradient_allreduce",
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise RuntimeError(
                "torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() before wrapping the model"
            )
        environment = Environment.read()
        algorithm = find(algorithm) if isinstance(algorithm, str) else algorithm
        named = _trained_parameters(module)
        communicator = Communicator(group, _device_of(named, group))
        self.module = module
        self.require_backward_grad_sync = True
        self.register_load_state_dict_pre_hook(_insert_module_prefix)  # type: ignore[no-untyped-call]
        self._reducer = Reducer(
            named,
            algorithm,
            communicator,
            Configuration(bucket_bytes=environment.default_bucket_bytes),
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        _check_replicas(self._reducer)
        Replicas(lambda: chain(module.parameters(), module.buffers()), communicator).take_over()
        self._buffers_of_rank_0 = Replicas(module.buffers, communicator)
        self._broadcasts_buffers = broadcast_buffers
        self._sync_buffers = broadcast_buffers
        handles = attach(
            self._reducer,
            [parameter for _, parameter in named],
            algorithm.when,
            _listed(optimizers),
        )
        self._agent: Agent | None = None
        if _tunes(environment, communicator):
            # Without autotuning not even the agent's code is loaded.
            from bagua_client.agent import start_agent

            parameters = [parameter for _, parameter in named]
            self._agent = start_agent(self._reducer, parameters, environment, type(module).__name__)
        # At the end of the process the reporter itself says goodbye, and waits a moment for it.
        weakref.finalize(self, _let_go, handles, self._agent).atexit = False

    @property
    def configuration(self) -> Configuration:
        """What is in force."""
        return self._reducer.layout.configuration

    @property
    def is_tuning(self) -> bool:
        """Whether configurations are being tried; changes on all ranks in the same step."""
        return self._agent is not None and self._agent.is_active

    def reconfigure(self, configuration: Configuration) -> bool:
        """Re-cut the buckets now, between two steps. All ranks must call it together.

        Returns:
            Whether all ranks agreed; if not, all are back at the default configuration. They
            do not where the configuration does not fit the model, which is logged.

        Raises:
            RuntimeError: called in the middle of a step, or the ranks cannot make the process
                groups that it needs; the configuration stays as it was.
        """
        communicator = self._reducer.communicator
        change = Reconfiguration(
            self._reducer, configuration, communicator.group, communicator.device
        )
        layout = change.conclude()
        communicator.prepare(layout.configuration)
        self._reducer.recut(layout)
        return change.agreed

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled()
        synchronise = trains and self.require_backward_grad_sync
        if trains:
            self._reducer.before_forward()
        # Like torch's: buffers have only changed apart where the last pass was synchronised.
        if self._sync_buffers:
            with nullcontext() if self._agent is None else self._agent.waiting():
                self._buffers_of_rank_0.take_over()
        self._sync_buffers = synchronise and self._broadcasts_buffers
        outputs = self.module(*inputs, **kwargs)
        if trains:
            self._reducer.arm(synchronise)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes made inside only accumulate gradients locally."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, with its own keys: fit for a run without this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "the wrapper of a model cannot be copied or saved, as its process groups cannot; copy "
            "or save the model itself, model.module"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the module; keys as :meth:`state_dict` gives them."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)


def _insert_module_prefix(
    wrapper: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """For a wrapper inside a larger module: torch looks for ``module.`` in the keys, and
    :meth:`DistributedDataParallel.state_dict` leaves it out."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)


def _let_go(handles: Sequence[RemovableHandle], agent: Agent | None) -> None:
    """The wrapper is gone: its model may be wrapped again, or train without one."""
    for handle in handles:
        handle.remove()
    if agent is not None:
        agent.close()


def _trained_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the module has no parameter that requires a gradient: nothing to train")
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"{name or type(child).__name__} produces sparse gradients, which cannot travel in "
                "a bucket; build it with sparse=False"
            )
    return named


def _device_of(
    named: Sequence[tuple[str, torch.nn.Parameter]], group: dist.ProcessGroup
) -> torch.device:
    """A device that ``group`` communicates from: NCCL cannot from the CPU."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        return torch.device("cpu")
    return named[0][1].device


def _check_replicas(reducer: Reducer) -> None:
    communicator = reducer.communicator
    vote = Vote(reducer.layout.digest, communicator.group, communicator.device)
    dissenters = vote.dissenters()
    if dissenters:
        raise RuntimeError(
            f"the model on rank {', '.join(map(str, dissenters))} has other parameters (names, "
            "sizes or dtypes) or another BAGUA_DEFAULT_BUCKET_SIZE than on the other ranks; build "
            "the same model with the same settings on every rank"
        )


def _tunes(environment: Environment, communicator: Communicator) -> bool:
    """Whether the job is tuned: BAGUA_AUTOTUNE says so on all ranks, there are several, and they
    understand one another.

    Reports of different sizes would end the processes, so their format is compared first: in this
    vote, which ranks of all releases hold.
    """
    report_format = OFF
    if environment.autotune:
        from bagua_client.agent.report import FORMAT as report_format
    vote = Vote(report_format, communicator.group, communicator.device)
    dissenters = vote.dissenters()
    if dissenters:
        if communicator.rank == 0 and OFF in vote.values():
            logger.warning(
                "autotune is off: BAGUA_AUTOTUNE is set on some ranks only; set it on all"
            )
        elif communicator.rank == 0:
            logger.error(
                "autotune is off: the release of bagua-client on rank %s is not that of the other "
                "ranks, and they would not understand one another; install the same on all",
                ", ".join(map(str, dissenters)),
            )
        return False
    if environment.autotune and communicator.world_size == 1:
        logger.info("autotune is off: a single rank communicates nothing")
    return environment.autotune and communicator.world_size > 1


def _listed(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for optimizer in listed:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizers must be torch optimizers, not {optimizer!r}; device_ids are not needed"
            )
    return listed
