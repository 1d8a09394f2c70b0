"""How many blocks of one model are recomputed, on one rank.

A block that keeps its activations computes the same as one that recomputes them; what forbids that
is seen in the first steps. The last blocks are the first to keep theirs: the backward pass begins
with them, so theirs are held for the shortest time, and the last one's are there anyway.

What a block keeps is known of the batches that were seen. A larger batch is recomputed as the
training has said, on this rank alone, as nothing of it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.configuration import Configuration
from bagua_client.torch_private import checkpointing as torchs
from bagua_client.tunable.looks import Observers, seen
from bagua_client.tunable.offer import Limit
from bagua_client.tunable.recomputed_blocks import Block, blocks_of
from bagua_wire.knobs import ALL_BLOCKS

SHARES_KEPT = (0.25, 0.5, 0.75, 1.0)
"""Of the blocks whose activations fit in the memory, those that are tried as kept, beside none."""
NOT_KNOWN = "what its blocks would keep is known after the first steps"
COMPILED = (
    "blocks are compiled together with what recomputes them, which rounds 16-bit numbers otherwise "
    "than without; BAGUA_AUTOTUNE_ALLOW=recomputed_blocks allows that"
)
NOT_SEEN = "not every block was recomputed in the first steps"
NOT_MEASURED = "blocks are compiled with what recomputes them, so what they would keep is not seen"
WRITES = "blocks write buffers, twice where they are recomputed"
DRAWS = "blocks that are recomputed draw other random numbers then (preserve_rng_state=False)"


class Recomputation:
    """The blocks of one model that the training has made recompute their activations.

    Args:
        model: of this rank; held weakly.
        observers: by way of which its passes are watched.
        allocated_bytes: what is allocated on its device now; None: nobody knows, and memory is no
            limit.

    Attributes:
        recomputed: how many of the blocks are, from the first on.
        was_held_back: whether all were, for a larger batch, since somebody set this to False.
        has_varied: whether batches of several sizes were seen.
        handles: of ours among the hooks of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        observers: Observers,
        allocated_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._observers, self._allocated_bytes = observers, allocated_bytes
        nothing: tuple[list[Block], str] = ([], "")
        self._blocks, self._left_alone = seen(lambda: blocks_of(model), nothing)
        self.recomputed = len(self._blocks)
        self.was_held_back = self._is_held_back = self._is_known = self.has_varied = False
        self._is_16_bits = seen(lambda: any(p.element_size() < 4 for p in model.parameters()), True)
        self._hindrance = ""
        self._largest: dict[str, tuple[int, int]] = {}
        self._before: list[Any] = []
        self.handles: Sequence[RemovableHandle] = ()
        if self._blocks:
            self.handles = (
                model.register_forward_pre_hook(self._begins, with_kwargs=True),
                model.register_forward_hook(self._ends),
            )
            self._watch()

    # What may be changed

    def __len__(self) -> int:
        """How many blocks can be switched."""
        return len(self._blocks)

    def named(self, configuration: Configuration) -> Configuration:
        """The configuration with the number of blocks that it means."""
        if not self._blocks or configuration.recomputed_blocks != ALL_BLOCKS:
            return configuration
        return replace(configuration, recomputed_blocks=len(self._blocks))

    def limit(self, free_bytes: int | None) -> Limit:
        """The row of ``recomputed_blocks`` in an offer.

        Args:
            free_bytes: what may be taken of the device's memory beyond what all blocks recomputed
                take; None: that is not known.
        """
        total, why = len(self._blocks), self._left_alone or self._hindrance
        values: Sequence[int] = ()
        if self._is_known and not why:
            least = self._least(free_bytes)
            values = [total, *(round(total - (total - least) * share) for share in SHARES_KEPT)]
        return Limit(
            list(dict.fromkeys(values)),
            why and f"recomputed blocks: {why}",
            self._cannot,
            changes=COMPILED if self._rounds else "",
        )

    def _cannot(self, count: int) -> str:
        """Why the training cannot have so many recomputed; empty: it can."""
        total = len(self._blocks)
        if count in (ALL_BLOCKS, total):
            return ""
        if count > total:
            return f"{count} blocks cannot be recomputed, as the training recomputes {total}"
        return self._hindrance or ("" if self._is_known else NOT_KNOWN)

    @property
    def _rounds(self) -> bool:
        """Whether blocks that keep their activations may compute other numbers, by rounding."""
        is_compiled = any(block.is_compiled for block in self._blocks)
        return is_compiled and self._is_16_bits and torchs.rounds_when_compiled()

    def _least(self, free_bytes: int | None) -> int:
        """How few blocks may be recomputed."""
        if free_bytes is None:
            return 0
        counts = range(len(self._blocks) + 1)
        return next(count for count in counts if self.kept_bytes(count) <= max(free_bytes, 0))

    def kept_bytes(self, count: int) -> int:
        """What all blocks keep for their backward pass beyond the first ``count``, at most."""
        kept = self._blocks[count:] if count != ALL_BLOCKS else ()
        return sum(block.kept_bytes for block in kept)

    @property
    def is_known(self) -> bool:
        """Whether it is known what the blocks would keep, or there are none."""
        return self._is_known or not self._blocks

    # Changes

    def put(self, count: int) -> None:
        """Recompute the first ``count`` blocks, from the next forward pass on."""
        count = len(self._blocks) if count == ALL_BLOCKS else count
        if count != self.recomputed:
            self.recomputed = count
            self._switch()

    def conclude(self) -> None:
        """The first steps are over: what the blocks would keep is known, or never will be."""
        if self._is_known or not self._blocks:
            return
        self._is_known = True
        unknown = [block for block in self._blocks if not block.kept_bytes]
        if not self._hindrance and self._allocated_bytes is not None and unknown:
            is_compiled = any(block.is_compiled for block in unknown)
            self._hindrance = NOT_MEASURED if is_compiled else NOT_SEEN
        self._switch()

    def forget(self) -> None:
        """Leave the model as it was."""
        self.put(ALL_BLOCKS)
        self._switch()
        for handle in self.handles:
            handle.remove()
        self._blocks.clear()

    def _switch(self) -> None:
        self._is_held_back = False
        for place, block in enumerate(self._blocks):
            if place < self.recomputed:
                block.recompute()
            else:
                block.keep()

    def _watch(self) -> None:
        for block in self._blocks:
            block.watch(self._allocated_bytes)

    # The model's passes

    def _begins(self, _: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # Where the compiler follows the model, there must be nothing for it to follow here.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._observers.call(self._pass_begins, args, kwargs)

    def _pass_begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        is_larger = self._is_larger(args, kwargs)
        if not self._is_known:
            self._is_16_bits |= torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
            self._before = self._state()
        elif is_larger and self.recomputed < len(self._blocks):
            if self._allocated_bytes is not None:
                self.was_held_back = self._is_held_back = True
                self._watch()
        elif self._is_held_back:
            self._switch()

    def _is_larger(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a batch is larger than all before it, by elements or its longest side."""
        is_larger = False
        for name, tensor in _tensors((*args, *kwargs.values())):
            now = (tensor.numel(), max(tensor.shape, default=0))
            most = self._largest.get(name, (0, 0))
            self.has_varied |= name in self._largest and now != most
            if now[0] > most[0] or now[1] > most[1]:
                is_larger = True
                self._largest[name] = (max(now[0], most[0]), max(now[1], most[1]))
        return is_larger

    def _ends(self, _: torch.nn.Module, __: Any, ___: Any) -> None:
        if not torch.compiler.is_compiling() and self._before and torch.is_grad_enabled():
            self._observers.call(self._pass_ends)

    def _pass_ends(self) -> None:
        """Whether something of the pass forbids to switch the blocks."""
        (versions, random), self._before = self._before, []
        now_versions, now_random = self._state()
        if versions != now_versions:
            self._hindrance = WRITES
        elif random is not None and not all(map(torch.equal, random, now_random)):
            self._hindrance = DRAWS
        self._hindrance = self._hindrance or next(
            (block.hindrance for block in self._blocks if block.hindrance), ""
        )

    def _state(self) -> list[Any]:
        """How often the blocks' buffers were written, and of what random numbers come, if it may
        not be kept."""
        versions = [buffer._version for block in self._blocks for buffer in block.buffers]
        if all(block.draws_again for block in self._blocks):
            return [versions, None]
        random = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            random.append(torch.cuda.get_rng_state())
        return [versions, random]


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the arguments of a model, by their places."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _tensors(each, f"{name}.{place}")
