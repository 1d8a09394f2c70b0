"""On a GPU, too, a fused step is the plain one, and torch's kernels are used where it has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.training.optimizers.strangers import LoopAdam
from tests.training.optimizers.twins import Twins

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def twins_of(made: Any, **options: Any) -> Twins:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).cuda()
    return Twins(made, model, **options)


def steps(twins: Twins, name: str) -> None:
    for _ in range(11):
        twins.backward()
        getattr(twins.fused, name)()
        twins.plain.step()
        torch.testing.assert_close(*twins.parameters())


@pytest.mark.parametrize(
    "made",
    # ASGD has counts on the GPU.
    [LoopAdam, torch.optim.Adam, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.NAdam],
)
def test_fuse_step_is_the_plain_step(made: Any) -> None:
    twins = twins_of(made)
    steps(twins, "fuse_step")
    assert twins.fused_count == 22


def test_the_host_does_not_wait_for_the_gpu() -> None:
    twins = twins_of(LoopAdam)
    steps(twins, "fuse_step")
    twins.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        twins.fused.fuse_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("made", "way"),
    [
        (torch.optim.Adam, "fused"),
        (torch.optim.SGD, "fused"),
        (torch.optim.RMSprop, "foreach"),
        (torch.optim.ASGD, "foreach"),
        (lambda groups: torch.optim.Adam(groups, capturable=True, foreach=True), "foreach"),
    ],
)
def test_replacing_the_step_uses_torchs_kernels(
    made: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bagua_training")
    twins = twins_of(made, replace_step=True)
    assert f"torch's own {way} kernels" in caplog.text
    steps(twins, "step")
    assert twins.fused_count == 0
