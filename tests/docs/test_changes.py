"""The files in changes/ are named as changes/README.md says, so that none is lost at a release."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "changes"
KINDS = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)


def test_each_change_has_a_kind_and_says_something() -> None:
    assert len(KINDS) == 6
    for path in FOLDER.iterdir():
        if path.name != "README.md":
            assert re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
            assert path.read_text().strip(), path.name
