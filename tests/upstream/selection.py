"""Which of PyTorch's tests are about DistributedDataParallel: those that come to name it.

Read from the source, so that nothing has to be imported to list them and a newer PyTorch's tests
are found without a list to keep.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
_HOLDER = "_DistTestBase"
_SUBJECT = "DistributedDataParallel"


def names_of_tests() -> list[str]:
    """Tests that build or call the class, themselves or through a helper; in the file's order."""
    named = {method.name: _names_in(method) for method in _methods()}
    return [
        name for name in named if name.startswith("test") and _reaches_subject(name, named, set())
    ]


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
    names = set()
    for statement in method.body:  # Without decorators: their texts name backends.
        for node in ast.walk(statement):
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
