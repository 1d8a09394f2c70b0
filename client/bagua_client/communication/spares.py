"""Process groups of models that are gone, for the next model that the same ranks train.

A wrapper is dropped on each rank when its garbage collector sees to it, so its groups cannot be
destroyed then, which their ranks must do together. Without reuse, each dropped wrapper would leave
its groups' threads and connections for good.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch.distributed as dist

from bagua_client.torch_private import groups as torch_groups

OFFERED = 8
"""Number of the oldest spare groups of a kind that are looked at."""
NONE = -1

_spares: dict[Hashable, dict[int, dist.ProcessGroup]] = {}


def keep(kind: Hashable, birth: int, group: dist.ProcessGroup) -> None:
    """Keep ``group``, which this rank needs no more.

    Args:
        kind: what it can be used for instead.
        birth: its number, equal on all ranks that made it together, and larger than that of any
            that one of them made before.
    """
    if torch_groups.is_alive(group):
        if not _spares:
            torch_groups.when_destroyed(forget_destroyed)
        _spares.setdefault(kind, {})[birth] = group


def offer(kind: Hashable) -> list[int]:
    """Return this rank's spare groups, for :func:`choose`: the births of all, then the operations
    that each issued.
    """
    forget_destroyed()
    found = _spares.get(kind, {})
    births = sorted(found)[:OFFERED]
    rest = [NONE] * (OFFERED - len(births))
    issued = [torch_groups.operations_of(found[birth]) for birth in births]
    return [*births, *rest, *issued, *rest]


def forget_destroyed() -> None:
    """Forget groups that the training destroyed with its own; each has threads until then."""
    for kind, groups in list(_spares.items()):
        alive = {birth: group for birth, group in groups.items() if torch_groups.is_alive(group)}
        if alive:
            _spares[kind] = alive
        else:
            del _spares[kind]


def choose(offers: Sequence[Sequence[int]], partition: Sequence[Sequence[int]]) -> int | None:
    """The birth of the groups that all ranks can use again; None: there are none.

    A group of which its ranks issued different numbers of operations is of no use: the next
    operation of one rank would meet an earlier one of another.

    Args:
        offers: of all ranks, by rank.
        partition: the ranks of each group.
    """
    issued = [dict(zip(each[:OFFERED], each[OFFERED:], strict=True)) for each in offers]
    for birth in sorted(set(issued[0]) - {NONE}):
        counts = [{issued[rank].get(birth, NONE) for rank in ranks} for ranks in partition]
        if all(len(each) == 1 and NONE not in each for each in counts):
            return birth
    return None


def take(kind: Hashable, birth: int) -> dist.ProcessGroup:
    """The spare group that :func:`choose` found."""
    return _spares[kind].pop(birth)
