"""What a fused optimizer does is what it would have done, in fewer calls, by torch's kernels over
many tensors where it has some."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_client import Configuration, DistributedDataParallel
from bagua_training.optimizers import fuse_optimizer, fused_step, is_fused_optimizer
from bagua_training.optimizers.reading import read
from tests.ranks import RankPool
from tests.training.optimizers.strangers import LoopAdam, Stranger
from tests.training.optimizers.twins import Twins, fused_count

pytestmark = pytest.mark.slow


def sizes_of_updates(twins: Twins) -> list[int]:
    """The elements of each parameter that a step updates, in turn."""
    seen: list[int] = []
    update = LoopAdam.update
    twins.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LoopAdam,
            "update",
            lambda self, p, *rest: (seen.append(p.numel()), update(self, p, *rest)),
        )
        twins.fused.fuse_step()
    return seen


def test_it_steps_once_over_all_of_a_group() -> None:
    twins = Twins(LoopAdam)
    for number in range(4):  # the first two are compared with plain ones
        assert (sizes_of_updates(twins) == [53, 9]) is (number > 1)
    assert twins.fused.calls == 4


def test_parameters_without_gradients_are_left_alone() -> None:
    """And have made fewer steps than the others from then on."""
    twins = Twins(LoopAdam)
    for unused in [(), (2,), (2, 3), (), (0, 5), ()]:
        twins.steps(1, unused=unused)
    steps = [state["step"] for state in twins.fused.state_dict()["state"].values()]
    assert sorted(set(steps)) == [4, 5, 6]


def test_from_fused_to_unfused_and_back() -> None:
    twins = Twins(LoopAdam)
    for _ in range(3):
        twins.steps(3)
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
    twins.steps(3)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert twins.fused_count == 6


def test_weights_that_somebody_moved_are_found_again() -> None:
    twins = Twins(LoopAdam)
    for _ in range(3):
        twins.steps(1)
        for parameter in twins.parameters()[0]:
            parameter.data = parameter.data.clone()


def test_without_flattening_only_neighbours_are_fused() -> None:
    twins = Twins(LoopAdam, do_flatten=False)
    addresses = [parameter.data_ptr() for parameter in twins.parameters()[0]]
    twins.steps(1)
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


@pytest.mark.parametrize("is_replaced", [False, True])
def test_sparse_gradients_are_stepped_alone_or_as_torch_can(is_replaced: bool) -> None:
    model = nn.ModuleList([nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)])
    twins = Twins(lambda groups: SGD(groups, lr=0.1), model, replace_step=is_replaced)
    assert bool(twins.fused.param_groups[0]["fused"]) is is_replaced
    for number in range(3):
        for found in (twins.fused_model, twins.plain_model):
            found.zero_grad()
            rows = found[0](torch.tensor([number, 5]))
            found[2](found[1](rows)).sum().backward()
        (twins.fused.step if is_replaced else twins.fused.fuse_step)()
        twins.plain.step()
        if not is_replaced:
            twins.check()
        torch.testing.assert_close(*twins.parameters())
    assert twins.fused_count == (0 if is_replaced else 6)


def test_large_parameters_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused_step.MOST_ELEMENTS, "cpu", 30 * fused_step.FEWEST_PARAMETERS)
    twins = Twins(LoopAdam, nn.Sequential(*(nn.Linear(6, 6) for _ in range(30))))
    addresses = [parameter.data_ptr() for parameter in twins.parameters()[0][::2]]
    twins.steps(3)
    seen = sizes_of_updates(twins)
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


class WithAll(RMSprop):
    """Keeps all its attributes in copies, as torch's do not."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@pytest.mark.parametrize(
    ("made", "copied"),
    [(RMSprop, copy.deepcopy), (Stranger, unpickled), (WithAll, copy.deepcopy), (WithAll, saved)],
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
    twins.steps(1, "step")  # replaced, too
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
    # Torch has put something around parts of its own optimizers by then.
    assert not read(torch.optim.AdamW(nn.Linear(2, 1).parameters())).reason


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


@pytest.mark.parametrize("made", [Adam, SGD])
def test_replacing_the_step_turns_on_torchs_fused(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        twins = Twins(lambda groups: made(groups, lr=0.1), replace_step=True)
    assert [group["fused"] for group in twins.fused.param_groups] == [True, True]
    assert caplog.messages == [
        f"{made.__name__} steps with torch's own fused kernels, which are faster"
    ]
    for _ in range(3):
        twins.backward()
        twins.fused.step()
        twins.plain.step()
        torch.testing.assert_close(*twins.parameters())
    assert twins.fused_count == 0


@pytest.mark.parametrize(
    ("made", "is_ours"),
    [
        (Adam, True),  # fuse_step fuses by default, as Bagua's does
        (lambda groups: Adam(groups, fused=True), False),
        (lambda groups: Adam(groups, fused=False), True),
        (lambda groups: Adam(groups, foreach=True), True),  # a loop, on CPUs
    ],
)
def test_fuse_step_leaves_what_was_chosen(made: Any, is_ours: bool) -> None:
    twins = Twins(made)
    before = copy.deepcopy(twins.fused.state_dict()["param_groups"])
    twins.steps(3)
    assert twins.fused_count == (6 if is_ours else 0)
    assert twins.fused.state_dict()["param_groups"] == before


@pytest.mark.parametrize(
    "made",
    [
        RMSprop,
        lambda groups: Adam(groups, fused=False),
        lambda groups: SGD(groups, 0.1, differentiable=False, foreach=False),
    ],
)
def test_where_torch_has_none_the_replaced_step_is_ours(made: Any) -> None:
    twins = Twins(made, replace_step=True)
    twins.steps(3, "step")
    assert twins.fused_count == 6


def test_states_from_before_and_from_elsewhere_go_on_fused() -> None:
    """They say that nobody has chosen, and have their counts where plain steps want them."""
    twins = Twins(Adam)
    twins.steps(3)
    plain, model = copy.deepcopy((twins.plain, twins.plain_model))
    again = fuse_optimizer(plain, replace_step=True)
    again.load_state_dict(twins.fused.state_dict())
    assert [group["fused"] for group in again.param_groups] == [True, True]
    generator = torch.Generator().manual_seed(7)
    for ours, theirs in zip(model.parameters(), twins.plain_model.parameters(), strict=True):
        ours.grad = torch.randn(ours.shape, generator=generator)
        theirs.grad = ours.grad.clone()
    again.step()
    twins.plain.step()
    torch.testing.assert_close(*(list(each.parameters()) for each in (model, twins.plain_model)))
    assert {float(state["step"]) for state in again.state.values()} == {4.0}


def test_a_scaler_unscales_for_it() -> None:
    twins = Twins(Adam, replace_step=True)
    twins.backward()
    for parameter in twins.parameters()[0]:
        parameter.grad *= 8
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.tensor(1.0))
    scaler.step(twins.fused)
    twins.plain.step()
    torch.testing.assert_close(*twins.parameters())
