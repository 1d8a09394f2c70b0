"""MinMaxUInt8 on a GPU: the same bytes as on a CPU, at the speed of the GPU's memory.

Compressing reads the numbers twice (once for minimum and maximum) and writes a byte for each. It
reads them once if they are divided into ranges, which a program processes as a whole. Decompressing
reads a byte of each row and writes a number. Divisions are rounded as IEEE 754 requires; Triton's
own are not. Where one scale divides many numbers, its reciprocal is refined instead: if the
reciprocal is rounded to nearest, two fused multiply-adds give the correctly rounded quotient
(Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, IBM Journal
of Research and Development 34, 1990), as long as no number is subnormal; none of these is.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

PARTS = 512
"""Maximum number of programs for each chunk; a power of two."""
BLOCK, WARPS = 1024, 8
"""Elements that a program processes at once, and its warps: four elements a thread, so that memory
is read and written in whole cache lines, both for numbers and for bytes."""

SUM_BLOCK, SUM_WARPS = 2048, 4
"""The same for sums. They read only a byte for each number but more scales, so fewer and wider
programs are better."""


def compress(
    chunks: torch.Tensor, out: torch.Tensor, first_bytes: int, range_elements: int | None
) -> None:
    """See :func:`bagua_client.compression.compress`; the header has ``first_bytes`` bytes."""
    rows, elements = chunks.shape
    header = out.view(chunks.dtype)
    strides = elements, out.shape[1], header.shape[1]
    with torch.cuda.device(chunks.device):
        if range_elements is not None:
            out[:, :first_bytes].zero_()
            _quantise_ranges[(triton.cdiv(elements, range_elements), rows)](
                chunks, out, header, *strides, first_bytes, block=range_elements, num_warps=WARPS
            )
            return
        parts = min(PARTS, triton.next_power_of_2(triton.cdiv(elements, 4 * BLOCK)))
        bounds = torch.empty((rows, 2, parts), dtype=torch.float32, device=chunks.device)
        shape = {"parts": parts, "block": BLOCK, "num_warps": WARPS}
        _bounds[(rows, parts)](chunks, bounds, elements, **shape)
        _quantise[(rows, parts)](chunks, bounds, out, header, *strides, **shape)


def decompress(
    compressed: torch.Tensor,
    out: torch.Tensor,
    first_bytes: int,
    range_elements: int | None,
    divisor: float | None,
) -> None:
    """See :func:`bagua_client.compression.decompress`; the header has ``first_bytes`` bytes."""
    groups, elements = (1, *out.shape)[-2:]
    header = compressed.view(out.dtype)
    # Division by a power of two equals multiplication by its reciprocal: both are exact.
    is_power = divisor is not None and math.frexp(divisor)[0] == 0.5
    factor = 1.0 if divisor is None else 1.0 / divisor if is_power else float(divisor)
    block = SUM_BLOCK if range_elements is None else min(SUM_BLOCK, range_elements)
    with torch.cuda.device(out.device):
        _sum[(triton.cdiv(elements, block), groups)](
            compressed,
            header,
            out,
            elements,
            compressed.shape[1],
            header.shape[1],
            first_bytes,
            factor,
            rows=compressed.shape[0] // groups,
            range_blocks=(range_elements or 0) // block,
            is_divided=divisor is not None and not is_power,
            is_scaled=is_power,
            block=block,
            num_warps=SUM_WARPS,
        )


@triton.jit
def _constants(low, high):
    """Scale and upper of a range from ``low`` to ``high``."""
    scale = tl.div_rn(255.0, (high - low) + 1e-7)
    return scale, libdevice.rint(high * scale)


@triton.jit
def _level(x, scale, upper):
    """The byte of the number ``x``, as a float."""
    level = tl.minimum(libdevice.rint(x * scale), upper) - (upper - 255.0)
    return tl.minimum(tl.maximum(level, 0.0), 255.0)


@triton.jit
def _bounds(numbers, bounds, elements, parts: tl.constexpr, block: tl.constexpr):
    """Minimum and maximum over this program's blocks of a chunk; NaN if a number is not finite."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = numbers + row * elements
    low = tl.full((block,), float("inf"), tl.float32)
    high = tl.full((block,), float("-inf"), tl.float32)
    odd = tl.zeros((block,), tl.int32)
    for start in range(part * block, elements, parts * block):
        at = start + tl.arange(0, block)
        inside = at < elements
        x = tl.load(chunk + at, mask=inside, other=0.0).to(tl.float32)
        odd |= ((x - x) != 0.0).to(tl.int32)
        low = tl.minimum(low, tl.where(inside, x, float("inf")))
        high = tl.maximum(high, tl.where(inside, x, float("-inf")))
    is_odd = tl.max(odd, 0) > 0
    place = bounds + row * 2 * parts + part
    tl.store(place, tl.where(is_odd, float("nan"), tl.min(low, 0)))
    tl.store(place + parts, tl.where(is_odd, float("nan"), tl.max(high, 0)))


@triton.jit
def _quantise(
    numbers,
    bounds,
    out,
    header,
    elements,
    row_bytes,
    row_numbers,
    parts: tl.constexpr,
    block: tl.constexpr,
):
    """Write the header and the bytes of a chunk, from the bounds of its parts."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = bounds + row * 2 * parts + tl.arange(0, parts)
    lows, highs = tl.load(places), tl.load(places + parts)
    # An empty part has infinite bounds; a part with a number that is not finite has NaN.
    is_odd = tl.max((lows != lows).to(tl.int32), 0) > 0
    low, high = tl.min(lows, 0), tl.max(highs, 0)
    is_odd = is_odd | (((high - low) - (high - low)) != 0.0)
    low = tl.where(is_odd, float("nan"), low)
    high = tl.where(is_odd, float("nan"), high)
    scale, upper = _constants(low, high)
    kind = header.dtype.element_ty
    if part == 0:
        first = header + row * row_numbers
        place = tl.arange(0, 32)
        ends = tl.where(place == 0, low, tl.where(place == 1, high, 0.0))
        numbers_in_header = 32 // (kind.primitive_bitwidth // 8)
        tl.store(first + place, ends.to(kind), mask=place < numbers_in_header)
    chunk = numbers + row * elements
    levels = out + row * row_bytes + 32
    filled = (row_bytes - 32).to(tl.int32)
    for start in range(part * block, filled, parts * block):
        at = start + tl.arange(0, block)
        x = tl.load(chunk + at, mask=at < elements, other=0.0).to(tl.float32)
        level = tl.where((at < elements) & (is_odd == 0), _level(x, scale, upper), 0.0)
        tl.store(levels + at, level.to(tl.uint8), mask=at < filled)


@triton.jit
def _quantise_ranges(
    numbers, out, header, elements, row_bytes, row_numbers, first_bytes, block: tl.constexpr
):
    """Write the bounds and the bytes of one range of a chunk."""
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = part * block + tl.arange(0, block)
    inside = at < elements
    x = tl.load(numbers + row * elements + at, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(inside, x, float("inf")), 0)
    high = tl.max(tl.where(inside, x, float("-inf")), 0)
    is_odd = tl.max(((x - x) != 0.0).to(tl.int32), 0) > 0
    is_odd = is_odd | (((high - low) - (high - low)) != 0.0)
    low = tl.where(is_odd, float("nan"), low)
    high = tl.where(is_odd, float("nan"), high)
    kind = header.dtype.element_ty
    bounds = header + row * row_numbers + 2 * part
    tl.store(bounds, low.to(kind))
    tl.store(bounds + 1, high.to(kind))
    scale, upper = _constants(low, high)
    level = tl.where(inside & (is_odd == 0), _level(x, scale, upper), 0.0)
    levels = out + row * row_bytes + first_bytes
    tl.store(levels + at, level.to(tl.uint8), mask=at < row_bytes - first_bytes)


@triton.jit
def _divided(x, scale, reciprocal):
    """``x / scale``, rounded to nearest."""
    wide = tl.zeros_like(x) + scale
    first = x * reciprocal
    return tl.fma(tl.fma(-first, wide, x), tl.zeros_like(x) + reciprocal, first)


@triton.jit
def _sum(
    compressed,
    header,
    out,
    elements,
    row_bytes,
    row_numbers,
    first_bytes,
    divisor,
    rows: tl.constexpr,
    range_blocks: tl.constexpr,
    is_divided: tl.constexpr,
    is_scaled: tl.constexpr,
    block: tl.constexpr,
):
    """Add up one block of a group's rows, in the rows' order, then divide or scale the sum."""
    start = tl.program_id(0).to(tl.int64) * block
    # A block lies within one range; without ranges the whole chunk is one range.
    place = 2 * (tl.program_id(0) // range_blocks) if range_blocks else 0
    group = tl.program_id(1).to(tl.int64)
    out += group * elements
    at = tl.arange(0, block)
    inside = at < elements - start
    total = tl.zeros((block,), tl.float32)
    for row in tl.static_range(rows):
        first = group * rows + row
        low = tl.load(header + first * row_numbers + place).to(tl.float32)
        high = tl.load(header + first * row_numbers + place + 1).to(tl.float32)
        scale, upper = _constants(low, high)
        levels = compressed + first * row_bytes + first_bytes + start
        x = tl.load(levels + at, mask=inside, other=0).to(tl.float32) + (upper - 255.0)
        x = _divided(x, scale, tl.div_rn(1.0, scale))
        total = x if row == 0 else total + x
    if is_divided:
        total = tl.div_rn(total, tl.zeros((block,), tl.float32) + divisor)
    if is_scaled:
        total = total * divisor
    tl.store(out + start + at, total.to(out.dtype.element_ty), mask=inside)
