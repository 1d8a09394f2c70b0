"""``strategy="bagua"`` trains to the weights of ``strategy="ddp"``, in both packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs
from tests.integrations.strategy.strategy_fits import Place
from tests.integrations.strategy.strategy_loops import CHECKS, check

pytestmark = pytest.mark.slow

IN_BOTH = (
    "equals ddp: plain",
    "resumed: qadam",
    "fabric: resumed",
)
"""The others would only show that Lightning is the same twice."""


@pytest.mark.parametrize("name", CHECKS)
@needs("lightning")
def test_lightning(arms: Arms, tmp_path: Path, name: str) -> None:
    arms.untouched.run(check, name, Place("lightning", str(tmp_path)))


@pytest.mark.parametrize("name", IN_BOTH)
@needs("pytorch_lightning")
def test_pytorch_lightning(arms: Arms, tmp_path: Path, name: str) -> None:
    arms.untouched.run(check, name, Place("pytorch_lightning", str(tmp_path)))
