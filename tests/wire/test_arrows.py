"""What both sides share stands below both, and needs nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import bagua_wire

MODULES = sorted(Path(bagua_wire.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_it_imports_the_standard_library_and_itself(path: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
    assert found - sys.stdlib_module_names <= {"bagua_wire"}
