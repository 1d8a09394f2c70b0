"""BAGUA_CONFIGURATION: a training with what an earlier one was left with, without any service."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.communication.agreement import Vote
from bagua_client.communication.verdict import REFUSAL, outnumbered, verdict
from bagua_client.configuration_file import ConfigurationFile
from bagua_client.layout import Layout
from bagua_client.reducer.offer import refusal_of
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private.reducer import caps_of
from bagua_client.tunable.reconfiguration import Reconfiguration, prepared

logger = logging.getLogger(__name__)

LATE = "not all ranks have it set and a bagua_client wrapper; set both on all ranks"


def agreed_file(ddp: DistributedDataParallel, path: str) -> ConfigurationFile | None:
    """Return what all ranks of ``ddp`` read; None, on all of them and with a line that says why,
    where they cannot, or read different things.

    They ask by no collective: a rank where it is not set would not come to that.
    """
    if dist.get_world_size(ddp.process_group) == 1:
        return None  # A single rank communicates nothing.
    found: ConfigurationFile | None = None
    rank = dist.get_rank(ddp.process_group)
    try:
        found = ConfigurationFile.read(path)
        obstacle = refusal_of(ddp, caps_of(ddp))
        answer = f"{REFUSAL}{obstacle}" if obstacle else found.digest
    except ValueError as error:
        answer = f"{REFUSAL}on rank {rank} {error}"
    speaker, reason = verdict(ddp.process_group, "bagua-configuration", answer, _judge, LATE)
    if reason and speaker == rank:
        _refuse(reason)
    return None if reason else found


def _judge(answers: list[str]) -> str:
    others = ", ".join(map(str, outnumbered(answers)))
    return f"the file on rank {others} differs from that on the other ranks" if others else ""


def _refuse(reason: str) -> None:
    logger.warning("BAGUA_CONFIGURATION is not used; training begins with the default: %s", reason)


def train_with(tunable: TunableReducer, file: ConfigurationFile) -> bool:
    """Train the model with it from the first step on; explicit buckets from the third or
    so, when the order that they count in is known. All ranks together.

    Returns:
        Whether all of them can; else a line says why, and nothing has changed.
    """
    asked = file.configuration
    reason = _obstacle(tunable, file)
    communicator = tunable.communicator
    votes = Vote(0 if reason else 1, communicator.group, communicator.device).values()
    if 0 in votes:
        if communicator.rank == votes.index(0):
            _refuse(reason)
        return False
    begin = tunable.plan(replace(asked, buckets=()))
    if reason := prepared(tunable, begin, communicator.group, communicator.device):
        if communicator.rank == 0:
            _refuse(reason)
        return False
    if communicator.rank == 0:
        _announce(tunable, file)
    tunable.change(begin)
    if asked.buckets:
        tunable.after_reduction = lambda: _cut_lists(tunable, file, begin)
        tunable.attach()
    return True


def _obstacle(tunable: TunableReducer, file: ConfigurationFile) -> str:
    """Why this rank cannot train with it; empty: it can."""
    if known := tunable.refusal or file.obstacle(tunable.tensors):
        return known
    asked, offer, communicator = file.configuration, tunable.offer, tunable.communicator
    ways = offer.values(communicator)["hierarchical"]
    if asked.hierarchical not in ways:
        nodes = ", ".join(map(str, communicator.topology.ranks_per_node))
        return (
            f"hierarchical {asked.hierarchical} is not possible here, only "
            f"{', '.join(map(str, ways))} (ranks per node: {nodes})"
        )
    try:
        communicator.check(asked)
        offer.caps(tunable.plan(replace(asked, buckets=())))
        if asked.buckets and not offer.has_explicit_buckets:
            return offer.reasons(communicator)[-1]
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _announce(tunable: TunableReducer, file: ConfigurationFile) -> None:
    from bagua_client.agent.job import device_name
    from bagua_client.announcement import announce

    origin = f"{file.name}, of job {job}" if (job := file.document.get("job")) else file.name
    announce(logger, "BAGUA_CONFIGURATION: %s (%s)", file.configuration, origin)
    communicator = tunable.communicator
    now = {
        "ranks per node": list(communicator.topology.ranks_per_node),
        "backend": str(dist.get_backend(communicator.group)),
        "device": device_name(communicator.device),
    }
    if found := "; ".join(file.differences(now)):
        announce(
            logger, "BAGUA_CONFIGURATION: this configuration may not be the fastest here: %s", found
        )


def _cut_lists(tunable: TunableReducer, file: ConfigurationFile, begin: Layout) -> None:
    """A step's communication has ended, on all ranks, which began with that layout."""
    if not tunable.order_is_agreed:
        return
    tunable.detach()
    if tunable.layout_to_come.configuration != begin.configuration:
        return  # The user has set another one since.
    communicator = tunable.communicator
    is_in_order = file.is_in_order([tunable.tensors[index] for index in tunable.order])
    if communicator.rank == 0 and not is_in_order:
        logger.warning(
            "BAGUA_CONFIGURATION: gradients become ready in another order than when %s was made, "
            "so its buckets now hold other tensors",
            file.name,
        )
    change = Reconfiguration(tunable, file.configuration, communicator.group, communicator.device)
    tunable.schedule(change.conclude())
