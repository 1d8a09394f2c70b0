"""A variable by which a model begins otherwise than torch's: all ranks have it alike, or none uses
it."""

from __future__ import annotations

import logging

from bagua_client.communication.agreement import Group, rank_in
from bagua_client.communication.verdict import named, outnumbered, verdict

logger = logging.getLogger(__name__)

UNSET = ""
"""The answer of a rank where the variable is not set."""
LATE = "not all ranks have it set and a model that bagua_client tunes; set both on all ranks"


def agreed(group: Group, variable: str, answer: str, differs: str) -> bool:
    """Whether ``variable`` is set on all ranks of ``group``, and alike. If not, one of them says
    what is wrong.

    They ask by no collective: a rank where nothing of ours is set would not come to that, nor does
    it answer. One where another variable is set answers, but waits for nobody.

    Args:
        answer: what it says, or UNSET; one that begins with verdict's REFUSAL decides: no.
        differs: what is wrong where ranks have other values than the others, with ``{}`` in the
            place of their numbers.
    """

    def judge(answers: list[str]) -> str:
        unset = [rank for rank, each in enumerate(answers) if each == UNSET]
        if 0 < len(unset) < len(answers):
            return f"it is not set on rank {named(unset)}; set it on all ranks"
        others = outnumbered(answers)
        return differs.format(others) if others else ""

    is_set = answer != UNSET
    speaker, reason = verdict(group, variable, answer, judge, LATE, waits=is_set)
    if reason and speaker == rank_in(group):
        refuse(variable, reason)
    return is_set and not reason


def refuse(variable: str, reason: str) -> None:
    """Say that no rank uses ``variable``."""
    logger.warning("%s is not used; training begins with the default: %s", variable, reason)
