"""Where a model begins to train: whether it is tuned, trains with a configuration that was given
(BAGUA_CONFIGURATION, without any service), or is measured by ``bagua-autotune check``.

All ranks begin together. What they see of the model first is told in the answers that they give one
another, so that an error in that is a reason like any other.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from bagua_client.communication.agreement import (
    REFUSAL,
    UNSET,
    Group,
    Vote,
    agreed,
    rank_in,
    refuse,
)
from bagua_client.configuration import ConfigurationFile
from bagua_client.environment import Environment
from bagua_client.integrations.tuned_model import TunedModel
from bagua_client.layout import Layout
from bagua_client.tunable.looks import NotTuned, a_look
from bagua_client.tunable.reconfiguration import Reconfiguration, prepared
from bagua_client.tunable.tunable import Nobody, Tunable
from bagua_client.tuning import write_result_line

logger = logging.getLogger(__name__)

VARIABLE = "BAGUA_CONFIGURATION"


def agreed_file(
    group: Group, environment: Environment, refusal: Callable[[], str]
) -> ConfigurationFile | None:
    """Return what all ranks of ``group`` read; None, on all of them and with a line that says why,
    where they cannot, or read different things. See :func:`agreed`.

    Args:
        refusal: why no setting of the model can be changed; empty: some can.
    """
    if not environment.asks:
        return None
    found: ConfigurationFile | None = None
    answer = UNSET
    if environment.configuration is not None:
        refused = refusal()
        try:
            found = ConfigurationFile.read(environment.configuration)
            answer = f"{REFUSAL}{refused}" if refused else found.digest
        except ValueError as error:
            answer = f"{REFUSAL}on rank {rank_in(group)} {error}"
    differs = "the file on rank {} differs from that on the other ranks"
    return found if agreed(group, VARIABLE, answer, differs) else None


def train_with(tunable: Tunable, file: ConfigurationFile) -> bool:
    """Train the model with it from the next step on; what needs the order in which gradients become
    ready (explicit buckets, merged units) from the third or so, when that is known. All ranks
    together.

    Returns:
        Whether all of them can; else a line says why, and nothing has changed.
    """
    asked = file.configuration
    reason = _obstacle(tunable, file)
    communicator = tunable.communicator
    votes = Vote(0 if reason else 1, communicator.group, communicator.device).values()
    if 0 in votes:
        if communicator.rank == votes.index(0):
            refuse(VARIABLE, reason)
        return False
    begin = tunable.plan(tunable.offer.at_first(asked))
    if reason := prepared(tunable, begin, communicator.group, communicator.device):
        if communicator.rank == 0:
            refuse(VARIABLE, reason)
        return False
    if communicator.rank == 0:
        _announce(tunable, file)
    tunable.change(begin)
    if begin.configuration != asked:
        tunable.report_to(_GoingOn(tunable, file, begin))
        tunable.attach()
    return True


@a_look
def _obstacle(tunable: Tunable, file: ConfigurationFile) -> str:
    """Why this rank cannot train with it; empty: it can."""
    if known := tunable.refusal or file.obstacle(tunable.tensors):
        return known
    asked, offer, communicator = file.configuration, tunable.offer, tunable.communicator
    ways = offer.values().get("hierarchical", (asked.hierarchical,))
    if asked.hierarchical not in ways:
        nodes = ", ".join(map(str, communicator.topology.ranks_per_node))
        return (
            f"hierarchical {asked.hierarchical} is not possible here, only "
            f"{', '.join(map(str, ways))} (ranks per node: {nodes})"
        )
    try:
        communicator.check(asked)
        tunable.plan(offer.at_first(asked))
        if asked.buckets:
            return offer.table()["buckets"].left_alone
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _announce(tunable: Tunable, file: ConfigurationFile) -> None:
    from bagua_client.agent.job import device_name
    from bagua_client.announcement import announce

    origin = f"{file.name}, of job {job}" if (job := file.document.get("job")) else file.name
    announce(logger, "BAGUA_CONFIGURATION: %s (%s)", file.configuration, origin)
    communicator = tunable.communicator
    now = {
        "ranks per node": list(communicator.topology.ranks_per_node),
        "backend": communicator.backend,
        "device": device_name(communicator.device),
    }
    if found := "; ".join(file.differences(now)):
        announce(
            logger, "BAGUA_CONFIGURATION: this configuration may not be the fastest here: %s", found
        )


class _GoingOn(Nobody):
    """Puts in force what needs the order, once that is known.

    Args:
        begin: what all ranks have begun with.
    """

    def __init__(self, tunable: Tunable, file: ConfigurationFile, begin: Layout) -> None:
        self._tunable, self._file, self._begin = tunable, file, begin

    def reduced(self) -> None:
        """See :meth:`Listener.reduced`."""
        tunable, file = self._tunable, self._file
        if not tunable.order_is_agreed:
            return
        tunable.detach()
        if tunable.layout_to_come.configuration != self._begin.configuration:
            return  # The user has set another one since.
        communicator, asked = tunable.communicator, file.configuration
        is_in_order = file.is_in_order([tunable.tensors[index] for index in tunable.order])
        if communicator.rank == 0 and asked.buckets and not is_in_order:
            logger.warning(
                "BAGUA_CONFIGURATION: gradients become ready in another order than when %s was "
                "made, so its buckets now hold other tensors",
                file.name,
            )
        change = Reconfiguration(tunable, asked, communicator.group, communicator.device)
        tunable.schedule(change.conclude())


@dataclass(frozen=True)
class Beginning:
    """What the beginning needs of one model.

    Attributes:
        name: of its class.
        group: the ranks that train it; None: this process alone.
        refusal: answers why no setting of it can be changed; empty: some can. Never raises.
        tunable: makes what is tuned, or gives what was made; on all ranks together. Raises NotTuned
            on all of them where one cannot.
        optimizers: that are known to be the model's.
        unchecked: why it cannot be measured where its settings could be changed; empty: it can.
        wrapper: that replicates it, if one does.
        has_begun: whether any model of this process has.
    """

    has_begun: ClassVar[bool] = False
    name: str
    group: Group
    refusal: Callable[[], str]
    tunable: Callable[[], Tunable]
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
        Beginning.has_begun = True
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
