"""Whether a job is tuned: all of its ranks must want to and be able to, before any collective. If
so, each gets its agent."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.agent import report
from bagua_client.agent.agent import Agent
from bagua_client.agent.handover import Handover
from bagua_client.agent.job import name_of
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.environment import Environment
from bagua_client.reducer.offer import refusal_of
from bagua_client.reducer.tunable import Tunable
from bagua_client.torch_private import groups as torch_groups
from bagua_client.torch_private import reducer as torchs

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""A rank that has not asked to be tuned by then is not going to."""
CONNECT_SECONDS = 30.0
"""For the ranks' control group to be made, once a rank is known to be able to."""


def is_admitted(ddp: DistributedDataParallel) -> bool:
    """Whether all ranks of ``ddp`` want it tuned, and can, and understand one another.

    The ranks ask over the store that they met over and not by a collective: one that is not
    tuned, or does not know us at all, would not come to that. The first verdict that is written
    stands for all, so that nobody is late.
    """
    group = ddp.process_group
    world_size = dist.get_world_size(group)
    if world_size == 1:
        logger.info("autotune is off: a single rank communicates nothing")
        return False
    store = torch_groups.store()
    if store is None:
        logger.warning("autotune is off: the ranks have no store to ask one another over")
        return False
    refusal = refusal_of(ddp, torchs.caps_of(ddp))
    answer = f"no: {refusal}" if refusal else f"format {report.FORMAT}"
    rank = dist.get_rank(group)
    speaker, reason = _verdict(store, f"bagua/{group.group_name}", rank, world_size, answer)
    if reason and speaker == rank:
        logger.warning("autotune is off: %s", reason)
    return not reason


def _verdict(
    store: torch_groups.Store, name: str, rank: int, world_size: int, answer: str
) -> tuple[int, str]:
    """The same on all ranks: who found it, and why the job is not tuned (empty: it is)."""
    # Counted by each rank for itself: ranks that wrapped as many models speak of the same one.
    model = store.add(f"{name}/models of {rank}", 1)
    key = f"{name}/{model}"
    store.set(f"{key}/{rank}", answer)
    if store.add(f"{key}/answers", 1) == world_size:
        answers = [store.get(f"{key}/{other}").decode() for other in range(world_size)]
        store.compare_set(f"{key}/verdict", "", json.dumps([rank, _summary(answers)]))
    try:
        store.wait([f"{key}/verdict"], timedelta(seconds=ANSWER_SECONDS))
    except RuntimeError:
        late = "BAGUA_AUTOTUNE is set on some ranks only, or some have no wrapper of ours"
        store.compare_set(f"{key}/verdict", "", json.dumps([rank, f"{late}; set it on all"]))
    speaker, reason = json.loads(store.get(f"{key}/verdict"))
    return int(speaker), str(reason)


def _summary(answers: list[str]) -> str:
    refusals = [answer.removeprefix("no: ") for answer in answers if answer.startswith("no: ")]
    if refusals:
        return refusals[0]
    usual = max(answers, key=answers.count)
    others = [str(rank) for rank, answer in enumerate(answers) if answer != usual]
    if others:
        return (
            f"the release of bagua-client on rank {', '.join(others)} is not that of the other "
            "ranks, and they would not understand one another; install the same on all"
        )
    return ""


def control_group(communicator: Communicator) -> dist.ProcessGroup | None:
    """A gloo group for the agents' messages; None, on all ranks, where one cannot have it.

    Some clusters give gloo no usable interface. The ranks vote on their own group before and
    after, which works; each waits for the others only as long as connecting may take.
    """
    if not _agreed(communicator, _device_error()):
        return None
    group: dist.ProcessGroup | None = None
    error = ""
    try:
        group = communicator.new_group(
            [range(communicator.world_size)], "gloo", timedelta(seconds=CONNECT_SECONDS)
        )
    except Exception as failure:
        error = str(failure)
    if _agreed(communicator, error) and group is not None:
        usual = torch_groups.timeout_of(communicator.group, communicator.device)
        torch_groups.set_timeout(group, usual or torch_groups.DEFAULT_TIMEOUT)
        return group
    if group is not None:
        dist.destroy_process_group(group)
    return None


def _device_error() -> str:
    """Why gloo cannot listen on this rank, without asking the others; empty: it can."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        for interface in interfaces.split(","):
            if interface:
                dist.ProcessGroupGloo.create_device(interface=interface)
        if not interfaces:
            dist.ProcessGroupGloo.create_default_device()
    except Exception as failure:
        return str(failure)
    return ""


def _agreed(communicator: Communicator, error: str) -> bool:
    votes = Vote(0 if error else 1, communicator.group, communicator.device).values()
    if error:
        logger.warning(
            "rank %d cannot make a gloo group for the tuning (GLOO_SOCKET_IFNAME names the "
            "network interface that it should use): %s",
            communicator.rank,
            error.splitlines()[0],
        )
    failed = [str(rank) for rank, vote in enumerate(votes) if not vote]
    if failed and communicator.rank == 0:
        logger.warning(
            "autotune is off: rank %s cannot make a gloo group; training goes on without",
            ", ".join(failed),
        )
    return not failed


_agents: list[weakref.ref[Agent]] = []
"""Of the models that this process wrapped, in that order."""


def start_agent(
    tunable: Tunable,
    optimizers: Iterable[torch.optim.Optimizer],
    environment: Environment,
    model: str,
) -> Agent | None:
    """The agent of the next model that this process wraps; None, on all ranks, if they cannot
    talk. All ranks must call it together."""
    name = name_of(environment, model, len(_agents) + 1)
    handover = Handover(name, tunable.communicator, environment)
    handover.offer()
    group = control_group(tunable.communicator)
    if group is None:
        return None
    if tunable.communicator.rank == 0:
        for reason in tunable.offer.reasons(tunable.communicator):
            logger.info("autotune leaves some settings alone: %s", reason)
    agent = Agent(tunable, group, optimizers, environment, name, handover, _agents)
    _agents.append(weakref.ref(agent))
    return agent
