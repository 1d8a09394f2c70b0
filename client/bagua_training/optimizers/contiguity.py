"""Tensors that lie one after the other in memory, and the one tensor that they are together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def calculate_mutual_groups(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Return which places hold tensors that follow one another in memory, alike in each of the
    lists.

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
    """The stretches, as long as they can be."""
    found: list[list[int]] = []
    before: tuple[object, ...] = ()
    for place in sorted(range(len(tensors)), key=lambda place: tensors[place].data_ptr()):
        tensor = tensors[place]
        begin, kind = tensor.data_ptr(), (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if before == (begin, *kind):
            found[-1].append(place)
        else:
            found.append([place])
        before = (begin + tensor.numel() * tensor.element_size(), *kind)
    return [tuple(places) for places in found]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whichever order of the dimensions."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted(each for each in dimensions if each[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of them, which are dense, have elements in common."""
    ordered = sorted(tensors, key=torch.Tensor.data_ptr)
    return any(
        first.data_ptr() + first.numel() * first.element_size() > second.data_ptr()
        for first, second in itertools.pairwise(ordered)
    )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return all tensors as one, over the same memory, shape (elements,); None where they do not
    follow one another.

    They are dense and of one type.
    """
    first = tensors[0]
    begin = end = first.data_ptr()
    size = first.element_size()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return None
        end += tensor.numel() * size
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # neighbours by chance
    return first.detach().as_strided(((end - begin) // size,), (1,))


def views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of ``flat`` with the shapes and strides of ``like``, which are dense."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [
        part.as_strided(tensor.size(), tensor.stride())
        for part, tensor in zip(parts, like, strict=True)
    ]


def flattened(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all of them as one, each in the memory order of its part in ``like``."""
    return torch.cat([_in_order(*pair) for pair in zip(tensors, like, strict=True)])


def _in_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in the memory order of ``like``, shape (elements,)."""
    if tensor.stride() != like.stride():
        ordered = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def whole(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors as one; over the same memory if they follow one another there as ``like`` do."""
    found = joined(tensors)
    if found is None or any(a.stride() != b.stride() for a, b in zip(tensors, like, strict=True)):
        return flattened(tensors, like)
    return found
