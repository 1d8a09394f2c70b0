"""Numbers beside the parameters' elements, one each, that follow every re-cut of the buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from bagua_client.torch_private.reducer import GradBucket


class Companion:
    """A tensor beside each parameter, zero at first; a bucket's are one flat tensor.

    Args:
        dtype: of its numbers; None: that of what travels.
    """

    def __init__(self, dtype: torch.dtype | None = torch.float32) -> None:
        self._dtype = dtype
        self._flats: dict[tuple[int, ...], torch.Tensor] = {}
        self._views: dict[int, torch.Tensor] = {}

    def beside(
        self,
        parameters: Sequence[torch.Tensor],
        flat: torch.Tensor,
        views: Callable[[torch.Tensor], Iterable[torch.Tensor]],
        elements: int | None = None,
    ) -> torch.Tensor:
        """The values kept for ``parameters``, element for element beside ``flat``, which travels.

        Args:
            views: the part of what is returned that is each parameter's.
            elements: how many values are kept, if not one for each element of ``flat``.
        """
        names = tuple(map(id, parameters))
        own = self._flats.get(names)
        count = flat.numel() if elements is None else elements
        dtype = self._dtype or flat.dtype
        if own is None or own.numel() != count or own.dtype != dtype:
            own = torch.zeros(count, dtype=dtype, device=flat.device)
            for name, view in zip(names, views(own), strict=True):
                if name in self._views:
                    view.copy_(self._views[name])
                self._views[name] = view
            moved = set(names)
            self._flats = {of: kept for of, kept in self._flats.items() if moved.isdisjoint(of)}
            self._flats[names] = own
        return own

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether values are kept for ``parameter``."""
        return id(parameter) in self._views

    def begin_at(self, parameters: Iterable[torch.Tensor]) -> None:
        """The parameters' own values."""
        self._flats = {}
        self._views = {id(p): p.detach().float().clone() for p in parameters}

    def state(self, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of the parameters; ``names`` are by their identities."""
        return {names[parameter]: view.clone() for parameter, view in self._views.items()}

    def load(self, state: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> None:
        """Take over what :meth:`state` gave; for parameters that it lacks, zero."""
        self._flats = {}
        self._views = {p: state[name].clone() for p, name in names.items() if name in state}


def in_bucket(bucket: GradBucket) -> Callable[[torch.Tensor], Iterator[torch.Tensor]]:
    """Return what splits a tensor with the layout of ``bucket`` into each parameter's part."""

    def views(flat: torch.Tensor) -> Iterator[torch.Tensor]:
        start = bucket.buffer().storage_offset()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            offset = flat.storage_offset() + gradient.storage_offset() - start
            # As torch lays them out: like a weight that fills its memory, whatever its order is.
            strides = parameter.stride() if _is_dense(parameter) else gradient.stride()
            yield flat.as_strided(gradient.size(), strides, offset)

    return views


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def in_order(
    parameters: Sequence[torch.Tensor],
) -> Callable[[torch.Tensor], Iterator[torch.Tensor]]:
    """Views of a tensor that holds the parameters one after the other, in their shapes."""

    def views(flat: torch.Tensor) -> Iterator[torch.Tensor]:
        start = 0
        for parameter in parameters:
            yield flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    return views
