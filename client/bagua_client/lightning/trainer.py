"""The Trainer's strategy: Lightning's DDPStrategy whose wrapper is ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm
from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel
from bagua_client.lightning.shared import (
    CHECKPOINT_KEY,
    AlgorithmChoice,
    Interlude,
    Kept,
    part,
    resumed,
)

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object  # Each of Lightning's two packages has its own.


class WithAlgorithm(DDPStrategy):
    """Lightning's DDPStrategy with one of Bagua's algorithms, tuned if ``BAGUA_AUTOTUNE=1``.

    Args:
        algorithm: the name of a registered algorithm, or an instance of one.
        flatten: gradients are views of the buckets (``gradient_as_bucket_view``).
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as
            DDPStrategy's; its other arguments too, by their names.
        average_on_abort: under ``async`` make the ranks' weights equal before a validation, a
            checkpoint and the end of the training. If False, averaging only pauses there, and each
            rank continues with its own weights.
        kwargs: the algorithm's arguments, such as ``sync_interval_ms=100``, and those of torch's
            DistributedDataParallel.

    Raises:
        TypeError: neither the algorithm nor DistributedDataParallel takes such an argument.
        ValueError: an unknown algorithm, or what an algorithm cannot be.
    """

    strategy_name = "bagua"
    misconfiguration: type[Exception]

    def __init__(
        self,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        flatten: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
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
            precision_plugin=precision_plugin,
            **{"gradient_as_bucket_view": flatten, **others},
        )
        self._interlude = Interlude(average_on_abort)
        self._ended: Kept | None = None
        self._tells_loss = False

    # The wrapper

    def configure_ddp(self) -> None:
        if not self._choice.needs_optimizer:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._choice.needs_optimizer:
            super().configure_ddp()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        self._tells_loss = bool(Environment.read().allowed)
        return self._choice.wrap(
            model,
            self.determine_ddp_device_ids(),
            self._ddp_kwargs,
            self.optimizers,
            len(self.lr_scheduler_configs),
            self.precision_plugin,
        )

    @property
    def _wrapper(self) -> DistributedDataParallel | None:
        """Return the wrapper; None: nothing is trained now."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self._tells_loss and self._wrapper is not None:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, torch.Tensor | float | int):
                self._wrapper.report_loss(loss)
        return output

    # What is no part of a step

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._begin_interlude()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._begin_interlude()  # A checkpoint is begun with this.
        return super().lightning_module_state_dict()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._interlude.is_on:
            if self._wrapper is not None and self._wrapper.is_tuning:
                self.barrier()  # What one rank validated longer than others is no step's, either.
            self._interlude.end()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._begin_interlude()

    def _begin_interlude(self) -> None:
        if self._wrapper is not None and not self._is_interrupted:
            self._interlude.begin(self._wrapper)

    @property
    def _is_interrupted(self) -> bool:
        """Whether an exception ended it, perhaps on this rank alone: no rank may wait for
        another.
        """
        module = self.lightning_module
        return module is not None and module.trainer.interrupted

    # Checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        kept = self._kept()
        if kept is not None and "optimizer_states" in checkpoint and not self._is_interrupted:
            replica = {name: checkpoint[name] for name in ("state_dict", "optimizer_states")}
            checkpoint[CHECKPOINT_KEY] = kept.collect(replica)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._wrapper is None:
            return
        found = resumed(checkpoint.get(CHECKPOINT_KEY), self._wrapper.algorithm)
        if found is None:
            return
        if found.replica is not None:
            # Wrapping has given all ranks rank 0's weights.
            self.load_model_state_dict(found.replica)
            super().load_optimizer_state_dict(found.replica)
        self._wrapper.algorithm.load_state_dict(found.state)

    def _kept(self) -> Kept | None:
        """The state to save of the training, or of one that has ended."""
        return self._ended if self._wrapper is None else Kept.of(self._wrapper.algorithm)

    def teardown(self) -> None:
        self._interlude.forget()
        if self._wrapper is not None:
            self._ended = self._kept()
        super().teardown()
