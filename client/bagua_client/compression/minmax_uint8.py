"""MinMaxUInt8: each number of a chunk as one byte between the chunk's minimum and its maximum.

Bagua's formula (Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB
2022; the kernels of release 0.9.2), all of it in float32, rounded half to even::

    scale = 255 / ((max - min) + 1e-7)
    upper = round(max * scale),  lower = upper - 255
    byte  = min(round(x * scale), upper) - lower
    x'    = (byte + lower) / scale

with two differences. A byte is clamped to 0 to 255: where a chunk's offset is large beside its
range the formula gives 256 or -1, which Bagua lets wrap round. A chunk that holds a number that is
not finite comes back as NaN everywhere, on all ranks alike, so that whoever looks for infinite
gradients finds them; Bagua gives finite numbers for some.

A number comes back within half of (max - min + 1e-7) / 255, and two units in the last place of the
chunk's largest magnitude. So numbers below 2e-10 in a chunk of such become 0. Chunks of magnitudes
above 1e29 may come back as NaN.

A compressed chunk is 32 bytes that begin with the minimum and the maximum, in the numbers' own
type, and then the bytes, filled up with zeros to a multiple of 32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import ModuleType

HEADER_BYTES = 32
EPSILON = 1e-7
TILE_ELEMENTS = 32 * 1024
"""What a processor's cache holds, with room for what is made of it: some passes go over each."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def compressed_bytes(elements: int) -> int:
    """Of a chunk of so many numbers."""
    return HEADER_BYTES + math.ceil(elements / HEADER_BYTES) * HEADER_BYTES


def compress(chunks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each row of ``chunks`` by itself.

    Args:
        chunks: (rows, elements), contiguous, of float32, float16 or bfloat16.
        out: uint8, (rows, ``compressed_bytes(elements)``), contiguous; None: it is made.

    Returns:
        ``out``. Equal bytes on a processor and on a GPU.

    Raises:
        ValueError: of another type, of another shape, or empty.
    """
    _check(chunks)
    rows, elements = chunks.shape
    if out is None:
        shape = rows, compressed_bytes(elements)
        out = torch.empty(shape, dtype=torch.uint8, device=chunks.device)
    if kernels := _kernels(chunks):
        kernels.compress(chunks, out)
        return out
    out[:, HEADER_BYTES + elements :] = 0
    low, high = (bound[:, None] for bound in chunks.aminmax(dim=1))
    is_finite = (high.float() - low.float()).isfinite()
    nan = torch.full_like(low, math.nan)
    header = out[:, :HEADER_BYTES].zero_().view(chunks.dtype)
    header[:, :1], header[:, 1:2] = (torch.where(is_finite, end, nan) for end in (low, high))
    for row in range(rows):
        scale, upper, lower = _constants(header[row])
        # No number means anything then; the bytes are 0 wherever they are made.
        means_all = is_finite.device.type == "cpu" and bool(is_finite[row])
        for start in range(0, elements, TILE_ELEMENTS):
            end = min(start + TILE_ELEMENTS, elements)
            levels = (chunks[row, start:end].float() * scale).round_().clamp_(max=upper)
            levels = levels.sub_(lower).clamp_(0, 255)
            if not means_all:
                levels = torch.where(is_finite[row], levels, 0.0)
            out[row, HEADER_BYTES + start : HEADER_BYTES + end] = levels
    return out


def decompress(
    compressed: torch.Tensor, out: torch.Tensor, divisor: float | None = None
) -> torch.Tensor:
    """The sum of the rows' numbers, the first row's first; of one row, those.

    Args:
        compressed: uint8, (rows, bytes), as :func:`compress` made them of numbers of the same type
            as ``out``.
        out: (elements,), contiguous; or (sums, elements), each of as many rows that follow one
            another.
        divisor: what each sum, in float32, is divided by; None: nothing.

    Returns:
        ``out``.
    """
    if kernels := _kernels(out):
        kernels.decompress(compressed, out, divisor)
        return out
    if out.dim() == 2:
        for rows, each in zip(compressed.chunk(len(out)), out, strict=True):
            decompress(rows, each, divisor)
        return out
    elements = out.numel()
    headers = compressed[:, :HEADER_BYTES].contiguous().view(out.dtype)
    constants = [_constants(header) for header in headers]
    for start in range(0, elements, TILE_ELEMENTS):
        end = min(start + TILE_ELEMENTS, elements)
        total: torch.Tensor | None = None
        for row, (scale, _, lower) in zip(compressed, constants, strict=True):
            part = row[HEADER_BYTES + start : HEADER_BYTES + end].float().add_(lower).div_(scale)
            total = part if total is None else total.add_(part)
        assert total is not None
        out[start:end] = total if divisor is None else total.div_(divisor)
    return out


def _constants(header: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, upper and lower of the chunk that begins so."""
    low, high = header[0].float(), header[1].float()
    # Not 255.0 / ..., which torch reckons as a product with the reciprocal, rounded twice.
    scale = torch.tensor(255.0, device=header.device) / ((high - low) + EPSILON)
    upper = (high * scale).round()
    return scale, upper, upper - 255.0


def _check(chunks: torch.Tensor) -> None:
    if chunks.dim() != 2 or not chunks.numel() or not chunks.is_contiguous():
        raise ValueError(
            "what is compressed must be (rows, elements), contiguous and not empty; this is "
            f"{tuple(chunks.shape)}"
        )
    if chunks.dtype not in DTYPES:
        raise ValueError(f"{chunks.dtype} cannot be compressed to 8 bits; known are {DTYPES}")


def _kernels(tensor: torch.Tensor) -> ModuleType | None:
    """Those for a GPU, where Triton is there; else torch's own operations do it in more passes."""
    if tensor.device.type != "cuda":
        return None
    try:
        from bagua_client.compression import triton_kernels
    except ImportError:
        return None
    return triton_kernels
