"""A change of configuration: every rank plans it, all vote, then all run it or none does."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from bagua_client.communication.agreement import Vote
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout
from bagua_client.reducer.tunable import Tunable

logger = logging.getLogger(__name__)

CANNOT = 0
"""The vote of a rank that cannot carry the configuration out."""


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
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._tunable = tunable
        self._configuration = configuration
        self._layout = None if configuration is None else _planned(tunable, configuration)
        self._vote = Vote(CANNOT if self._layout is None else self._layout.digest, group, device)
        self.dissenters: list[int] = []
        self.agreed = False

    def conclude(self) -> Layout:
        """Wait for the votes.

        Returns:
            The layout that all ranks run from now on: the one voted on if all ranks agree on it
            and can carry it out, else the baseline's. :attr:`dissenters` lists the ranks that
            disagreed.
        """
        self.dissenters = self._vote.dissenters()
        if self._layout is not None and not self.dissenters:
            self.agreed = True
            return self._layout
        baseline = self._tunable.plan(self._tunable.default)
        if self._tunable.communicator.rank == 0:
            logger.error(
                "%s: all ranks return to the default (%s)", self.reason, self._tunable.default
            )
        return baseline

    @property
    def reason(self) -> str:
        """Why the ranks did not agree, for the log and the service."""
        if not self.dissenters:
            return f"no rank can carry out the configuration {self._configuration}"
        ranks = ", ".join(str(rank) for rank in self.dissenters)
        plural = "ranks" if len(self.dissenters) > 1 else "rank"
        return f"{plural} {ranks} disagreed with the others on the buckets to cut"


def _planned(tunable: Tunable, configuration: Configuration) -> Layout | None:
    """The layout of ``configuration``; None, with a warning, if it does not fit the model. It does
    not raise: other ranks may have been told another configuration and wait for this rank's vote.
    """
    try:
        return tunable.plan(configuration)
    except ValueError as error:
        rank = tunable.communicator.rank
        logger.warning("rank %d cannot carry out %s: %s", rank, configuration, error)
        return None
