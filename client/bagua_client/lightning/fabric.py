"""Fabric's strategy: Lightning Fabric's DDPStrategy whose wrapper is ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel
from bagua_client.lightning.shared import (
    CHECKPOINT_KEY,
    AlgorithmChoice,
    Interlude,
    Kept,
    Resumed,
    part,
    resumed,
)

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = object  # Each of Lightning's two packages has its own.


class WithAlgorithmInFabric(DDPStrategy):
    """Fabric's DDPStrategy with one of Bagua's algorithms, tuned if ``BAGUA_AUTOTUNE=1``.

    Args:
        algorithm, flatten, average_on_abort, kwargs: as BaguaStrategy's.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as
            DDPStrategy's; its other arguments too, by their names.

    Raises:
        TypeError, ValueError: as BaguaStrategy.
    """

    misconfiguration: type[Exception]

    def __init__(
        self,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        flatten: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        average_on_abort: bool = True,
        **kwargs: Any,
    ) -> None:
        arguments, others = part(kwargs, super().__init__)
        self._choice = AlgorithmChoice(algorithm, arguments, self.misconfiguration)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            **{"gradient_as_bucket_view": flatten, **others},
        )
        self._average_on_abort = average_on_abort

    # The wrapper

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        if self._choice.needs_optimizer:
            raise RuntimeError(self._err_msg_joint_setup_required())
        return self._wrap(module, ())

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], *further: Any
    ) -> Any:
        if not self._choice.needs_optimizer:
            return super().setup_module_and_optimizers(module, optimizers, *further)
        wrapper = self._wrap(module, optimizers)
        return (wrapper, [self.setup_optimizer(each) for each in optimizers], *(further or (None,)))

    def _wrap(
        self, module: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> DistributedDataParallel:
        device_ids = self._determine_ddp_device_ids()
        return self._choice.wrap(
            module, device_ids, self._ddp_kwargs, optimizers, 0, self.precision
        )

    # What is no part of a step

    @contextmanager
    def paused(self, model: torch.nn.Module) -> Iterator[None]:
        """A context for what is not part of a training step, such as a validation. All ranks enter
        it between two steps. Its time is not measured, and under ``async`` the weights do not
        change meanwhile.

        Args:
            model: the one that ``fabric.setup`` returned.
        """
        wrapper = _wrapper_of(model)
        if wrapper is None:
            raise TypeError(f"fabric.setup() has not made this {type(model).__name__}")
        interlude = Interlude(self._average_on_abort)
        interlude.begin(wrapper)
        try:
            yield
        except BaseException:
            interlude.forget()
            raise
        interlude.end()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], *arguments: Any, **further: Any
    ) -> None:
        with ExitStack() as stack:
            saved = {}
            for name, wrapper in _wrappers_in(state).items():
                stack.enter_context(self.paused(wrapper))
                if (kept := Kept.of(wrapper.algorithm)) is not None:
                    saved[name] = kept.collect(self._convert_stateful_objects_in_state(state, {}))
            state = {**state, CHECKPOINT_KEY: saved} if saved else state
            super().save_checkpoint(path, state, *arguments, **further)

    def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **further: Any) -> Any:
        rest = super().load_checkpoint(path, state, *arguments, **further)
        if not isinstance(state, dict) or not state:
            return rest
        saved = rest.pop(CHECKPOINT_KEY, {})
        for name, wrapper in _wrappers_in(state).items():
            found = resumed(saved.get(name), wrapper.algorithm)
            if found is not None:
                self._restore(found, state, wrapper)
        return rest

    def _restore(
        self, found: Resumed, state: Mapping[str, Any], wrapper: DistributedDataParallel
    ) -> None:
        for name, value in (found.replica or {}).items():
            stateful = state.get(name)
            if isinstance(stateful, torch.nn.Module):
                self.load_module_state_dict(stateful, value)
            elif isinstance(stateful, Optimizer):
                stateful.load_state_dict(value)
        wrapper.algorithm.load_state_dict(found.state)


def _wrapper_of(model: Any) -> DistributedDataParallel | None:
    inside = getattr(model, "_forward_module", model)
    inside = getattr(inside, "_orig_mod", inside)
    return inside if isinstance(inside, DistributedDataParallel) else None


def _wrappers_in(state: Mapping[str, Any]) -> dict[str, DistributedDataParallel]:
    found = {name: _wrapper_of(value) for name, value in state.items()}
    return {name: wrapper for name, wrapper in found.items() if wrapper is not None}
