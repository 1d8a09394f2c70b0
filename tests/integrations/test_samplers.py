"""Lightning feeds a training with what our samplers make, anew in each epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs
from tests.integrations.sampled_fits import kept, refused
from tests.integrations.strategy_fits import Place

pytestmark = needs("lightning")


@pytest.mark.parametrize(
    ("kind", "is_told"), [("sampler", True), ("sampler", False), ("batch sampler", True)]
)
def test_the_samplers_are_kept(arms: Arms, tmp_path: Path, kind: str, is_told: bool) -> None:
    arms.untouched.run(kept, Place("lightning", str(tmp_path)), kind, is_told)


def test_a_batch_sampler_that_lightning_may_replace_is_refused(arms: Arms, tmp_path: Path) -> None:
    for said in arms.untouched.run(refused, Place("lightning", str(tmp_path))):
        assert "use_distributed_sampler=False" in said
