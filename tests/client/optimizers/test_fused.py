"""What a fused optimizer does is what it would have done, in fewer calls."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.optimizers import fuse_optimizer, is_fused_optimizer
from tests import bagua_tests
from tests.bagua_release import release_path
from tests.client.optimizers.loops import LoopAdam, LoopLamb, Replacing
from tests.ranks import RankPool


class Twins:
    """A model and a copy of it, each with an optimizer, of which the first is fused."""

    def __init__(self, made: Any, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.fused_model = model or nn.Sequential(
            nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)
        )
        self.plain_model = copy.deepcopy(self.fused_model)
        self.plain = made(groups_of(self.plain_model))
        self.fused = fuse_optimizer(made(groups_of(self.fused_model)), **options)
        self.generator = torch.Generator().manual_seed(1)

    def backward(self, unused: tuple[int, ...] = ()) -> None:
        """Gradients that are new each time; some parameters have none."""
        for ours, theirs in zip(*self.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=self.generator)
            theirs.grad = ours.grad.clone()
        for place in unused:
            for parameters in self.parameters():
                parameters[place].grad = None

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.fused_model.parameters()), list(self.plain_model.parameters())

    def check(self) -> None:
        for ours, theirs in zip(*self.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        ours, theirs = self.fused.state_dict(), self.plain.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for place, state in ours["state"].items():
            assert state.keys() == theirs["state"][place].keys()
            for name, value in state.items():
                other = theirs["state"][place][name]
                assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two: weights and biases."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.02}]


@pytest.mark.parametrize("made", [LoopAdam, Replacing, torch.optim.Adam, torch.optim.ASGD])
def test_steps_are_the_plain_ones(made: Any) -> None:
    twins = Twins(made)
    for number in range(12):
        twins.backward()
        # Both ways in turns, as Bagua's own test has it.
        (twins.fused.fuse_step if number % 3 else twins.fused.step)()
        twins.plain.step()
        twins.check()
    assert twins.fused._bagua_fused_count == 2 * 8


def test_it_steps_once_over_all_of_a_group() -> None:
    twins = Twins(LoopAdam)
    seen: list[int] = []
    update = LoopAdam.update
    for number in range(4):  # the first two are compared with plain ones
        twins.backward()
        seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                LoopAdam,
                "update",
                lambda self, p, *rest: (seen.append(p.numel()), update(self, p, *rest)),
            )
            twins.fused.fuse_step()
        assert (seen == [53, 9]) is (number > 1)
    assert twins.fused.calls == 4


def test_parameters_without_gradients_are_left_alone() -> None:
    """And have made fewer steps than the others from then on."""
    twins = Twins(LoopAdam)
    for unused in [(), (2,), (2, 3), (), (0, 5), ()]:
        twins.backward(unused)
        twins.fused.fuse_step()
        twins.plain.step()
        twins.check()
    steps = [state["step"] for state in twins.fused.state_dict()["state"].values()]
    assert sorted(set(steps)) == [4, 5, 6]


def test_from_fused_to_unfused_and_back() -> None:
    twins = Twins(LoopAdam)
    for _ in range(3):
        for _ in range(3):
            twins.backward()
            twins.fused.fuse_step()
            twins.plain.step()
        saved = io.BytesIO()
        torch.save(twins.fused.state_dict(), saved)
        saved.seek(0)
        # Each continues with what the other saved.
        state = torch.load(saved)
        twins.fused.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
        twins.plain.load_state_dict(state)
        twins.check()


def test_schedulers_closures_scalers_and_hooks() -> None:
    twins = Twins(LoopAdam, replace_step=True)
    pair = (twins.fused, twins.plain)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in pair]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in pair]
    hooked: list[str] = []
    twins.fused.register_step_pre_hook(lambda *_: hooked.append("before"))
    twins.fused.register_step_post_hook(lambda *_: hooked.append("after"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: pytest.fail("a scheduler missed the step"))
        for number in range(5):
            twins.backward()
            for optimizer, scaler, scheduler in zip(pair, scalers, schedulers, strict=True):
                if number == 3:
                    assert optimizer.step(lambda: 17.0) == 17.0
                else:
                    scaler.scale(torch.tensor(1.0))
                    scaler.step(optimizer)
                    scaler.update()
                scheduler.step()
            twins.check()
    assert hooked == ["before", "after"] * 5
    assert twins.fused._bagua_fused_count == 10


def test_a_scale_that_overflowed_skips_the_step() -> None:
    twins = Twins(LoopAdam, replace_step=True)
    twins.backward()
    before = [parameter.clone() for parameter in twins.parameters()[0]]
    twins.parameters()[0][1].grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    scaler.step(twins.fused)
    assert all(map(torch.equal, before, twins.parameters()[0]))


def test_lamb_is_refused_with_a_sentence_and_steps_as_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twins = Twins(LoopLamb)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            twins.backward()
            twins.fused.fuse_step()
            twins.plain.step()
            twins.check()
    (record,) = caplog.records
    assert record.message.startswith(
        "LoopLamb is not fused: in step 1 the fused result would differ"
    )
    assert twins.fused._bagua_fused_count == 0
    assert twins.fused.calls == 3


def test_images_keep_their_order_in_memory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(
        memory_format=torch.channels_last
    )
    twins = Twins(LoopAdam, model)
    for _ in range(3):
        twins.backward()
        twins.fused.fuse_step()
        twins.plain.step()
        twins.check()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert twins.fused._bagua_fused_count == 6


def test_weights_that_somebody_moved_are_found_again() -> None:
    twins = Twins(LoopAdam)
    for _ in range(3):
        twins.backward()
        twins.fused.fuse_step()
        twins.plain.step()
        for parameter in twins.parameters()[0]:
            parameter.data = parameter.data.clone()
        twins.check()


def test_without_flattening_only_neighbours_are_fused() -> None:
    twins = Twins(LoopAdam, do_flatten=False)
    addresses = [parameter.data_ptr() for parameter in twins.parameters()[0]]
    twins.backward()
    twins.fused.fuse_step()
    twins.plain.step()
    twins.check()
    assert [parameter.data_ptr() for parameter in twins.parameters()[0]] == addresses
    assert twins.fused._bagua_fused_count == 0


def test_twice_is_an_error_and_lbfgs_is_refused() -> None:
    twins = Twins(LoopAdam)
    assert is_fused_optimizer(twins.fused)
    assert not is_fused_optimizer(twins.plain)
    with pytest.raises(RuntimeError, match="fused already"):
        fuse_optimizer(twins.fused)
    with pytest.raises(ValueError, match="LBFGS calls the closure itself"):
        fuse_optimizer(torch.optim.LBFGS(nn.Linear(2, 1).parameters()))


def _with_recuts(as_views: bool) -> bool:
    """Whether a fused training on several ranks, re-cut on the way, equals a plain one."""
    found = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        layers = [nn.Linear(40, 40) for _ in range(6)]
        model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=as_views)
        optimizer = LoopAdam(model.parameters(), lr=0.01)
        step = fuse_optimizer(optimizer).fuse_step if is_fused else optimizer.step
        for number in range(12):
            if number % 3 == 0:
                size = (4096, 20_000, 1 << 20)[number // 3 % 3]
                assert model.reconfigure(Configuration(bucket_bytes=size))
            model(torch.ones(2, 40) * number).square().mean().backward()
            step()
            optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        assert not is_fused or optimizer._bagua_fused_count == 12  # type: ignore[attr-defined]
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("as_views", [True, False])
def test_under_re_cut_buckets_the_numbers_are_right(two_ranks: RankPool, as_views: bool) -> None:
    assert two_ranks.run(_with_recuts, as_views) == [True, True]


def test_bagua_s_own_tests_pass(tmp_path: Path) -> None:
    """21 settings of torch's optimizers, 101 steps each; mutual groups. Six others are for GPUs."""
    printed = bagua_tests.run("test_fused_optimizer", release_path(), tmp_path)
    assert "Ran 8 tests" in printed
    assert "OK (skipped=6)" in printed
