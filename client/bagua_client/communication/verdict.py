"""Decisions of all ranks without a collective, for cases in which a rank might never enter one."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from bagua_client.torch_private import groups as torch_groups

ANSWER_SECONDS = 60.0
"""How long the ranks wait; a rank that has not answered by then is taken as never answering."""
REFUSAL = "no: "


def verdict(
    group: dist.ProcessGroup,
    question: str,
    answer: str,
    judge: Callable[[list[str]], str],
    late: str,
) -> tuple[int, str]:
    """Decide ``question`` with all ranks of ``group``, through the rendezvous store.

    The first verdict written to the store holds for all ranks, so that a late rank finds it too.

    Args:
        question: name of the question, asked once for each model that a rank wraps.
        answer: this rank's answer; an answer that begins with REFUSAL decides: no.
        judge: given the answers of all ranks, by rank, returns what is wrong; empty: nothing.
        late: the reason to give if a rank does not answer within ANSWER_SECONDS.

    Returns:
        The rank that wrote the verdict, and the reason why the answer is no (empty: yes). Equal on
        all ranks, unless the default process group has no store: then this rank and that reason.
    """
    store = torch_groups.store()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if store is None:
        return rank, "the default process group has no store, which the ranks need to agree"
    # Each rank counts its own models: the n-th model of one rank is the n-th of every other.
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
