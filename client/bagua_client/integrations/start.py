"""Where a model begins to train: whether it is tuned, trains with a configuration that was given,
or is measured by ``bagua-autotune check``; the same for all kinds of models.

All ranks come here together. What they see of the model first is told in the answers that they give
one another, so that an error in that is a reason like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.configuration_file import ConfigurationFile
from bagua_client.environment import Environment
from bagua_client.integrations.given_configuration import agreed_file, train_with
from bagua_client.integrations.tuned_model import TunedModel
from bagua_client.result_line import write_result_line
from bagua_client.tunable.looks import NotTuned
from bagua_client.tunable.tunable import Changeable


@dataclass(frozen=True)
class Start:
    """What the beginning needs of one model.

    Attributes:
        name: of its class.
        group: the ranks that train it.
        refusal: answers why no setting of it can be changed; empty: some can. Never raises.
        tunable: makes what is tuned, or gives what was made; on all ranks together. Raises NotTuned
            on all of them where one cannot.
        optimizers: that are known to be the model's.
        unchecked: why it cannot be measured where its settings could be changed; empty: it can.
        wrapper: that replicates it, if one does.
    """

    name: str
    group: dist.ProcessGroup
    refusal: Callable[[], str]
    tunable: Callable[[], Changeable]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    unchecked: str = ""
    wrapper: DistributedDataParallel | None = None

    def begin(self, model: object, environment: Environment) -> None:
        """Begin with what the environment asks for; nothing is looked at where that is nothing.

        Args:
            model: its class is ours, unless that is what it is refused for.
        """
        if not environment.asks:
            return
        file = agreed_file(self.group, environment, self.refusal)
        is_tuned = environment.autotune and self._tune(model, environment, file)
        if file is not None and not is_tuned:
            with suppress(NotTuned):
                train_with(self.tunable(), file)
        if environment.check is not None:
            from bagua_client.checking import check

            refusal = self.refusal() or self.unchecked
            check.begin(
                *(self.group, refusal, self.tunable),
                *(self.optimizers, environment.check, self.wrapper),
            )

    def _tune(
        self, model: object, environment: Environment, file: ConfigurationFile | None
    ) -> bool:
        """Have it tuned; whether it is."""
        # Without autotuning not even the agent's code is loaded.
        from bagua_client.agent import start_agent, why_not_admitted

        # By no collective: a rank that is not to be tuned would not come to one.
        reason = why_not_admitted(self.group, self.refusal(), environment.knobs)
        if not isinstance(model, TunedModel):
            return False
        try:
            if not reason:
                tunable, known = self.tunable(), self.optimizers
                model._agent = start_agent(tunable, known, environment, self.name, file)
                # At the end of the process the reporter itself says goodbye, and waits a moment.
                weakref.finalize(model, model._agent.close).atexit = False
                return True
        except NotTuned as refusal:
            reason = str(refusal)
        model._not_tuned = reason
        if environment.result is not None and model.tuning.rank == 0:
            write_result_line(environment.result, model.tuning)
        return False
