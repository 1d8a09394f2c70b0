"""Numbers beside the parameters' elements, one each, that follow every re-cut of the buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from bagua_client.torch_private.reducer import GradBucket


class Companion:
    """float32, zero at first; each bucket has its parameters' in one flat tensor."""

    def __init__(self) -> None:
        self._flats: dict[tuple[int, ...], torch.Tensor] = {}
        self._views: dict[int, torch.Tensor] = {}

    def beside(self, bucket: GradBucket, wire: torch.Tensor) -> torch.Tensor:
        """Those of ``bucket``, element for element beside ``wire``, which it travels as."""
        parameters = tuple(id(parameter) for parameter in bucket.parameters())
        flat = self._flats.get(parameters)
        if flat is None or flat.numel() != wire.numel():
            flat = torch.zeros(wire.numel(), device=wire.device)
            for parameter, view in zip(parameters, views(bucket, flat), strict=True):
                if parameter in self._views:
                    view.copy_(self._views[parameter])
                self._views[parameter] = view
            moved = set(parameters)
            self._flats = {of: kept for of, kept in self._flats.items() if moved.isdisjoint(of)}
            self._flats[parameters] = flat
        return flat

    def state(self, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """By the names of the parameters."""
        return {names[parameter]: view.clone() for parameter, view in self._views.items()}

    def load(self, state: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> None:
        """What :meth:`state` gave; of parameters that it does not know it is zero."""
        self._flats.clear()
        self._views = {p: state[name].clone() for p, name in names.items() if name in state}


def views(bucket: GradBucket, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The part of ``flat``, laid out as ``bucket``'s buffer is, that is each parameter's."""
    start = bucket.buffer().storage_offset()
    for gradient in bucket.gradients():
        offset = flat.storage_offset() + gradient.storage_offset() - start
        yield flat.as_strided(gradient.size(), gradient.stride(), offset)
