"""A change of configuration: every rank plans it, all vote, then all run it or none does."""

from __future__ import annotations

import logging

import torch

from bagua_client.communication.agreement import Group, Vote, attempt
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout
from bagua_client.torch_private import groups as torch_groups
from bagua_client.tunable.memory import Footprint, fullest, why_not_tried
from bagua_client.tunable.tunable import Tunable

logger = logging.getLogger(__name__)

CANNOT = 0
"""The vote of a rank that cannot carry the configuration out."""
TOO_LARGE = 1
"""The vote of a rank in whose memory it would not fit."""


class Reconfiguration:
    """One change of configuration. Making it starts the vote, so all ranks must do so together.

    Args:
        tunable: the model to re-cut.
        configuration: what this rank was told to run; None: it could not read what it was told.
        group: the process group to vote in; it has the same ranks as the reducer's.
        device: a device that ``group`` communicates from.
    """

    def __init__(
        self,
        tunable: Tunable,
        configuration: Configuration | None,
        group: Group,
        device: torch.device,
    ) -> None:
        self._tunable = tunable
        self._configuration = configuration
        self._layout = None if configuration is None else _planned(tunable, configuration)
        self._voters = group, device
        self._misfit = self._misfit_here()
        vote = CANNOT if self._layout is None else self._layout.digest
        self._vote = Vote(TOO_LARGE if self._misfit is not None else vote, group, device)
        self.misfit: Footprint | None = None
        """What it would take on the fullest of the ranks where it does not fit; None: it fits."""
        self.dissenters: list[int] = []
        self.agreed = False
        self.reason = ""
        """Why the ranks did not agree, for the log and the service."""

    def conclude(self) -> Layout:
        """Wait for the votes, and make the process groups that are missing. All ranks call this
        together.

        Returns:
            The layout that all ranks run from now on: the one voted on if all ranks agree on it
            and can carry it out, else the default's, or what is in force if the groups of
            the default are gone and cannot be made. :attr:`dissenters` lists the ranks that
            disagreed.

        Raises:
            RuntimeError: these ranks cannot have such groups; raised on all ranks.
        """
        self.dissenters = self._vote.dissenters()
        if self._is_too_large():
            self.dissenters = []
            self.reason = self._compare_misfits()
            if self._tunable.communicator.rank == 0:
                logger.info("autotune does not try %s: %s", self._configuration, self.reason)
            return way_back(self._tunable, *self._voters)
        if self._layout is not None and not self.dissenters:
            self.reason = prepared(self._tunable, self._layout, *self._voters)
            self.agreed = not self.reason
            if self.agreed:
                return self._layout
        else:
            self.reason = self._disagreement()
        if self._tunable.communicator.rank == 0:
            logger.error(
                "%s: all ranks return to the default (%s)", self.reason, self._tunable.default
            )
        return way_back(self._tunable, *self._voters)

    def _misfit_here(self) -> Footprint | None:
        """What it would take of this rank's memory, if that is too much. The way back is always
        open."""
        memory, layout = self._tunable.memory, self._layout
        if memory is None or layout is None or layout.configuration == self._tunable.default:
            return None
        return self._tunable.observers.call(memory.misfit, layout)

    def _is_too_large(self) -> bool:
        """Whether all ranks could run it but for their memory, which does not suffice on some."""
        votes = set(self._vote.values())
        return TOO_LARGE in votes and CANNOT not in votes and len(votes) <= 2

    def _compare_misfits(self) -> str:
        """Say in words why it does not fit. All ranks call this together."""
        own = self._misfit or Footprint()
        votes = [Vote(size, *self._voters) for size in own[:3]]
        by_rank = [Footprint(*found) for found in zip(*(v.values() for v in votes), strict=True)]
        _, self.misfit = fullest(by_rank)
        return why_not_tried(by_rank)

    def _disagreement(self) -> str:
        if not self.dissenters:
            return f"no rank can carry out the configuration {self._configuration}"
        ranks = ", ".join(str(rank) for rank in self.dissenters)
        plural = "ranks" if len(self.dissenters) > 1 else "rank"
        return f"{plural} {ranks} disagreed with the others on the buckets to cut"


def prepared(tunable: Tunable, layout: Layout, group: Group, device: torch.device) -> str:
    """Make the process groups of a layout that all ranks have agreed on. All ranks call this
    together, while no bucket is on its way, and vote on the outcome.

    Returns:
        Why a rank could not; then no rank has any of them. Empty: all could.

    Raises:
        RuntimeError: these ranks cannot have such groups; raised on all ranks.
    """
    communicator = tunable.communicator
    communicator.check(layout.configuration)

    ranks, error = attempt(lambda: tunable.prepare(layout), group, device)
    if not ranks:
        return ""
    if error:
        logger.error(
            "rank %d cannot make the process groups of %s: %s",
            *(communicator.rank, layout.configuration, error),
        )
    communicator.release(tunable.layout.configuration)
    # A rank that could not has counted fewer: the next group would have another name there.
    torch_groups.count_from(max(Vote(torch_groups.counted(), group, device).values()))
    return f"rank {ranks} cannot make the process groups of {layout.configuration}"


def way_back(tunable: Tunable, group: Group, device: torch.device) -> Layout:
    """The default's layout with its process groups made; the one in force where they are gone and
    cannot be made, or a rank cannot plan it. All ranks call this together."""
    planned: list[Layout] = []
    ranks, _ = attempt(lambda: planned.append(tunable.plan(tunable.default)), group, device)
    reason = f"rank {ranks} cannot plan the default" if ranks else ""
    if not (reason := reason or prepared(tunable, planned[0], group, device)):
        return planned[0]
    if tunable.communicator.rank == 0:
        logger.error("%s: all ranks keep %s", reason, tunable.layout.configuration)
    return tunable.layout


def _planned(tunable: Tunable, configuration: Configuration) -> Layout | None:
    """The layout of ``configuration``; None, with a warning, if it does not fit the model. It does
    not raise: other ranks may have been told another configuration and wait for this rank's vote.
    """
    try:
        return tunable.plan(configuration)
    except Exception as error:  # A ValueError, where the plan itself has no fault.
        rank = tunable.communicator.rank
        logger.warning("rank %d cannot carry out %s: %s", rank, configuration, error)
        return None
