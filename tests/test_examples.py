"""The examples that hypothesis makes: the same each time, or as a seed has it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow


def drawn() -> list[int]:
    """What a test of its own is given."""
    found: list[int] = []

    @settings(settings.get_profile("repeatable"), max_examples=500)
    @given(st.integers())
    def collect(number: int) -> None:
        found.append(number)

    collect()
    return found


def test_examples_do_not_depend_on_what_was_imported_before(tmp_path: Path) -> None:
    before = drawn()
    constants = tmp_path / "constants.py"
    constants.write_text("\n".join(f"C{n} = {9_000_000 + n}" for n in range(200)))
    spec = importlib.util.spec_from_file_location("constants_of_a_local_module", constants)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[spec.name])
        assert drawn() == before
    finally:
        del sys.modules[spec.name]
