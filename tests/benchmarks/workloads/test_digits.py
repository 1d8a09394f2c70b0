"""The workload that trains for real."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import training
from benchmarks.workloads.training import gradient_sizes

pytest.importorskip("sklearn")

CPU = torch.device("cpu")


def test_a_step_trains_on_images_of_the_ranks_own() -> None:
    gradients = []
    for rank in (0, 1):
        workload = training({"workload": "digits"}, rank, CPU)
        model = workload.model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        workload.stepper(model)()
        changed = zip(before, model.parameters(), strict=True)
        assert all(not torch.equal(old, new) for old, new in changed)
        gradients.append(next(model.parameters()).grad)
    assert sum(gradient_sizes(model)) == pytest.approx(44.7e6, rel=0.01)
    assert not torch.equal(*gradients)
