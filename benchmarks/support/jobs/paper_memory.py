"""A GPU's memory on paper, for a training on the CPU: each tensor that it makes takes a block of it
as torch's caching allocator would give one, and the training runs out of it as it would there.

The allocator is that of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings: sizes are
rounded to 512 bytes; up to 1 MiB they lie in segments of 2 MiB, up to 10 MiB in segments of 20 MiB,
and larger ones have one of their own; the smallest free block that is large enough is split, and
free neighbours become one. Where the device is full, segments that are wholly free go back, and the
device is asked once more. What an operation takes only while it runs is not seen.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagua_client.tunable.memory import FULL_SHARE, Taken

MIB = 2**20
ROUNDED_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
MEDIUM_BYTES, MEDIUM_SEGMENT_BYTES = 10 * MIB, 20 * MIB
LARGE_ROUNDED_BYTES = 2 * MIB


@dataclass(eq=False)
class _Block:
    """A piece of a segment, between two others."""

    size: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_whole(self) -> bool:
        return self.before is None and self.after is None


class PaperAllocator:
    """The blocks of one device.

    Attributes:
        limit_bytes: what its segments may take together.
        reserved_bytes, allocated_bytes: what its segments take, and the blocks in use.
        peak_bytes: the most that blocks in use took since it was set.
        retries: how often segments had to go back for a new one.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = self.allocated_bytes = self.peak_bytes = self.retries = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._segments: dict[int, int] = {}

    def take(self, size_bytes: int) -> _Block:
        """A block of at least this size.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        size = -(-max(size_bytes, 1) // ROUNDED_BYTES) * ROUNDED_BYTES
        is_small = size <= SMALL_BYTES
        block = self._best(size, is_small) or self._new_segment(size, is_small)
        left = block.size - size
        if left >= ROUNDED_BYTES if is_small else left > SMALL_BYTES:
            rest = _Block(left, is_small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._offer(rest)
        block.is_free = False
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def give_back(self, block: _Block) -> None:
        """The block is in use no more."""
        self.allocated_bytes -= block.size
        block.is_free = True
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            self._withdraw(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if first.after is not None:
                first.after.before = first
            block = first
        self._offer(block)

    def empty(self) -> None:
        """Let go of the segments that are wholly free."""
        for blocks in self._free.values():
            for entry in [each for each in blocks if each[2].is_whole]:
                blocks.remove(entry)
                self.reserved_bytes -= entry[0]
                del self._segments[id(entry[2])]

    @property
    def largest_bytes(self) -> int:
        """Of a segment."""
        return max(self._segments.values(), default=0)

    def _best(self, size: int, is_small: bool) -> _Block | None:
        blocks = self._free[is_small]
        place = bisect_left(blocks, (size, 0))  # type: ignore[misc]
        return blocks.pop(place)[2] if place < len(blocks) else None

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            segment = SMALL_SEGMENT_BYTES
        elif size < MEDIUM_BYTES:
            segment = MEDIUM_SEGMENT_BYTES
        else:
            segment = -(-size // LARGE_ROUNDED_BYTES) * LARGE_ROUNDED_BYTES
        if self.reserved_bytes + segment > self.limit_bytes:
            self.empty()
            self.retries += 1
            if self.reserved_bytes + segment > self.limit_bytes:
                raise torch.OutOfMemoryError(
                    f"on paper: {segment} bytes more than the {self.reserved_bytes} that are taken "
                    f"of {self.limit_bytes}"
                )
        self.reserved_bytes += segment
        block = _Block(segment, is_small)
        self._segments[id(block)] = segment
        return block

    def _offer(self, block: _Block) -> None:
        insort(self._free[block.is_small], (block.size, id(block), block))

    def _withdraw(self, block: _Block) -> None:
        self._free[block.is_small].remove((block.size, id(block), block))


class PaperMemory(TorchDispatchMode):
    """The memory of what is trained on the CPU inside this context, as a ``DeviceMemory`` of the
    client's.

    Args:
        scale: how much larger the tensors are on paper: small ones that are computed in no time
            stand for those of a large model.
    """

    def __init__(self, limit_bytes: int, scale: int = 1) -> None:
        super().__init__()
        self.allocator, self._scale = PaperAllocator(limit_bytes), scale
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        self.hold(found)
        return found

    def limit_to(self, size_bytes: float) -> None:
        """A device of this size, on which nothing lies yet: what there is stays on the other."""
        self.allocator = PaperAllocator(int(size_bytes))

    def hold(self, found: Any) -> None:
        """The tensors in this are on the device, until they are gone."""
        for each in [found] if isinstance(found, torch.Tensor) else tree_leaves(found):
            if not isinstance(each, torch.Tensor) or each.device.type != "cpu":
                continue
            storage = each.untyped_storage()
            if storage._cdata not in self._known and storage.nbytes():
                allocator = self.allocator
                block = allocator.take(storage.nbytes() * self._scale)
                self._known.add(storage._cdata)
                # Torch keeps this object as long as the storage.
                gone = weakref.finalize(storage, self._let_go, storage._cdata, allocator, block)
                gone.atexit = False

    def _let_go(self, key: int, allocator: PaperAllocator, block: _Block) -> None:
        self._known.discard(key)
        allocator.give_back(block)

    def reset(self) -> None:
        found = self.allocator
        found.peak_bytes = found.allocated_bytes
        if found.reserved_bytes > FULL_SHARE * found.limit_bytes:
            found.empty()

    def taken(self) -> Taken:
        return Taken(self.allocator.peak_bytes, self.allocator.retries)

    def now_bytes(self) -> int:
        return self.allocator.allocated_bytes

    def largest_bytes(self) -> int:
        return self.allocator.largest_bytes

    def allowed_bytes(self) -> int:
        return self.allocator.limit_bytes

    def reachable_bytes(self) -> int:
        return self.allocator.limit_bytes
