"""The class itself: its signature, and ``tune`` of classes of somebody else. (What its constructor
refuses is in PyTorch's own tests, which ``make upstream-ddp`` runs.)"""

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
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    WIDTH,
    Recuts,
    layers,
    normed,
    passes,
    side_by_side,
    wrapped,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def test_the_signature_is_torchs_with_two_keywords_more() -> None:
    theirs = list(inspect.signature(Stock).parameters.values())
    ours = list(inspect.signature(DistributedDataParallel).parameters.values())
    assert ours[: len(theirs)] == theirs
    added = ours[len(theirs) :]
    assert {parameter.name for parameter in added} == {"optimizers", "algorithm"}
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in added)


def positional_arguments(recuts: Recuts) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        group = dist.group.WORLD
        return wrapper(module, None, None, 0, True, True, group, 1, False, False, True)

    return side_by_side(layers(), passes, recuts, wrap=wrap)


def keyword(recuts: Recuts, name: str, value: Any) -> str | None:
    """Where this torch has it."""
    has_it = name in signature_of_wrapper().parameters
    return side_by_side(layers(), passes, recuts, **({name: value} if has_it else {}))


def device_mesh(recuts: Recuts) -> str | None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return side_by_side(layers(), passes, recuts, device_mesh=mesh)


def own_buffers(recuts: Recuts, name: str) -> str | None:
    """They stay each rank's own."""
    model = normed()
    model[1].running_mean.fill_(dist.get_rank())
    return side_by_side(model, passes, recuts, **{name: False})


def graph_called_static_after_wrapping(recuts: Recuts) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module)
        made._set_static_graph()
        return made

    return side_by_side(layers(), passes, recuts, wrap=wrap)


class Theirs(Stock):
    """A subclass of somebody's, with a forward of its own."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*inputs, **kwargs)


def tuned_in_the_middle(recuts: Recuts, made_of: type[Stock], steps: int) -> str | None:
    """After steps of torch's own, and with gradients that are there."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = made_of(module)
        for _ in range(steps):
            torch.manual_seed(dist.get_rank())
            passes(made)
        return made if wrapper is Stock else tune(made)

    return side_by_side(layers(), passes, recuts, wrap=wrap)


@table(
    ("flat", positional_arguments),
    ("flat", keyword, "batched_grad_copy", True),
    ("flat", keyword, "bucket_cap_mb", 0.001),
    ("flat", keyword, "bucket_cap_mb_list", [1, 2]),
    ("flat", keyword, "lazy_bucket_allocation", True),
    ("flat", device_mesh),
    ("flat", own_buffers, "broadcast_buffers"),
    ("flat", own_buffers, "forward_sync_buffers"),
    ("flat", own_buffers, "init_sync"),
    ("flat", graph_called_static_after_wrapping),
    ("flat", tuned_in_the_middle, Stock, 0),
    ("flat", tuned_in_the_middle, Theirs, 3),
)
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
def test_what_torchs_class_is_given_ours_is(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)


def _attributes() -> None:
    stock, ours = wrapped(
        layers(), bucket_cap_mb=3, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    assert isinstance(ours, Stock)
    ours_has, stock_has = vars(ours), vars(stock)
    assert set(ours_has) == set(stock_has)
    for name, value in stock_has.items():
        if isinstance(value, bool | int | float | str | None):
            assert ours_has[name] == value, name


def test_without_tuning_it_has_torchs_attributes_and_no_other(pair_of_ranks: RankPool) -> None:
    pair_of_ranks.run(_attributes)


def _identity_of_a_tuned_wrapper() -> None:
    model = Theirs(layers())
    tuned = tune(model)
    assert tuned is model
    assert tune(tuned) is model
    assert type(tuned).__name__ == "Theirs"
    assert isinstance(tuned, Theirs)
    assert isinstance(tuned, DistributedDataParallel)
    passes(tuned)
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
        passes(tune(twin))


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
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        tune(None)  # type: ignore[type-var]
