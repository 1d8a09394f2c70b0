"""Decisions of all ranks without a collective, which some ranks might never enter."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from bagua_client.torch_private import groups as torch_groups

ANSWER_SECONDS = 60.0
"""A rank that has not answered by then is not going to."""
REFUSAL = "no: "


def verdict(
    group: dist.ProcessGroup,
    question: str,
    answer: str,
    judge: Callable[[list[str]], str],
    late: str,
) -> tuple[int, str]:
    """The same on all ranks: which of them found it, and why not (empty: yes).

    The ranks ask over the store that they met over. The first verdict that is written stands for
    all, so that nobody is late.

    Args:
        question: each is asked once for each model that a rank wraps.
        answer: this rank's; one that begins with REFUSAL decides.
        judge: finds what is wrong in the answers of all ranks, by rank.
        late: what is wrong where a rank does not answer.
    """
    store = torch_groups.store()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if store is None:
        return rank, "the default process group has no store, which the ranks need to agree"
    # Counted by each rank for itself: ranks that wrapped as many models speak of the same one.
    name = f"{question}/{group.group_name}"
    model = store.add(f"{name}/models of {rank}", 1)
    key = f"{name}/{model}"
    store.set(f"{key}/{rank}", answer)
    if store.add(f"{key}/answers", 1) == world_size:
        answers = [store.get(f"{key}/{other}").decode() for other in range(world_size)]
        refusals = [each.removeprefix(REFUSAL) for each in answers if each.startswith(REFUSAL)]
        found = refusals[0] if refusals else judge(answers)
        store.compare_set(f"{key}/verdict", "", json.dumps([rank, found]))
    try:
        store.wait([f"{key}/verdict"], timedelta(seconds=ANSWER_SECONDS))
    except RuntimeError:
        store.compare_set(f"{key}/verdict", "", json.dumps([rank, late]))
    speaker, reason = json.loads(store.get(f"{key}/verdict"))
    return int(speaker), str(reason)


def outnumbered(answers: list[str]) -> list[int]:
    """The ranks whose answer is not the most frequent one."""
    usual = max(answers, key=answers.count)
    return [rank for rank, answer in enumerate(answers) if answer != usual]
