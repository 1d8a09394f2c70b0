"""Which reduction begins a step."""

from __future__ import annotations

import gc
import weakref

import torch

from bagua_client.measuring.rank_measurement import StepBoundary


def _optimizer(parameter: torch.nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD([parameter], lr=0.1)


def test_several_reductions_before_an_optimizer_step_are_one_step() -> None:
    ours, others = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    boundary = StepBoundary([ours])
    optimizer, other_optimizer = _optimizer(ours), _optimizer(others)
    found = []
    for _ in range(3):
        for _ in range(3):
            found.append(boundary.begins())
            other_optimizer.step()
        optimizer.step()
    # Before the first optimizer step nobody can know.
    assert found == [True, True, True] + 2 * [True, False, False]
    boundary.close()


def test_without_a_torch_optimizer_every_reduction_is_a_step() -> None:
    ours, others = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    boundary = StepBoundary([ours])
    _optimizer(others).step()
    assert [boundary.begins() for _ in range(3)] == [True] * 3
    boundary.close()


def test_a_boundary_that_is_closed_or_gone_hears_of_no_optimizer() -> None:
    ours = torch.nn.Parameter(torch.ones(2))
    optimizer = _optimizer(ours)
    boundary = StepBoundary([ours])
    optimizer.step()
    boundary.begins()
    boundary.close()
    optimizer.step()
    assert not boundary.begins()
    gone = weakref.ref(boundary)
    del boundary
    gc.collect()
    assert gone() is None
    optimizer.step()


def test_parameters_that_come_to_an_optimizer_or_leave_it_later_are_seen() -> None:
    ours, others = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    boundary = StepBoundary([ours])
    optimizer = _optimizer(others)

    def steps() -> list[bool]:
        found = []
        for _ in range(2):
            optimizer.step()
            found += [boundary.begins(), boundary.begins()]
        return found

    assert steps() == [True] * 4  # as without an optimizer
    optimizer.add_param_group({"params": [ours]})
    assert steps() == [True, False] * 2
    optimizer.param_groups[1]["params"] = []
    assert steps()[1:] == [True] * 3
    optimizer.param_groups[0]["params"][0] = ours
    assert steps() == [True, False] * 2
    boundary.close()
