"""The examples that hypothesis makes: the same each time, or as a seed has it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).with_name("conftest.py")
ROOT = CONFTEST.parents[1]
OF_HYPOTHESIS = ("-p", "_hypothesis_pytestplugin")


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


def test_a_run_repeats_its_examples_unless_it_is_to_find_others(tmp_path: Path) -> None:
    test, told = tmp_path / "test_drawn.py", tmp_path / "told"
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    test.write_text(
        "from hypothesis import given, strategies as st\n"
        "@given(st.integers())\n"
        "def test_drawn(number):\n"
        f"    print(number, file=open({str(told)!r}, 'a'))\n"
    )

    def run(*arguments: str) -> str:
        told.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *OF_HYPOTHESIS]
        # A caller's options are for the run around it.
        alone = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
        alone["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take seconds
        subprocess.run([*command, *arguments, str(test)], cwd=tmp_path, check=True, env=alone)
        return told.read_text()

    once, seeded, otherwise, again = (
        run(*(("--hypothesis-profile", "fuzz", "--hypothesis-seed", seed) if seed else ()))
        for seed in ("", "1", "2", "1")
    )
    assert seeded == again
    assert len({once, seeded, otherwise}) == 3
