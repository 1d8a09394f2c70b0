"""What a fused optimizer does is what it would have done, in fewer calls."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_client import Configuration, DistributedDataParallel
from bagua_training.optimizers import fuse_optimizer, fused_step, is_fused_optimizer
from tests.ranks import RankPool
from tests.training.optimizers.loops import LoopAdam
from tests.training.optimizers.strangers import Stranger
from tests.training.optimizers.twins import Twins, fused_count

pytestmark = pytest.mark.slow


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
    assert twins.fused_count == 10


def test_a_scale_that_overflowed_skips_the_step() -> None:
    twins = Twins(LoopAdam, replace_step=True)
    twins.backward()
    before = [parameter.clone() for parameter in twins.parameters()[0]]
    twins.parameters()[0][1].grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    scaler.step(twins.fused)
    assert all(map(torch.equal, before, twins.parameters()[0]))


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
    assert twins.fused_count == 6


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
    assert twins.fused_count == 0


def test_twice_is_an_error_and_lbfgs_is_refused() -> None:
    twins = Twins(LoopAdam)
    assert is_fused_optimizer(twins.fused)
    assert not is_fused_optimizer(twins.plain)
    with pytest.raises(RuntimeError, match="fused already"):
        fuse_optimizer(twins.fused)
    with pytest.raises(ValueError, match="LBFGS calls the closure itself"):
        fuse_optimizer(torch.optim.LBFGS(nn.Linear(2, 1).parameters()))


def test_types_are_not_mixed() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    model[2:4].double()
    model[4:].bfloat16()
    twins = Twins(LoopAdam, model)
    for _ in range(3):
        for ours, theirs in zip(*twins.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=twins.generator).to(ours.dtype)
            theirs.grad = ours.grad.clone()
        twins.fused.fuse_step()
        twins.plain.step()
        # Torch rounds sums of bfloat16 differently in longer tensors.
        torch.testing.assert_close(*twins.parameters())
    assert twins.fused_count == 6


def test_sparse_gradients_are_stepped_alone() -> None:
    model = nn.ModuleList([nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)])
    twins = Twins(lambda groups: torch.optim.SGD(groups, lr=0.1), model)
    for number in range(3):
        for found in (twins.fused_model, twins.plain_model):
            found.zero_grad()
            rows = found[0](torch.tensor([number, 5]))
            found[2](found[1](rows)).sum().backward()
        twins.fused.fuse_step()
        twins.plain.step()
        twins.check()
    assert twins.fused_count == 6


def test_large_parameters_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused_step.MOST_ELEMENTS, "cpu", 30 * fused_step.FEWEST_PARAMETERS)
    twins = Twins(LoopAdam, nn.Sequential(*(nn.Linear(6, 6) for _ in range(30))))
    addresses = [parameter.data_ptr() for parameter in twins.parameters()[0][::2]]
    seen: list[int] = []
    twins.steps(3)
    update = LoopAdam.update
    with monkeypatch.context() as patch:
        patch.setattr(
            LoopAdam,
            "update",
            lambda self, p, *rest: (seen.append(p.numel()), update(self, p, *rest)),
        )
        twins.backward()
        twins.fused.fuse_step()
    assert addresses == [parameter.data_ptr() for parameter in twins.parameters()[0][::2]]
    # The biases are two long ones, as all of them would be over 120 elements.
    assert seen == [*[36] * 30, 120, 60]


def test_a_group_that_is_added_later_is_fused() -> None:
    twins = Twins(LoopAdam)
    twins.steps(3)
    added = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    copied = copy.deepcopy(added)
    twins.fused.add_param_group({"params": list(added.parameters()), "lr": 0.1})
    twins.plain.add_param_group({"params": list(copied.parameters()), "lr": 0.1})
    twins.fused_model.append(added)
    twins.plain_model.append(copied)
    before = twins.fused_count
    twins.steps(3)
    assert twins.fused_count == before + 9


def test_a_state_from_before_it_was_fused_goes_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made: list[LoopAdam] = []

    def trained(groups: Any) -> LoopAdam:
        optimizer = LoopAdam(groups)
        generator = torch.Generator().manual_seed(3)
        for parameter in (p for group in groups for p in group["params"]):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        made.append(optimizer)
        return optimizer

    twins = Twins(trained, model)
    twins.steps(3)
    assert [state["step"] for state in made[1].state.values()] == [4] * 4


def unpickled(found: Any) -> Any:
    return pickle.loads(pickle.dumps(found))


def saved(found: Any) -> Any:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class WithAll(torch.optim.RMSprop):
    """Keeps all its attributes in copies, as torch's do not."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@pytest.mark.parametrize(
    ("made", "copied"),
    [
        (torch.optim.RMSprop, copy.deepcopy),
        (Stranger, unpickled),
        (WithAll, copy.deepcopy),
        (WithAll, saved),
    ],
)
def test_a_copy_is_a_fused_optimizer_of_its_own(made: Any, copied: Any) -> None:
    twins = Twins(made, replace_step=True)
    twins.steps(3)
    first, first_model = twins.fused, twins.fused_model
    twins.fused_model, twins.fused = copied((twins.fused_model, twins.fused))
    assert is_fused_optimizer(twins.fused)
    assert twins.fused is not first
    before = [parameter.clone() for parameter in first_model.parameters()]
    twins.steps(3)
    twins.backward()
    twins.fused.step()  # replaced, too
    twins.plain.step()
    twins.check()
    assert twins.fused_count == 8
    assert all(map(torch.equal, before, first_model.parameters()))
    assert fused_count(first) == 6


def test_weights_that_share_memory_go_on_sharing_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    fuse_optimizer(LoopAdam(model.parameters()))
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


def test_in_a_compiled_function_it_steps_as_ever() -> None:
    twins = Twins(LoopAdam, replace_step=True)
    step = torch.compile(lambda: twins.fused.step(), backend="eager")
    for number in range(6):
        twins.backward()
        (step if number in (1, 2, 4) else twins.fused.step)()
        twins.plain.step()
        torch.testing.assert_close(*twins.parameters())
    assert {state["step"] for state in twins.fused.state.values()} == {6}
    assert twins.fused_count == 6


def test_a_scheduler_from_before_it_was_fused_sees_the_steps() -> None:
    optimizer = LoopAdam(nn.Linear(3, 3).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fuse_optimizer(optimizer, replace_step=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0005


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
        assert not is_fused or fused_count(optimizer) == 12
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("as_views", [True, False])
def test_under_re_cut_buckets_the_numbers_are_right(two_ranks: RankPool, as_views: bool) -> None:
    assert two_ranks.run(_with_recuts, as_views) == [True, True]


def test_hooks_see_the_optimizer_itself_and_once() -> None:
    twins = Twins(LoopAdam)
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    twins.backward()
    twins.fused.fuse_step()
    handle.remove()
    assert len(seen) == 1
    assert seen[0] is twins.fused
