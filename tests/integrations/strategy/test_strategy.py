"""``strategy="bagua"`` trains to the weights of ``strategy="ddp"``, in both packages; Lightning
feeds a training with what our samplers make, anew in each epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.arms import needs
from tests.integrations.conftest import Arms
from tests.integrations.strategy.sampled_fits import (
    check_by_length,
    check_kept,
    said_of_a_batch_sampler,
)
from tests.integrations.strategy.strategy_fits import Place
from tests.integrations.strategy.strategy_loops import CHECKS, check

pytestmark = pytest.mark.slow

IN_BOTH = ("equals ddp: plain", "by name: qadam", "fabric: resumed")
"""The others would only show that Lightning is the same twice."""


@pytest.mark.parametrize("name", CHECKS)
@needs("lightning")
def test_lightning(arms: Arms, tmp_path: Path, name: str) -> None:
    arms.untouched.run(check, name, Place("lightning", str(tmp_path)))


@pytest.mark.parametrize("name", IN_BOTH)
@needs("pytorch_lightning")
def test_pytorch_lightning(arms: Arms, tmp_path: Path, name: str) -> None:
    arms.untouched.run(check, name, Place("pytorch_lightning", str(tmp_path)))


@needs("lightning")
def test_the_sampler_is_kept(arms: Arms, tmp_path: Path) -> None:
    """Though the user does not say so."""
    arms.untouched.run(check_kept, Place("lightning", str(tmp_path)))


@needs("lightning")
def test_batches_may_be_more_or_fewer_from_epoch_to_epoch(arms: Arms, tmp_path: Path) -> None:
    arms.untouched.run(check_by_length, Place("lightning", str(tmp_path)))


@needs("lightning")
def test_a_batch_sampler_that_lightning_may_replace_is_refused(arms: Arms, tmp_path: Path) -> None:
    for said in arms.untouched.run(said_of_a_batch_sampler, Place("lightning", str(tmp_path))):
        assert "use_distributed_sampler=False" in said
