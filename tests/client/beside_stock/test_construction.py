"""The class itself: its signature, what it refuses, and ``tune`` of classes of somebody else."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel, tune
from bagua_client.torch_private.wrapper import signature_of_wrapper
from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import Recuts, failure_of, gist, side_by_side, wrapped
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH = 24


def _backward(wrapper: Stock, step: int = 0) -> None:
    wrapper(torch.randn(3, WIDTH)).square().mean().backward()


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def test_the_signature_is_torchs_with_two_keywords_more() -> None:
    theirs = list(inspect.signature(Stock).parameters.values())
    ours = list(inspect.signature(DistributedDataParallel).parameters.values())
    assert ours[: len(theirs)] == theirs
    added = ours[len(theirs) :]
    assert {parameter.name for parameter in added} == {"optimizers", "algorithm"}
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in added)


def _options(recuts: Recuts) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        group = dist.group.WORLD
        return wrapper(module, None, None, 0, True, True, group, 1, False, False, True)

    return side_by_side(_layers(), _backward, recuts, wrap=wrap)


def test_positional_arguments(beside_flat: Beside) -> None:
    beside_flat.check(_options)


def _mesh(recuts: Recuts) -> str | None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return side_by_side(_layers(), _backward, recuts, device_mesh=mesh)


def test_a_device_mesh(beside_flat: Beside) -> None:
    beside_flat.check(_mesh)


def _keywords(recuts: Recuts, options: dict[str, Any]) -> str | None:
    return side_by_side(_layers(), _backward, recuts, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batched_grad_copy": True},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb_list": [1, 2]},
        {"lazy_bucket_allocation": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_keywords(beside_flat: Beside, options: dict[str, Any]) -> None:
    if not options.keys() <= signature_of_wrapper().parameters.keys():
        pytest.skip("this torch has it not")
    beside_flat.check(_keywords, options)


def _static_graph_later(recuts: Recuts) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module)
        made._set_static_graph()
        return made

    return side_by_side(_layers(), _backward, recuts, wrap=wrap)


def test_a_graph_that_is_called_static_after_wrapping(beside_flat: Beside) -> None:
    beside_flat.check(_static_graph_later)


def _attributes() -> None:
    stock, ours = wrapped(
        _layers(), bucket_cap_mb=3, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    assert isinstance(ours, Stock)
    ours_has, stock_has = vars(ours), vars(stock)
    assert set(ours_has) == set(stock_has)
    for name, value in stock_has.items():
        if isinstance(value, bool | int | float | str | None):
            assert ours_has[name] == value, name


def test_without_tuning_it_has_torchs_attributes_and_no_other(pair_of_ranks: RankPool) -> None:
    pair_of_ranks.run(_attributes)


# Refusals


def _error_of(wrapper: type[Stock], case: str) -> list[str]:
    model: nn.Module = _layers()
    options: dict[str, Any] = {}
    if case == "channels_last":
        model = nn.Conv2d(3, 3, 2)
        if dist.get_rank() == 1:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif case == "shapes":
        model = nn.Linear(WIDTH, 2 + dist.get_rank())
    elif case == "frozen":
        model.requires_grad_(False)
    elif case == "devices":
        options["device_ids"] = [0]
    elif case == "lazy":
        model = nn.LazyLinear(2)
    elif case == "sync_batch_norm":
        model = nn.SyncBatchNorm(WIDTH)
    elif case == "unknown":
        options["bucket_cap"] = 1
    error = failure_of(lambda *_: wrapper(model, **options), None, 0)  # type: ignore[arg-type]
    # A message about a class names it.
    return ["" if error is None else gist(error).replace("bagua_client", "torch"), case]


@pytest.mark.parametrize(
    "case",
    ["channels_last", "shapes", "frozen", "devices", "lazy", "sync_batch_norm", "unknown"],
)
def test_the_constructor_refuses_what_torchs_refuses(hasty_ranks: RankPool, case: str) -> None:
    stock = hasty_ranks.run(_error_of, Stock, case)
    assert any(error for error, _ in stock)
    assert hasty_ranks.run(_error_of, DistributedDataParallel, case) == stock


# Buffers


def _own_buffers(recuts: Recuts, options: dict[str, bool]) -> str | None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    model[1].running_mean.fill_(dist.get_rank())
    return side_by_side(model, _backward, recuts, **options)


@pytest.mark.parametrize(
    "options",
    [{"broadcast_buffers": False}, {"forward_sync_buffers": False}, {"init_sync": False}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
def test_buffers_that_stay_each_ranks_own(beside_flat: Beside, options: dict[str, bool]) -> None:
    beside_flat.check(_own_buffers, options)


# tune


class Theirs(Stock):
    """A subclass of somebody's, with a forward of its own."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*inputs, **kwargs)


def _tuned(recuts: Recuts, made_of: type[Stock]) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = made_of(module)
        return made if wrapper is Stock else tune(made)

    return side_by_side(_layers(), _backward, recuts, wrap=wrap)


@pytest.mark.parametrize("made_of", [Stock, Theirs])
def test_tune_in_place(beside_flat: Beside, made_of: type[Stock]) -> None:
    beside_flat.check(_tuned, made_of)


def _tuned_in_the_middle(recuts: Recuts, made_of: type[Stock]) -> str | None:
    """After steps of torch's own, and with gradients that are there."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = made_of(module)
        for _ in range(3):
            torch.manual_seed(dist.get_rank())
            _backward(made)
        return made if wrapper is Stock else tune(made)

    return side_by_side(_layers(), _backward, recuts, wrap=wrap)


def test_tune_in_the_middle(beside_flat: Beside) -> None:
    beside_flat.check(_tuned_in_the_middle, Theirs)


def _identity_of_a_tuned_wrapper() -> None:
    model = Theirs(_layers())
    tuned = tune(model)
    assert tuned is model
    assert tune(tuned) is model
    assert type(tuned).__name__ == "Theirs"
    assert isinstance(tuned, Theirs)
    assert isinstance(tuned, DistributedDataParallel)
    _backward(tuned)
    file = io.BytesIO()
    torch.save(tuned, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(tuned),
        pickle.loads(pickle.dumps(tuned)),
        torch.load(file, weights_only=False),
    ):
        assert isinstance(twin, Theirs)
        values = torch.ones(1, WIDTH)
        with torch.no_grad():
            assert torch.equal(twin(values), tuned(values))
        _backward(tune(twin))


def test_a_tuned_wrapper_is_still_of_its_class(pair_of_ranks: RankPool) -> None:
    pair_of_ranks.run(_identity_of_a_tuned_wrapper)


def _takes_nothing_else() -> None:
    others: tuple[Any, ...] = (nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)), None, 3)
    for other in others:
        with pytest.raises(TypeError, match="DistributedDataParallel"):
            tune(other)


def test_tune_takes_nothing_else_of_several_ranks(pair_of_ranks: RankPool) -> None:
    """What one process trains by itself may be any module."""
    pair_of_ranks.run(_takes_nothing_else)


@pytest.mark.parametrize("other", [None, 3])
def test_tune_takes_no_other_thing(other: Any) -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        tune(other)
