"""Tensors that lie one after the other in memory, and the one tensor that they are together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def calculate_mutual_groups(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Which places hold tensors that follow one another in memory, alike in each of the lists.

    Args:
        lists: equally long; in each, a place's tensor may be another one.

    Returns:
        The places of two tensors or more, in the order of their addresses. What follows one another
        further in one list than in another is in none: that is Bagua's rule.
    """
    of_lists = [_stretches(tensors) for tensors in lists]
    return [
        list(places)
        for places in (of_lists[0] if of_lists else [])
        if len(places) > 1 and all(places in other for other in of_lists[1:])
    ]


def _stretches(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """As long as they can be."""
    found: list[list[int]] = []
    for place in sorted(range(len(tensors)), key=lambda place: tensors[place].data_ptr()):
        if found and _follows(tensors[found[-1][-1]], tensors[place]):
            found[-1].append(place)
        else:
            found.append([place])
    return [tuple(places) for places in found]


def _follows(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.data_ptr() + first.numel() * first.element_size() == second.data_ptr()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.dtype == second.dtype
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whichever order of the dimensions."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted(each for each in dimensions if each[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All of them as one, over the same memory, shape (elements,); None where they do not follow
    one another."""
    for first, second in itertools.pairwise(tensors):
        if not _follows(first, second):
            return None
    elements = sum(tensor.numel() for tensor in tensors)
    return tensors[0].detach().as_strided((elements,), (1,))


def views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of ``flat`` with the shapes and strides of ``like``, which are dense."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [
        part.as_strided(tensor.size(), tensor.stride())
        for part, tensor in zip(parts, like, strict=True)
    ]


def flattened(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all of them as one, each in the memory order of its part in ``like``."""
    flat = torch.empty(
        sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device
    )
    torch._foreach_copy_(views(flat, like), list(tensors))
    return flat
