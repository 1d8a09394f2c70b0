"""Which of PyTorch's tests are about DistributedDataParallel: those that come to name it.

Read from the source, so that nothing has to be imported to list them and a newer PyTorch's tests
are found without a list to keep.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
_HOLDER = "_DistTestBase"
_SUBJECT = "DistributedDataParallel"
_ASKS_FOR_GPUS = {"skip_if_no_gpu", "skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"}


def names_of_tests() -> list[str]:
    """Tests that build or call the class, themselves or through a helper; in the file's order."""
    named = {method.name: _names_in(method) for method in _methods()}
    return [
        name for name in named if name.startswith("test") and _reaches_subject(name, named, set())
    ]


def names_of_gpu_tests() -> list[str]:
    """Those of them that ask for GPUs."""
    asking = {
        method.name
        for method in _methods()
        if not _ASKS_FOR_GPUS.isdisjoint(_names_within(method.decorator_list))
    }
    return [name for name in names_of_tests() if name in asking]


def _methods() -> list[ast.FunctionDef]:
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == _HOLDER:
            return [part for part in node.body if isinstance(part, ast.FunctionDef)]
    raise LookupError(f"{SUITE} of this PyTorch has no {_HOLDER}")


def _names_in(method: ast.FunctionDef) -> set[str]:
    return _names_within(method.body)  # Without decorators: their texts name backends.


def _names_within(parts: Sequence[ast.AST]) -> set[str]:
    names = set()
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return names


def _reaches_subject(name: str, named: dict[str, set[str]], seen: set[str]) -> bool:
    if name in seen:
        return False
    seen.add(name)
    return _SUBJECT in named[name] or any(
        _reaches_subject(other, named, seen) for other in named[name] if other in named
    )
