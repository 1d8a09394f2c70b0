"""The operations that treat each element by itself, by name.

What is not in these lists is not known to. They name no reduction, nothing that depends on a shape
or a dimension, and nothing random.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

_ARITHMETIC = """
    abs absolute add addcdiv addcmul ceil clamp clamp_max clamp_min clip copysign div divide exp
    exp2 expm1 floor floor_divide fmax fmin fmod frac hypot lerp log log10 log1p log2 logaddexp
    logaddexp2 maximum minimum mul multiply nan_to_num neg negative pow reciprocal remainder round
    rsqrt rsub sgn sign sqrt square sub subtract true_divide trunc xlogy
"""
_FUNCTIONS = """
    acos acosh asin asinh atan atan2 atanh cos cosh deg2rad erf erfc erfinv rad2deg sigmoid sin sinc
    sinh softsign tan tanh relu heaviside lgamma digamma
"""
_COMPARISONS = """
    bitwise_and bitwise_not bitwise_or bitwise_xor eq ge greater greater_equal gt isfinite isinf
    isnan isneginf isposinf le less less_equal logical_and logical_not logical_or logical_xor lt
    masked_fill ne signbit threshold where
"""
ELEMENT_WISE = frozenset((_ARITHMETIC + _FUNCTIONS + _COMPARISONS).split())
_COPIES = "bfloat16 clone contiguous copy_ detach detach_ double fill_ float half to type type_as"
METHODS = ELEMENT_WISE | {*_COPIES.split(), "zero_"}
"""Methods of a tensor."""
_LIKE = "clone empty_like full_like ones_like view_as_complex view_as_real zeros_like"
LIKE = frozenset(_LIKE.split())
"""Functions of torch whose result is like their first argument."""
ATTRIBUTES = {
    "data": True,
    "grad": True,
    "device": False,
    "dtype": False,
    "is_cuda": False,
    "layout": False,
    "requires_grad": False,
}
"""Attributes of a tensor, and whether each is a tensor, too."""
NEVER = frozenset(["is_complex", "is_sparse"])
"""Questions with the answer no, for a tensor that is stepped as one with others."""
ASKED = frozenset(["is_floating_point", "is_tensor"])
"""Questions whose answer is the same for all tensors that are stepped as one."""
_MADE = "as_tensor device empty finfo full ones scalar_tensor tensor zeros"
MADE = frozenset(_MADE.split())
"""Functions of torch that make something of numbers alone."""
WITH_A_SHAPE = frozenset(["empty", "full", "ones", "zeros"])
OF_NUMBERS = frozenset(["clone", "copy", "get", "item", "items", "keys", "tolist", "values"])
"""What may be asked of numbers and of containers of them; not what changes one."""
CONTEXTS = ("no_grad", "enable_grad", "set_grad_enabled", "inference_mode")


def _functions(names: frozenset[str]) -> list[Any]:
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


FUNCTIONS = [*_functions(ELEMENT_WISE | LIKE), copy.deepcopy, abs, pow]
TORCH_NEVER = _functions(NEVER)
TORCH_ASKED = _functions(ASKED)
TORCH_MADE = _functions(MADE)
TORCH_WITH_A_SHAPE = _functions(WITH_A_SHAPE)
TORCH_CONTEXTS = _functions(frozenset(CONTEXTS))
TORCH_FILLED = [torch.nn.init.constant_, torch.nn.init.ones_, torch.nn.init.zeros_]
TORCH_OF_TWO = [torch.max, torch.min]
"""Functions that are element-wise on two tensors, and reductions on one."""
TORCH_LISTS = [
    getattr(torch, found)
    for name in ELEMENT_WISE | {"copy", "zero"}
    for found in (f"_foreach_{name}", f"_foreach_{name}_")
    if hasattr(torch, found)
]
PURE = [bool, complex, dict, divmod, float, int, max, min, repr, round, str, sum, tuple]
PURE += [*TORCH_MADE, *(value for value in vars(math).values() if callable(value))]
"""Functions of numbers alone: the result depends on nothing else."""


def is_one_of(value: Any, functions: list[Any]) -> bool:
    """Whether the value is one of the functions, by identity: not everything can be compared."""
    return any(value is each for each in functions)
