"""Decides whether a job is tuned: all ranks must ask for it and be able to. If so, each rank gets
its agent."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.agent import report
from bagua_client.agent.job import Correspondence, name_of, nothing_to_try, tell_left_alone
from bagua_client.agent.several_models import Turn, turns
from bagua_client.agent.switching import Agent
from bagua_client.algorithms import GlobalAlgorithmRegistry
from bagua_client.announcement import announce
from bagua_client.communication.agreement import (
    REFUSAL,
    Group,
    Vote,
    attempt,
    destroy,
    outnumbered,
    rank_in,
    verdict,
)
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import ConfigurationFile
from bagua_client.environment import Choice, Environment
from bagua_client.measuring.rank_measurement import RankMeasurement
from bagua_client.reporter import Handover
from bagua_client.tunable.looks import NotTuned, seen, together
from bagua_client.tunable.tunable import Tunable
from bagua_wire.knobs import KNOBS

logger = logging.getLogger(__name__)

LATE = "not all ranks have BAGUA_AUTOTUNE=1 and a bagua_client wrapper; set both on all ranks"
NO_CONTROL_GROUP = "a rank cannot make the gloo group that a tuning needs; see its log"


def why_not_admitted(group: Group, refusal: str, knobs: Mapping[str, Choice]) -> str:
    """Why a model is not tuned; empty: all of its ranks want it tuned, and can, and understand one
    another.

    They ask by no collective: a rank that is not tuned, or does not know us at all, would not come
    to that.

    Args:
        group: the ranks that train it.
        refusal: why it cannot be tuned on this rank; empty: it can.
        knobs: what the user chose; the ranks make process groups for what is pinned.
    """
    pinned = {knob: each.pinned for knob, each in sorted(knobs.items()) if each.pinned is not None}
    answer = f"{REFUSAL}{refusal}" if refusal else f"format {report.FORMAT}{pinned or ''}"
    speaker, reason = verdict(group, "bagua", answer, _summary, LATE)
    if reason and speaker == rank_in(group):
        logger.warning("autotune is off: %s", reason)
    return reason


def _summary(answers: list[str]) -> str:
    formats = [answer.partition("{")[0] for answer in answers]
    if others := outnumbered(formats):
        return (
            f"rank {others} has another release of bagua-autotune than the other ranks; install "
            "the same release on all ranks"
        )
    if others := outnumbered(answers):
        return (
            f"BAGUA_AUTOTUNE_KNOBS pins other values on rank {others} than on the other ranks; set "
            "the same value on all ranks"
        )
    return ""


def control_group(communicator: Communicator) -> Group:
    """A gloo group for the agents' messages; None: there is but one rank. Some clusters give gloo
    no usable interface. The ranks vote on their own group before and after, which works; each waits
    for the others only as long as connecting may take.

    Raises:
        NotTuned: a rank cannot have it.
    """
    if communicator.world_size == 1:
        return None
    if not _agreed(communicator, _device_error()):
        raise NotTuned(NO_CONTROL_GROUP)
    group: Group = None
    error = ""
    try:
        group = communicator.new_gloo_group([range(communicator.world_size)])
    except Exception as failure:
        error = str(failure)
    if _agreed(communicator, error) and group is not None:
        return group
    destroy(group)
    raise NotTuned(NO_CONTROL_GROUP)


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
            "rank %d cannot make a gloo group, which the tuning needs: %s. Set "
            "GLOO_SOCKET_IFNAME to the network interface that connects the ranks",
            communicator.rank,
            error.splitlines()[0],
        )
    failed = [str(rank) for rank, vote in enumerate(votes) if not vote]
    if failed and communicator.rank == 0:
        logger.warning(
            "autotune is off: rank %s cannot make a gloo group; training goes on untuned",
            ", ".join(failed),
        )
    return not failed


_models: Counter[tuple[int, ...]] = Counter()
"""Number of models that this process trains, or has trained, with the same ranks."""


def start_agent(
    tunable: Tunable,
    optimizers: Iterable[torch.optim.Optimizer],
    environment: Environment,
    model: str,
    file: ConfigurationFile | None = None,
) -> Agent:
    """The agent of the next model that this process wraps. All ranks must call it together.

    Args:
        model: its name.
        file: what the tuning tries first.

    Raises:
        NotTuned: the ranks cannot talk, or one of them cannot make its agent; or there is but one
            rank, and nothing to try on it.
    """
    communicator = tunable.communicator
    voters = communicator.group, communicator.device
    ranks = communicator.global_ranks
    if reason := seen(lambda: nothing_to_try(tunable, environment.allowed), ""):
        announce(logger, "autotune is off: %s", reason)
        raise NotTuned(reason)

    def offer() -> tuple[str, Handover, list[str]]:
        name = name_of(environment, model, ranks, _models[ranks] + 1, communicator.job_ranks)
        handover = Handover(name, communicator, environment)
        handover.offer()
        reasons = tunable.offer.reasons()
        tunable.offer.values(environment.allowed)  # Needed once the job is described.
        return name, handover, [*reasons, *_not_for(tunable, environment.allowed)]

    name, handover, left_alone = together(offer, lambda _: None, *voters)
    group = control_group(communicator)
    _models[ranks] += 1
    tell_left_alone(tunable, left_alone)
    _pin(tunable, environment.knobs)

    def make() -> Agent:
        measurement = RankMeasurement(tunable, optimizers, records=communicator.rank == 0)
        turn = Turn(name, turns)
        service = Correspondence(tunable, measurement, environment, name, handover, turn, file)
        return Agent(tunable, group, measurement, service, environment)

    try:
        return together(make, Agent.abandon, *voters)
    except NotTuned:
        tunable.detach()
        destroy(group)
        raise


def _pin(tunable: Tunable, knobs: Mapping[str, Choice]) -> None:
    """Make the job begin with the values that BAGUA_AUTOTUNE_KNOBS pins, and be compared with that;
    one that cannot be had is told and left out. All ranks together, before the first step."""
    communicator = tunable.communicator
    for knob, choice in knobs.items():
        if choice.pinned is None:
            continue
        pinned: dict[str, Any] = {knob: choice.pinned}
        try:
            look = partial(_check_pinned, tunable, knob, choice.pinned)
            failed, why = attempt(look, communicator.group, communicator.device)
            if failed:
                reason = why.partition(": ")[2].partition("\n")[0]
                raise ValueError(reason or f"rank {failed} cannot have it")
            tunable.start_from(replace(tunable.default, **pinned))
        except (RuntimeError, ValueError) as error:
            if communicator.rank == 0:
                logger.warning(
                    "BAGUA_AUTOTUNE_KNOBS: %s stays at its default, as %s is not possible here: %s",
                    *(knob, choice.pinned, error),
                )


def _check_pinned(tunable: Tunable, knob: str, value: Any) -> None:
    """Raise ValueError if this rank's model cannot have that value."""
    possible = tunable.offer.values().get(knob, [getattr(tunable.default, knob)])
    if value not in possible and not KNOBS[knob].kind.is_open:
        raise ValueError(f"this job can have {', '.join(map(str, possible))}")
    pinned: dict[str, Any] = {knob: value}
    tunable.plan(replace(tunable.default, **pinned))


def _not_for(tunable: Tunable, allowed: Set[str]) -> list[str]:
    """The algorithms that the user lists and that cannot be imported, or are for other models, a
    sentence each."""
    found = []
    for name in sorted(allowed & {*GlobalAlgorithmRegistry.available_algorithms()}):
        try:
            kinds = GlobalAlgorithmRegistry.models(name)
        except KeyError as error:
            found.append(error.args[0])
            continue
        if tunable.offer.kind not in kinds:
            found.append(f"algorithm {name}: it is for {' and '.join(kinds)} models")
    return found
