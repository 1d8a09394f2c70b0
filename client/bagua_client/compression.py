"""MinMaxUInt8: each number of a chunk as one byte between the chunk's minimum and its maximum.

Bagua's formula (Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB
2022; the kernels of release 0.9.2), computed in float32 and rounded half to even::

    scale = 255 / ((max - min) + 1e-7)
    upper = round(max * scale),  lower = upper - 255
    byte  = min(round(x * scale), upper) - lower
    x'    = (byte + lower) / scale

with two differences. First, a byte is clamped to 0 to 255: where a chunk's offset is large compared
with its range, the formula gives 256 or -1, which wraps round in Bagua. Second, if any number of a
chunk is not finite, the whole chunk is decompressed to NaN on all ranks, so that a check for
infinite gradients finds them; Bagua gives finite numbers for some.

The error of a decompressed number is at most half of (max - min + 1e-7) / 255, plus two units in
the last place of the chunk's largest magnitude. So a chunk whose magnitudes are all below 2e-10
becomes 0. A chunk with magnitudes above 1e29 may become NaN.

A compressed chunk has 32 bytes that begin with the minimum and the maximum, in the numbers' own
type. The bytes of the numbers follow, padded with zeros to a multiple of 32.

Beyond Bagua: where many small numbers share a chunk with a few large ones, one level is larger than
most of them, and they become 0. So a chunk may be divided into ranges of ``range_elements`` (the
last may be shorter), each with its own bounds. Then the bounds of all ranges come first, minimum
and maximum in turn, with 8 bytes of room for each range, padded to a multiple of 32; the bytes of
all numbers follow. A chunk of a single range equals Bagua's, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import ModuleType

HEADER_BYTES = 32
"""Both parts of a compressed chunk, bounds and numbers, are padded to a multiple of this size."""
BOUNDS_BYTES = 8
RANGE_ELEMENTS = 4096
"""Size of a range where ranges are used. The bounds are then 0.2 % of what travels, and a program
on a GPU processes a whole range at once."""
EPSILON = 1e-7
TILE_ELEMENTS = 32 * 1024
"""Numbers that a CPU's cache holds beside their results: several passes go over each tile."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_range(range_elements: int | None) -> None:
    """Raise ValueError unless chunks can be divided into ranges of this size."""
    if range_elements is not None and (range_elements < 1024 or range_elements.bit_count() != 1):
        raise ValueError(f"a range must have 1024, 2048, 4096, ... elements, not {range_elements}")


def compressed_bytes(elements: int, range_elements: int | None = None) -> int:
    """Size of a compressed chunk of ``elements`` numbers."""
    return _header_bytes(elements, range_elements) + _filled_up(elements)


def compress(
    chunks: torch.Tensor, out: torch.Tensor | None = None, range_elements: int | None = None
) -> torch.Tensor:
    """Compress each row of ``chunks`` as one chunk.

    Args:
        chunks: (rows, elements), contiguous, of float32, float16 or bfloat16.
        out: uint8, (rows, ``compressed_bytes(elements, range_elements)``), contiguous; None: a new
            tensor.
        range_elements: how many numbers share a minimum and a maximum: a power of two, at least
            1024; None: all of a row.

    Returns:
        ``out``. A CPU and a GPU produce equal bytes.

    Raises:
        ValueError: ``chunks`` has another type or shape, or is empty; or there can be no ranges of
            this size.
    """
    _check(chunks, range_elements)
    rows, elements = chunks.shape
    if out is None:
        shape = rows, compressed_bytes(elements, range_elements)
        out = torch.empty(shape, dtype=torch.uint8, device=chunks.device)
    first = _header_bytes(elements, range_elements)
    if kernels := _kernels(chunks):
        kernels.compress(chunks, out, first, range_elements)
        return out
    out[:, first + elements :] = 0
    headers = out[:, :first].zero_().view(chunks.dtype)
    for numbers, header, levels in zip(chunks, headers, out[:, first:], strict=True):
        low, high = _bounds(numbers, range_elements)
        is_finite = (high.float() - low.float()).isfinite()
        bounds = torch.stack([low, high], dim=1).where(is_finite[:, None], math.nan)
        header[: bounds.numel()] = bounds.flatten()
        scale, upper, lower = _constants(bounds)
        # The bytes of a range with numbers that are not finite mean nothing. They are 0, so that
        # a CPU and a GPU produce equal bytes.
        means_all = is_finite.device.type == "cpu" and bool(is_finite.all())
        for at, ranges, shape in _tiles(elements, range_elements):
            made = (numbers[at].float().view(shape) * scale[ranges]).round_()
            made = made.clamp_(max=upper[ranges]).sub_(lower[ranges]).clamp_(0, 255)
            if not means_all:
                made = torch.where(is_finite[ranges, None], made, 0.0)
            levels[at] = made.view(-1)
    return out


def decompress(
    compressed: torch.Tensor,
    out: torch.Tensor,
    divisor: float | None = None,
    range_elements: int | None = None,
) -> torch.Tensor:
    """Decompress the rows and add them up, beginning with the first row.

    Args:
        compressed: uint8, (rows, bytes), as :func:`compress` made them of numbers of the same type
            as ``out``.
        out: (elements,), contiguous: the sum of all rows; or (sums, elements): the rows are divided
            into equal groups of consecutive rows, one for each sum.
        divisor: each sum is divided by it, in float32; None: no division.
        range_elements: the value that the rows were compressed with.

    Returns:
        ``out``.
    """
    elements = out.shape[-1]
    first = _header_bytes(elements, range_elements)
    if kernels := _kernels(out):
        kernels.decompress(compressed, out, first, range_elements, divisor)
        return out
    if out.dim() == 2:
        for rows, each in zip(compressed.chunk(len(out)), out, strict=True):
            decompress(rows, each, divisor, range_elements)
        return out
    count = _ranges(elements, range_elements)
    headers = compressed[:, :first].contiguous().view(out.dtype)
    constants = [_constants(header[: 2 * count].view(count, 2)) for header in headers]
    for at, ranges, shape in _tiles(elements, range_elements):
        total: torch.Tensor | None = None
        for row, (scale, _, lower) in zip(compressed[:, first:], constants, strict=True):
            part = row[at].float().view(shape).add_(lower[ranges]).div_(scale[ranges])
            total = part if total is None else total.add_(part)
        assert total is not None
        out[at] = (total if divisor is None else total.div_(divisor)).view(-1)
    return out


def _ranges(elements: int, range_elements: int | None) -> int:
    """Number of ranges in a chunk of ``elements`` numbers."""
    return math.ceil(elements / range_elements) if range_elements else 1


def _header_bytes(elements: int, range_elements: int | None) -> int:
    return _filled_up(BOUNDS_BYTES * _ranges(elements, range_elements))


def _filled_up(size_bytes: int) -> int:
    return math.ceil(size_bytes / HEADER_BYTES) * HEADER_BYTES


def _bounds(numbers: torch.Tensor, range_elements: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each range."""
    if range_elements is None or numbers.numel() <= range_elements:
        return numbers.view(1, -1).aminmax(dim=1)
    whole = numbers.numel() // range_elements * range_elements
    parts = [numbers[:whole].view(-1, range_elements), numbers[None, whole:]]
    lows, highs = zip(*(part.aminmax(dim=1) for part in parts if part.numel()), strict=True)
    return torch.cat(lows), torch.cat(highs)


def _tiles(
    elements: int, range_elements: int | None
) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Divide a chunk into tiles that fit in a cache. A tile is some whole ranges, or a part of one.

    Yields:
        The slice of the tile's numbers, the slice of its ranges, and the shape (ranges, -1) to
        which its numbers are viewed.
    """
    each = min(range_elements or elements, elements)
    whole = elements // each * each
    tile = max(TILE_ELEMENTS // each * each, min(TILE_ELEMENTS, each))
    start = 0
    while start < elements:
        end = min(start + tile, whole if start < whole else elements)
        first = start // each
        count = max((end - start) // each, 1)
        yield slice(start, end), slice(first, first + count), (count, -1)
        start = end


def _constants(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, upper and lower, each of shape (ranges, 1), for ``bounds`` of shape (ranges, 2)."""
    low, high = bounds.float().unbind(1)
    # Not 255.0 / ...: torch computes that as a product with the reciprocal, which rounds twice.
    scale = torch.tensor(255.0, device=bounds.device) / ((high - low) + EPSILON)
    upper = (high * scale).round()
    return scale[:, None], upper[:, None], (upper - 255.0)[:, None]


def _check(chunks: torch.Tensor, range_elements: int | None) -> None:
    if chunks.dim() != 2 or not chunks.numel() or not chunks.is_contiguous():
        raise ValueError(
            "a tensor to compress must be of shape (rows, elements), contiguous and not empty; "
            f"this one is {tuple(chunks.shape)}"
        )
    if chunks.dtype not in DTYPES:
        raise ValueError(f"{chunks.dtype} cannot be compressed to 8 bits; possible are {DTYPES}")
    check_range(range_elements)


def _kernels(tensor: torch.Tensor) -> ModuleType | None:
    """The GPU kernels; None on a CPU or without Triton: torch's operations need more passes."""
    if tensor.device.type != "cuda":
        return None
    try:
        from bagua_client import triton_kernels
    except ImportError:
        return None
    return triton_kernels
