"""Eight bits for a number: Bagua's bytes, how near numbers come back, and what is never lost."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers

from bagua_client.compression import (
    RANGE_ELEMENTS,
    TILE_ELEMENTS,
    compress,
    compressed_bytes,
    decompress,
)
from tests.outside import BAGUA, folder_of

EPSILON = np.float32(1e-7)
LARGEST = float(np.float32(1e28))
"""Of what comes back near; chunks of 1e29 and more may come back as NaN."""


def _upstream() -> ModuleType:
    """The quantiser that Bagua tests its own kernels with."""
    path = folder_of(BAGUA) / "tests" / "internal" / "compressor.py"
    spec = importlib.util.spec_from_file_location("upstream_compressor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _there_and_back(chunk: torch.Tensor) -> torch.Tensor:
    return decompress(compress(chunk[None]), torch.empty_like(chunk))


def test_the_bytes_are_those_of_bagua_where_nothing_is_clamped() -> None:
    upstream = _upstream().MinMaxUInt8()
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for turn in range(1200):
        elements = int(torch.randint(1, 400, (1,), generator=generator))
        scale = 10.0 ** float(torch.empty(1).uniform_(-6, 6, generator=generator))
        chunk = torch.randn(elements, generator=generator) * scale
        bounds, levels = upstream.compress(chunk)
        high, low = chunk.max(), chunk.min()
        steps = 255.0 / (high - low + upstream.eps)
        upper = torch.round(high * steps)
        raw = torch.clamp(torch.round(chunk * steps), max=upper) - (upper - 255.0)
        if raw.min() < 0 or raw.max() > 255:
            continue  # Bagua's byte wraps round
        compared += 1
        ours = compress(chunk[None])[0]
        assert torch.equal(ours[:8].view(torch.float32), bounds), turn
        assert torch.equal(ours[32 : 32 + elements], levels), turn
        back = decompress(ours[None], torch.empty_like(chunk))
        # Upstream's test multiplies by a reciprocal where its kernel divides.
        torch.testing.assert_close(back, upstream.decompress(bounds, levels), rtol=3e-7, atol=0)
    assert compared >= 1000


FINITE = st.floats(-LARGEST, LARGEST, width=32)
CHUNKS = numbers.arrays(np.float32, st.integers(1, 70), elements=FINITE)
OFFSET_CHUNKS = st.builds(
    lambda values, offset, scale: np.float32(offset) + np.float32(scale) * values,
    numbers.arrays(np.float32, st.integers(1, 70), elements=st.floats(-1, 1, width=32)),
    st.sampled_from([0.0, 1.0, -1000.0, 1e6, 1e20, -LARGEST]),
    st.sampled_from([0.0, 1e-40, 1e-12, 1e-3, 1.0, 1e9, 1e28]),
)


@given(st.one_of(CHUNKS, OFFSET_CHUNKS))
def test_a_number_comes_back_within_half_a_level_and_two_units_in_the_last_place(
    chunk: np.ndarray,
) -> None:
    back = _there_and_back(torch.from_numpy(chunk)).numpy().astype(np.float64)
    level = (np.float64(chunk.max()) - np.float64(chunk.min()) + np.float64(EPSILON)) / 255
    largest = np.abs(chunk).max()
    bound = 0.5 * level + 2 * np.float64(np.spacing(largest))
    assert np.abs(back - chunk).max() <= bound * (1 + 1e-6)


@given(CHUNKS, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_chunk_with_a_number_that_is_not_finite_is_nan_everywhere_and_no_other_chunk(
    chunk: np.ndarray, odd: float, data: st.DataObject
) -> None:
    chunks = torch.from_numpy(np.stack([chunk, chunk]))
    chunks[0, data.draw(st.integers(0, len(chunk) - 1))] = odd
    packed = compress(chunks)
    out = torch.empty(len(chunk))
    assert decompress(packed[:1], out).isnan().all()
    assert decompress(packed[1:], out).isfinite().all()
    assert decompress(packed, out, 2.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 31, 32, 33, 2 * TILE_ELEMENTS, 2 * TILE_ELEMENTS + 5])
def test_a_compressed_chunk_has_a_header_and_is_filled_up_with_zeros(
    dtype: torch.dtype, elements: int
) -> None:
    torch.manual_seed(elements)
    chunks = torch.randn(3, elements).to(dtype)
    dirty = torch.full((3, compressed_bytes(elements)), 77, dtype=torch.uint8)
    packed = compress(chunks, dirty)
    assert packed is dirty
    assert packed.shape[1] % 32 == 0
    header = packed[:, :32].contiguous().view(dtype)
    assert torch.equal(header[:, 0], chunks.min(dim=1).values)
    assert torch.equal(header[:, 1], chunks.max(dim=1).values)
    assert not header[:, 2:].any()
    assert not packed[:, 32 + elements :].any()
    # All is reckoned in float32, whatever the numbers' own type.
    assert torch.equal(packed[:, 32:], compress(chunks.float())[:, 32:])
    back = decompress(packed[1:2], torch.empty_like(chunks[1])).float()
    level = float(chunks[1].float().max() - chunks[1].float().min()) / 255
    assert (back - chunks[1].float()).abs().max() <= 0.5 * level + 0.02  # bfloat16's own rounding


def test_a_sum_adds_in_the_order_of_the_rows_and_divides_last() -> None:
    torch.manual_seed(0)
    chunks = torch.randn(3, 1000)
    packed = compress(chunks)
    one, two, three = (decompress(packed[i : i + 1], torch.empty(1000)) for i in range(3))
    assert torch.equal(decompress(packed, torch.empty(1000), 3.0), ((one + two) + three) / 3.0)


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        (torch.zeros(4), "rows, elements"),
        (torch.zeros(0, 4), "not empty"),
        (torch.zeros(4, 4).t()[:2], "contiguous"),
        (torch.zeros(1, 4, dtype=torch.float64), "float64"),
    ],
)
def test_what_cannot_be_compressed_is_refused(chunks: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compress(chunks)


@given(
    st.integers(1, 3),
    st.integers(1, 3 * TILE_ELEMENTS),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1024, RANGE_ELEMENTS, 4 * TILE_ELEMENTS]),
    st.data(),
)
def test_a_range_is_compressed_as_a_chunk_of_its_own(
    rows: int, elements: int, dtype: torch.dtype, range_elements: int, data: st.DataObject
) -> None:
    chunks = torch.randn(rows, elements, generator=torch.Generator().manual_seed(elements))
    chunks = (chunks * torch.linspace(1, 1000, elements)).to(dtype)
    if data.draw(st.booleans()):
        chunks[0, data.draw(st.integers(0, elements - 1))] = math.inf
    packed = compress(chunks, None, range_elements)
    assert packed.shape == (rows, compressed_bytes(elements, range_elements))
    parts = chunks.split(range_elements, dim=1)
    there_and_back = [_each_row(compress(part.contiguous()), part) for part in parts]
    expected = torch.cat(there_and_back, dim=1)
    back = decompress(packed, torch.empty_like(chunks), None, range_elements)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)
    total = decompress(packed, torch.empty_like(chunks[0]), 3.0, range_elements)
    summed = [
        decompress(compress(part.contiguous()), torch.empty_like(part[0]), 3.0) for part in parts
    ]
    torch.testing.assert_close(total, torch.cat(summed), rtol=0, atol=0, equal_nan=True)
    if len(parts) == 1:
        assert torch.equal(packed, compress(chunks))


def _each_row(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return decompress(packed, torch.empty(like.shape, dtype=like.dtype))


@pytest.mark.parametrize("range_elements", [0, 512, 3 * 1024])
def test_ranges_that_a_gpus_programs_cannot_have_in_hand_are_refused(range_elements: int) -> None:
    with pytest.raises(ValueError, match="must have 1024, 2048"):
        compress(torch.zeros(1, 5000), None, range_elements)
