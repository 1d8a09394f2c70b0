"""What every model that can be tuned offers to whoever trains it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from bagua_client.configuration import Configuration
from bagua_client.tunable.looks import a_look, seen
from bagua_client.tunable.reconfiguration import Reconfiguration
from bagua_client.tunable.tunable import Tunable
from bagua_client.tuning import Tuning

if TYPE_CHECKING:
    from bagua_client.agent import Agent

WHILE_TUNED = (
    "the job is being tuned, and a configuration set by hand would be mistaken for the trial under "
    "way; wait until is_tuning is False, or train with BAGUA_AUTOTUNE=0"
)


class TunedModel:
    """The part of a model's interface that is about its tuning."""

    _tunable: Tunable | None = None
    # Not by an annotation: some libraries read those of a model's class and of all of its bases.
    _agent = cast("Agent | None", None)
    _not_tuned = "BAGUA_AUTOTUNE=1 is not set"

    @property
    def configuration(self) -> Configuration:
        """The configuration in force, or the one that will be from the next step on."""
        if self._tunable is not None:
            return self._tunable.layout_to_come.configuration
        return seen(self._given_configuration, Configuration())

    def _given_configuration(self) -> Configuration:
        """The one that the model has where nothing has been changed."""
        return Configuration()

    def _made(self) -> Tunable:
        """What is tuned; made, on all ranks together, when it is needed first."""
        raise RuntimeError(f"the model's settings cannot be changed: {self._not_tuned}")

    @property
    def _tuned_rank(self) -> int:
        """This process's rank among those that train the model."""
        return dist.get_rank() if self._tunable is None else self._tunable.communicator.rank

    @property
    def is_tuning(self) -> bool:
        """Whether the model is being tuned; changes on all ranks in the same step."""
        return self._agent is not None and self._agent.is_active

    @property
    def tuning(self) -> Tuning:
        """A snapshot of the tuning: its state, the best configuration, the speed-up with its
        interval, the cost."""
        if self._agent is not None:
            return self._agent.outcome.tuning
        tunable, now = self._tunable, self.configuration
        return Tuning(
            state="off",
            reason=self._not_tuned,
            summary=self._not_tuned,
            configuration=now,
            default=now if tunable is None else tunable.default,
            rank=self._tuned_rank,
        )

    def report_loss(self, loss: torch.Tensor | float) -> None:
        """Report the loss of this rank's batch: once in every step, from the first step on.

        A trial that changes the numbers fails if its losses are worse than before by more than 5 %
        and by more than chance. The call does not wait for the GPU. Without tuning it does nothing.

        Raises:
            TypeError: neither a tensor nor a number.
        """
        if self._agent is not None:
            self._agent.report_loss(loss)

    def report_complexity(self, complexity: torch.Tensor | float) -> None:
        """Report how much is in this rank's batch, such as its number of tokens, before its
        backward pass: on all ranks, in every step, from the first step on.

        Trials are then compared as if their batches were alike, if the complexity explains the step
        times. Those of several batches in a step add up. Without tuning it does nothing.

        Raises:
            TypeError: neither a number nor a tensor of one on the CPU.
        """
        if self._agent is not None:
            self._agent.measurement.tell_complexity(complexity)

    def unmeasured(self) -> AbstractContextManager[None]:
        """A context for what is not part of a step, such as a validation or writing a checkpoint.

        The tuning leaves out the time from the optimizers' last step to the end of the context. All
        ranks enter it after the same step, before the next training pass. Without tuning it does
        nothing. It is useful where such things are frequent: a few longer steps do not change a
        median.
        """
        return nullcontext() if self._agent is None else self._agent.measurement.unmeasured()

    def reconfigure(self, configuration: Configuration) -> bool:
        """Change the settings. All ranks must call it in the same place.

        They are in force from the next forward pass for training on; there must have been one
        before. The units of a sharded model are merged only once two more steps have shown the
        order in which they are used. The sizes of an engine of DeepSpeed change at once, or where
        a step has begun, at its end.

        Returns:
            Whether all ranks agreed and can have them; if not, the log has the reason, and all
            return to the default configuration.

        Raises:
            RuntimeError: the job is being tuned; or the model cannot be tuned, or not yet.
        """
        if self.is_tuning:
            raise RuntimeError(WHILE_TUNED)
        tunable = self._made()
        communicator = tunable.communicator
        change = Reconfiguration(tunable, configuration, communicator.group, communicator.device)
        return tunable.change(change.conclude()) and change.agreed


@a_look
def become(model: object, ours: type[TunedModel], **names: Any) -> str:
    """Make a model one of ``ours``, too, in place, with these names in its class. Answers why it
    cannot be one; empty: it is."""
    kind = type(model)
    names_of_ours = [name for name in vars(TunedModel) if not name.startswith("__")]
    theirs = [name for name in names_of_ours if hasattr(model, name)]
    if theirs and not isinstance(model, TunedModel):
        return f"the model has a {theirs[0]!r} of its own, which ours would hide"
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **names}
    if kind.__new__ is not object.__new__:
        # Torch's counts classes from the front to find the one that a slice of a container is of.
        named["__new__"] = lambda _, *args, **kwargs: kind.__new__(kind, *args, **kwargs)
    model.__class__ = type(kind.__name__, (ours, kind), named)
    return ""
