"""How ranks agree before anything changes: by a vote, or without a collective where a rank might
never enter one.

A process that trains alone has no group, and none is made for it: it asks itself.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from bagua_client.torch_private import groups as torch_groups

Group = dist.ProcessGroup | None
"""The ranks that agree; None: this process alone. To torch None is the group of all ranks, so it is
given to none of torch's functions."""


def ranks_in(group: Group) -> int:
    """How many there are."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """This process's."""
    return 0 if group is None else dist.get_rank(group)


def destroy(group: Group) -> None:
    """Destroy a group that was made for the ranks to agree in. All of them call this together."""
    if group is not None:
        dist.destroy_process_group(group)


class Vote:
    """Gathers one integer of each rank on all ranks. All ranks must start it together."""

    def __init__(self, value: int, group: Group, device: torch.device) -> None:
        self._own, self._work = value, None
        self._gathered: list[torch.Tensor] = []
        if group is not None:
            own = torch.tensor([value], dtype=torch.int64, device=device)
            self._gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
            self._work = dist.all_gather(self._gathered, own, group=group, async_op=True)

    def values(self) -> list[int]:
        """Wait for the vote. Returns the values, by rank."""
        if self._work is not None:
            self._work.wait()
        return list(map(int, torch.cat(self._gathered).tolist())) if self._gathered else [self._own]

    def dissenters(self) -> list[int]:
        """Wait for the vote. Returns the ranks whose value is not the most frequent one; empty if
        all agree.

        Among equally frequent values, that of the lowest rank counts as the majority, so that
        every rank finds the same dissenters.
        """
        values = self.values()
        majority = max(values, key=values.count)
        return [rank for rank, value in enumerate(values) if value != majority]


def attempt(change: Callable[[], object], group: Group, device: torch.device) -> tuple[str, str]:
    """Try ``change`` on all ranks together.

    Returns:
        The ranks where it raised an exception, as in "0, 3" (empty: none), and the message of this
        rank's exception (empty if there was none).
    """
    error = ""
    try:
        change()
    except Exception as failure:
        # Keep only the text: the exception may hold references to memory, which may be short.
        error = f"{type(failure).__name__}: {failure}"
    votes = Vote(int(bool(error)), group, device).values()
    return ", ".join(str(rank) for rank, failed in enumerate(votes) if failed), error


ANSWER_SECONDS = 60.0
"""How long the ranks wait; a rank that has not answered by then is taken as never answering."""
SHARE_OF_TIMEOUT = 0.5
"""They wait no longer than this share of the group's timeout: meanwhile one that does not ask may
wait for them in a collective."""
MOST_NAMED = 8
"""Ranks in a line."""
REFUSAL = "no: "


def verdict(
    group: Group,
    question: str,
    answer: str,
    judge: Callable[[list[str]], str],
    late: str,
    waits: bool = True,
) -> tuple[int, str]:
    """Decide ``question`` with all ranks of ``group``, through the rendezvous store.

    The first verdict written to the store holds for all ranks, so that a late rank finds it too.

    Args:
        question: name of the question, asked once for each model that a rank wraps.
        answer: this rank's answer; an answer that begins with REFUSAL decides: no.
        judge: given the answers of all ranks, by rank, returns what is wrong; empty: nothing.
        late: the reason if a rank does not answer within ANSWER_SECONDS; its number is added.
        waits: False: this rank does the same whatever the verdict is. It answers, so that the
            others need not wait for it, and goes on.

    Returns:
        The rank that wrote the verdict, and the reason why the answer is no (empty: yes). Equal on
        all ranks, unless the default process group has no store: then this rank and that reason.
        One that does not wait gets -1 and nothing, unless it was the last to answer.
    """
    if group is None:
        return 0, _found([answer], judge)
    store = torch_groups.store()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if store is None:
        reason = "the default process group has no store, which the ranks need to agree"
        return (rank, reason) if waits else (-1, "")
    # Each rank counts its own models: the n-th model of one rank is the n-th of every other.
    name = f"{question}/{group.group_name}"
    model = store.add(f"{name}/models of {rank}", 1)
    key = f"{name}/{model}"
    store.set(f"{key}/{rank}", answer)
    is_last = store.add(f"{key}/answers", 1) == world_size
    if is_last:
        answers = [store.get(f"{key}/{other}").decode() for other in range(world_size)]
        store.compare_set(f"{key}/verdict", "", json.dumps([rank, _found(answers, judge)]))
    if not waits and not is_last:
        return -1, ""
    try:
        store.wait([f"{key}/verdict"], _patience(group, store))
    except RuntimeError:
        missing = [each for each in range(world_size) if not store.check([f"{key}/{each}"])]
        _waited_in_vain[group] = [f"{key}/{each}" for each in missing]
        reason = f"{late} (rank {named(missing)} has not answered)" if missing else late
        store.compare_set(f"{key}/verdict", "", json.dumps([rank, reason]))
    speaker, reason = json.loads(store.get(f"{key}/verdict"))
    return int(speaker), str(reason)


def _found(answers: list[str], judge: Callable[[list[str]], str]) -> str:
    refusals = [each.removeprefix(REFUSAL) for each in answers if each.startswith(REFUSAL)]
    return refusals[0] if refusals else judge(answers)


_waited_in_vain: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]]
_waited_in_vain = weakref.WeakKeyDictionary()
"""The answers that did not come to the last question that was not answered by all."""


def _patience(group: dist.ProcessGroup, store: torch_groups.Store) -> timedelta:
    """How long to wait. Not at all for ranks that have not answered an earlier question yet: the
    pauses together could be longer than the group's timeout."""
    missing = _waited_in_vain.get(group)
    if missing and not store.check(missing):
        return timedelta(milliseconds=1)
    timeout = torch_groups.shortest_timeout(group)
    most = timedelta(seconds=ANSWER_SECONDS)
    return most if timeout is None else min(most, SHARE_OF_TIMEOUT * timeout)


def outnumbered(answers: list[str]) -> str:
    """The ranks whose answer is not the most frequent one, as :func:`named` does."""
    [(usual, _)] = Counter(answers).most_common(1)
    return named([rank for rank, answer in enumerate(answers) if answer != usual])


def named(ranks: list[int]) -> str:
    """As in "0, 3"; of many ranks the first."""
    more = ", ..." if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(str, ranks[:MOST_NAMED])) + more


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
        answer: what it says, or UNSET; one that begins with REFUSAL decides: no.
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
