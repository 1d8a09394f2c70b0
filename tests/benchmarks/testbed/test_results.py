"""What a script leaves in the folder of results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.testbed.__main__ import read_since, written

pytestmark = pytest.mark.slow


def test_only_what_is_new_or_changed_is_read(tmp_path: Path) -> None:
    for name in ("old", "changed"):
        (tmp_path / f"{name}.json").write_text("[1]")
        os.utime(tmp_path / f"{name}.json", (1, 1))
    before = written(tmp_path)
    (tmp_path / "changed.json").write_text("[2]")
    (tmp_path / "new.json").write_text("[3]")
    (tmp_path / "new.log").write_text("[4]")
    assert read_since(tmp_path, before) == ({"changed.json": [2], "new.json": [3]}, [])


def test_what_is_broken_is_named_and_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    (tmp_path / "c.json").write_text("[1]")
    found, problems = read_since(tmp_path, {})
    assert found == {"c.json": [1]}
    assert [text.split(" ")[0] for text in problems] == [
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
    ]
