"""Samples as bytes: pickled, with tensors of the CPU as NumPy arrays.

Torch pickles a tensor as a file of its own inside the pickle. For small tensors that takes longer
than all else (docs/data.md has the times), and of a view it has the whole storage.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
"""Torch works without it."""
_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64"
NUMBERS = frozenset(getattr(torch, name) for name in _NAMES.split())
"""Types that NumPy has, and that torch makes tensors of again."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        return torch.from_numpy, (obj.numpy(),)


def dumps(sample: object) -> bytes:
    """Pickle a value. Tensors that shared memory have each their own afterwards."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(sample)
    return buffer.getvalue()


loads = pickle.loads


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether an array says all that there is to it."""
    return (
        HAS_NUMPY
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.dtype in NUMBERS
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )
