"""The flat memory of a bucket and the views into it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.buckets.bucket import Bucket

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Contiguous, transposed, channels_last, with gaps, or expanded."""
    tensor = torch.zeros(draw(shapes))
    kind = draw(st.sampled_from(["contiguous", "permuted", "channels_last", "gaps", "expanded"]))
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if kind == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if kind == "gaps" and tensor.dim():
        return torch.cat([tensor, tensor], dim=-1)[..., ::2]
    if kind == "expanded" and tensor.dim():
        return torch.zeros(tensor.shape[-1]).expand(tensor.shape)
    return tensor


@given(items=st.lists(tensors(), min_size=1, max_size=6), multiple_of=st.integers(1, 5))
def test_each_element_has_one_place_in_the_flat_tensor(
    items: list[torch.Tensor], multiple_of: int
) -> None:
    bucket = Bucket(range(len(items)), items, multiple_of)
    for number, view in enumerate(bucket.views, start=1):
        view.add_(number)

    expected = [n for n, item in enumerate(items, start=1) for _ in range(item.numel())]
    assert bucket.flat[: len(expected)].tolist() == expected
    assert not bucket.flat[len(expected) :].any(), "the padding is zero"
    assert bucket.flat.numel() % multiple_of == 0
    assert bucket.flat.numel() < len(expected) + multiple_of
    assert [view.shape for view in bucket.views] == [item.shape for item in items]


def test_a_dense_tensor_keeps_its_strides_so_that_autograd_accumulates_in_place() -> None:
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    matrix = torch.zeros(3, 7).t()
    bucket = Bucket([0, 1], [image, matrix])
    assert [view.stride() for view in bucket.views] == [image.stride(), matrix.stride()]


def test_a_tensor_with_gaps_or_overlaps_is_packed() -> None:
    gaps = torch.zeros(4, 6)[:, ::2]
    overlaps = torch.zeros(3).expand(4, 3)
    bucket = Bucket([0, 1], [gaps, overlaps])
    assert [view.stride() for view in bucket.views] == [(3, 1), (3, 1)]


def test_the_bucket_has_the_dtype_of_its_tensors() -> None:
    assert Bucket([0], [torch.zeros(2, dtype=torch.bfloat16)]).flat.dtype is torch.bfloat16
