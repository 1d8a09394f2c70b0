"""What approximations of low rank begin with: random, then what came of the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua_client.algorithms.companion import Companion

SEEDS = 1_000_000_000
"""How many there are, as torch has it."""

Matrix = tuple[torch.Tensor, torch.Tensor]
"""A parameter, and its gradient as a matrix."""


class Starts:
    """A tensor Q of shape (m, rank) for each parameter whose gradient is a matrix of m columns. It
    follows the parameter through every re-cut of the buckets.

    Args:
        state: torch's PowerSGDState.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._kept = Companion(dtype=None)

    def rank_of(self, rows: int, columns: int) -> int:
        """The rank of the approximation of such a matrix."""
        most: int = self._state.matrix_approximation_rank
        return min(rows, columns, most)

    def of(self, lists: Sequence[Sequence[Matrix]], wire: torch.Tensor) -> torch.Tensor:
        """What the matrices' approximations begin with; random where there was no step before. All
        ranks draw the same, those too that do not compress."""
        state = self._state
        parameters = [parameter for same in lists for parameter, _ in same]
        shapes = [(m.shape[1], self.rank_of(*m.shape)) for same in lists for _, m in same]
        is_new = [not state.warm_start or p not in self._kept for p in parameters]
        elements = sum(columns * rank for columns, rank in shapes)
        starts = self._kept.beside(parameters, wire, _in_turn(shapes), elements)
        # Torch draws in its first step for every bucket, also for one without a matrix.
        is_first = state.iter - 1 == state.start_powerSGD_iter
        if any(is_new) or is_first or not state.warm_start:
            generator = torch.Generator().manual_seed(int(state.rng.randint(SEEDS)))
            drawn: list[torch.Tensor] = []
            for same in lists:  # As torch does: other sizes at once are other numbers.
                shape = len(same), *shapes[len(drawn)]
                drawn.extend(torch.randn(shape, generator=generator, dtype=wire.dtype))
            for view, numbers, new in zip(_in_turn(shapes)(starts), drawn, is_new, strict=True):
                if new:
                    view.copy_(numbers)
        return starts

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return what a checkpoint must hold; ``names`` are by the parameters' identities."""
        _, numbers, position, *_ = self._state.rng.get_state()
        return {
            "rank": self._state.matrix_approximation_rank,
            "random": torch.tensor(numbers.tolist()),
            "position": position,
            "starts": self._kept.state(names) if self._state.warm_start else {},
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Go on with what :meth:`state_dict` gave."""
        numbers = state["random"].numpy().astype("uint32")
        self._state.rng.set_state(("MT19937", numbers, state["position"]))
        # Those of another rank have another shape, and all begin anew.
        is_same = state["rank"] == self._state.matrix_approximation_rank
        self._kept.load(state["starts"] if is_same else {}, names)


def _in_turn(
    shapes: Sequence[tuple[int, int]],
) -> Callable[[torch.Tensor], Iterator[torch.Tensor]]:
    """What splits a flat tensor into matrices of these shapes, one after the other."""

    def views(flat: torch.Tensor) -> Iterator[torch.Tensor]:
        parts = torch.split(flat, [rows * columns for rows, columns in shapes])
        return (part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    return views
