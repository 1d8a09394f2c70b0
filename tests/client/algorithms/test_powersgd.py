"""Gradients as products of thin matrices: bit for bit torch's hook, and through every re-cut."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import PowerSGDAlgorithm
from bagua_client.communication.low_rank import LowRankSum
from bagua_client.reducer import carrier
from tests.ranks import RankPool

STEPS, BEGIN = 14, 3
RANKS = [1, 2, 4, 8]
ONE, SEVERAL = 10.0, 3000 / 2**20
"""MiB of a bucket."""


class _Model(nn.Module):
    """Matrices of one shape, of others and with four dimensions, which become ready in another
    order than they are listed in, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(17, 5)
        self.inner = nn.ModuleList(nn.Linear(36, 36) for _ in range(3))
        self.narrow = nn.Linear(36, 17, bias=False)
        self.convolution = nn.Conv2d(3, 9, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.LayerNorm(36)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.convolution(images).flatten(1)
        for layer in self.inner:
            found = self.norm(layer(found).tanh())
        wanted: torch.Tensor = self.last(self.narrow(found).tanh())
        return wanted


class _Typed(_Model):
    """Of another type of numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.to(self.norm.weight.dtype)).float()


def _loss(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return model(images).square().mean()


def _in_order(state, bucket):  # type: ignore[no-untyped-def]  # Torch would read text.
    """Torch's hook, one bucket after the other: over gloo the callbacks of two change places."""
    arrival = powerSGD_hook(state, bucket)
    arrival.wait()
    return arrival


def _other_steps(
    mib: float, ranks: list[int], options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[str]:
    """Where a gradient, or what is kept, is not that of torch's hook, bit for bit."""
    wrong = []
    for rank in ranks:
        given = {"matrix_approximation_rank": rank, "start_powerSGD_iter": BEGIN, **options}
        stock = Stock(_Typed(dtype), bucket_cap_mb=mib)  # type: ignore[arg-type]
        theirs = PowerSGDState(None, **given)
        stock.register_comm_hook(theirs, _in_order)
        algorithm = PowerSGDAlgorithm(**given)
        ours = DistributedDataParallel(_Typed(dtype), bucket_cap_mb=mib, algorithm=algorithm)
        own = ours.algorithm
        assert isinstance(own, PowerSGDAlgorithm)
        for step in range(STEPS):
            for model in (stock, ours):
                model.zero_grad()
                _loss(model, step).backward()
            pairs = zip(stock.parameters(), ours.parameters(), strict=True)
            if not all(torch.equal(a.grad, b.grad) for a, b in pairs):  # type: ignore[arg-type]
                wrong.append(f"rank {rank}: the gradients of step {step}")
                break
            for parameter in (*stock.parameters(), *ours.parameters()):
                parameter.data.sub_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
        lost = sorted(v for flat in own._lost._flats.values() for v in flat.tolist())
        if lost != sorted(v for flat in theirs.error_dict.values() for v in flat.tolist()):
            wrong.append(f"rank {rank}: the error")
        starts = sorted(v for flat in own._starts._flats.values() for v in flat.tolist())
        kept = sorted(v for flat in theirs.q_memory_dict.values() for v in flat.tolist())
        if given.get("warm_start", True) and starts != kept:
            wrong.append(f"rank {rank}: Q")
        if own.state.compression_stats() != theirs.compression_stats() or own.state.iter != STEPS:
            wrong.append(f"rank {rank}: the statistics")
        assert 0 < theirs.compression_stats()[2] < theirs.compression_stats()[1]
        assert (len(theirs.error_dict) > 2) is (mib == SEVERAL) or not theirs.use_error_feedback
    return wrong


@pytest.mark.parametrize("mib", [ONE, SEVERAL], ids=["one bucket", "several buckets"])
@pytest.mark.parametrize("pool", ["two_ranks", "three_ranks", "four_ranks"])
def test_gradients_are_those_of_torchs_hook_bit_for_bit(
    request: pytest.FixtureRequest, pool: str, mib: float
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for wrong in ranks.run(_other_steps, mib, RANKS, {}):
        assert wrong == []


@pytest.mark.parametrize(
    "options",
    [
        {"use_error_feedback": False},
        # Torch's hook forgets what buckets on their way hold, if there are several.
        {"warm_start": False},
        {"warm_start": False, "use_error_feedback": False, "start_powerSGD_iter": 0},
        {"batch_tensors_with_same_shape": True},
        {"min_compression_rate": 0.5, "random_seed": 7},
    ],
    ids=str,
)
def test_so_they_are_with_each_argument(four_ranks: RankPool, options: dict[str, Any]) -> None:
    for wrong in four_ranks.run(_other_steps, ONE, [2, 4], options):
        assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_so_they_are_in_other_types_of_numbers(
    request: pytest.FixtureRequest, pool: str, dtype: torch.dtype
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for wrong in ranks.run(_other_steps, ONE, [1, 2], {}, dtype):
        assert wrong == []


RECUTS = {
    4: Configuration(3000),
    6: Configuration(10_000, channels=4),
    8: Configuration(500),
    11: Configuration(2**20, "leaders", channels=2),
    13: Configuration(3000, "shards"),
    15: Configuration(),
}


def _beside_the_hook(rank: int) -> tuple[float, float]:
    """How far the weights of a training that is re-cut are off from those of torch's hook, which is
    not, as a share of the way that they went; and how far the hook is off from stock DDP."""
    begin = torch.cat([p.detach().reshape(-1) for p in _Model().parameters()])
    ends = []
    given = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    for kind in ("stock", "hook", "ours"):
        model: nn.Module = Stock(_Model(), bucket_cap_mb=ONE)
        if kind == "hook":
            model.register_comm_hook(PowerSGDState(None, **given), powerSGD_hook)  # type: ignore[operator]
        if kind == "ours":
            model = DistributedDataParallel(_Model(), algorithm=PowerSGDAlgorithm(**given))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for step in range(20):
            if step in RECUTS and kind == "ours":
                assert model.reconfigure(RECUTS[step])  # type: ignore[operator]
            optimizer.zero_grad()
            _loss(model, step).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    stock, hook, ours = ends
    way = float((hook - begin).norm())
    return float((ours - hook).norm()) / way, float((stock - hook).norm()) / way


@pytest.mark.parametrize("rank", [1, 4])
def test_recuts_change_nothing_but_the_order_of_sums(two_ranks: RankPool, rank: int) -> None:
    for off, hook_off in two_ranks.run(_beside_the_hook, rank):
        print(f"rank {rank}: {off:.1e} of the way off torch's hook, which is {hook_off:.1e} off")
        assert off < 1e-4 < 1e-2 < hook_off


def _not_accounted_for(configurations: list[Configuration]) -> tuple[float, float, bool]:
    """By how much all gradients that steps got, and what error feedback has yet to add, differ from
    all means of the ranks' gradients; how much of these it has yet to add; and whether all ranks
    have got the same bits. Shares of the norm of the whole."""
    model, ranks = _Model(), dist.get_world_size()
    algorithm = PowerSGDAlgorithm(2, start_powerSGD_iter=0)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    owed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    got = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    is_same = True
    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", 256):
        for step, configuration in enumerate(configurations * 2):
            assert ours.reconfigure(configuration)
            for part in range(3):
                ours.zero_grad()
                for rank in range(ranks):
                    loss = _loss(model, 3 * step + part, rank) / ranks
                    found = torch.autograd.grad(loss, list(model.parameters()))
                    for total, gradient in zip(owed.values(), found, strict=True):
                        total.add_(gradient)
                _loss(ours, 3 * step + part).backward()
                for total, parameter in zip(got.values(), model.parameters(), strict=True):
                    assert parameter.grad is not None
                    total.add_(parameter.grad)
                    other = parameter.grad.clone()
                    dist.broadcast(other, 0)
                    is_same = is_same and torch.equal(other, parameter.grad)
    own = ours.algorithm
    kept = own.state_dict()["lost"]
    for value in kept.values():
        dist.all_reduce(value.div_(ranks))
    whole = _norm(owed)
    off = _norm({name: owed[name] - got[name] - kept[name] for name in owed})
    return off / whole, _norm(kept) / whole, is_same


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).norm())


WAYS = [
    Configuration(3000, channels=4),
    Configuration(500, "leaders", channels=2),
    Configuration(20_000, "shards"),
    Configuration(),
    Configuration(3000, "shards", channels=2),
]


@pytest.mark.parametrize("pool", ["two_ranks", "three_ranks", "four_ranks"])
def test_what_a_step_lacks_comes_later_whatever_carries_the_buckets(
    request: pytest.FixtureRequest, pool: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for off, left, is_same in ranks.run(_not_accounted_for, WAYS):
        print(f"{pool}: {off:.1e} is missing, {left:.2f} is still to come")
        assert is_same
        assert off < 1e-5, "gradients are lost"
        assert 0.01 < left < 0.3, "much is compressed, and most of it is there"


def _off_the_mean(configuration: Configuration, dtype: torch.dtype) -> tuple[float, bool, float]:
    """With factors that are no approximation: how far gradients are off the mean; whether ranks
    have the same bits; how much larger what travels is than the gradients."""
    model, ranks = _Typed(dtype), dist.get_world_size()
    algorithm = PowerSGDAlgorithm(64, 1, min_compression_rate=0.01, use_error_feedback=False)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    assert ours.reconfigure(configuration)
    worst, is_same = 0.0, True
    for step in range(4):
        parameters = list(model.parameters())
        means = [torch.zeros_like(parameter) for parameter in parameters]
        for rank in range(ranks):
            loss = _loss(model, step, rank) / ranks
            found = torch.autograd.grad(loss, parameters)
            for mean, gradient in zip(means, found, strict=True):
                mean.add_(gradient)
        ours.zero_grad()
        _loss(ours, step).backward()
        for mean, parameter in zip(means, parameters, strict=True):
            assert parameter.grad is not None
            off = (parameter.grad - mean).abs().max() / mean.abs().max()
            worst = max(worst, float(off))
            other = parameter.grad.clone()
            dist.broadcast(other, 0)
            is_same = is_same and torch.equal(other, parameter.grad)
    state = ours.algorithm.state  # type: ignore[attr-defined]
    return worst, is_same, 1 / state.compression_stats()[0]


@pytest.mark.parametrize("hierarchical", ["off", "leaders", "shards"])
@pytest.mark.parametrize(
    ("channels", "dtype", "off"),
    [
        (1, torch.float32, 1e-4),
        (4, torch.float64, 1e-12),
    ],
    ids=str,
)
def test_factors_of_full_rank_give_the_mean_in_all_ways(
    four_ranks: RankPool, hierarchical: str, channels: int, dtype: torch.dtype, off: float
) -> None:
    way = Configuration(3000, hierarchical, channels)
    for worst, is_same, share in four_ranks.run(_off_the_mean, way, dtype):
        print(f"{way}, {dtype}: {worst:.1e} off")
        assert is_same
        assert worst < off
        assert share > 1, "all matrices were made of factors"


def _on_a_narrow_wire(precision: str) -> tuple[float, torch.dtype]:
    """How far gradients of rank 2 are off the mean; the type in which errors are kept."""
    torch.manual_seed(1)
    model = nn.Linear(30, 40, bias=False)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(2, 0))
    assert ours.reconfigure(Configuration(wire_precision=precision))
    given = [torch.randn(1, 30, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    mean = torch.zeros_like(model.weight)
    for inputs in given:
        mean += torch.autograd.grad(model(inputs).square().sum() / 2, [model.weight])[0]
    ours(given[dist.get_rank()]).square().sum().backward()
    assert model.weight.grad is not None
    (lost,) = ours.algorithm.state_dict()["lost"].values()
    return float((model.weight.grad - mean).norm() / mean.norm()), lost.dtype


@pytest.mark.parametrize(
    ("precision", "dtype", "least", "most"),
    [
        ("as_is", torch.float32, 0.0, 1e-5),
        ("fp16", torch.float16, 1e-5, 0.01),
        ("bf16", torch.bfloat16, 1e-4, 0.05),
    ],
)
def test_factors_may_travel_in_16_bits(
    two_ranks: RankPool, precision: str, dtype: torch.dtype, least: float, most: float
) -> None:
    for off, kept in two_ranks.run(_on_a_narrow_wire, precision):
        assert least <= off < most, off
        assert kept == dtype


def _with_infinite_gradients(rank: int, feedback: bool) -> tuple[list[bool], bool, float]:
    """Whether each step was skipped, with an infinite gradient on one rank in some; whether all
    that is kept is finite after each; and by how much the loss has fallen."""
    model = _Model()
    algorithm = PowerSGDAlgorithm(rank, 1, use_error_feedback=feedback)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    skipped, are_finite, losses = [], True, []
    for step in range(30):
        before = model.narrow.weight.detach().clone()
        optimizer.zero_grad()
        loss = _loss(ours, 0)
        losses.append(float(loss))
        infinite = 5 <= step < 7 and dist.get_rank() == 1
        scaler.scale(loss * float("inf") if infinite else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, model.narrow.weight))
        if step != 6:  # Q of a step that is skipped begins anew in the next one.
            state = ours.algorithm.state_dict()
            kept = [*state["lost"].values(), *(state["starts"].values() if step != 5 else ())]
            are_finite = are_finite and all(bool(each.isfinite().all()) for each in kept)
    return skipped, are_finite, losses[-1] / losses[0]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("rank", [1, 4])
def test_an_infinite_gradient_on_one_rank_skips_that_step_on_all(
    two_ranks: RankPool, rank: int, feedback: bool
) -> None:
    expected = [5 <= step < 7 for step in range(30)]
    for skipped, are_finite, share in two_ranks.run(_with_infinite_gradients, rank, feedback):
        assert skipped == expected
        assert are_finite
        assert share < 0.7


def _overflowing() -> list[bool]:
    """Whether gradients of each step are finite, whose P is too large for 16 bits once Q has the
    direction of the rows: 2 ranks times 60,000 over the root of 3."""
    torch.manual_seed(0)
    model = nn.Linear(256, 3, bias=False).half()
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=0))
    found = []
    for _ in range(2):
        ours.zero_grad()
        (2165 * ours(torch.ones(1, 256, dtype=torch.float16)).float()).sum().backward()
        assert model.weight.grad is not None
        found.append(bool(model.weight.grad.isfinite().all()))
    return found


def test_factors_that_overflow_are_infinite_gradients_and_no_zeros(two_ranks: RankPool) -> None:
    assert two_ranks.run(_overflowing) == [[True, False]] * 2


class _Odd(nn.Module):
    """Of all shapes that parameters may have; the last layer is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.tall = nn.Linear(1, 37, bias=False)
        self.wide = nn.Linear(37, 11)
        self.turned = nn.Parameter(torch.randn(24, 11).t())
        convolution = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.convolution = convolution
        self.without_effect = nn.Linear(24, 18)
        self.unused = nn.Linear(24, 18)
        self.now_and_then = nn.Linear(24, 24)

    def forward(self, inputs: torch.Tensor, uses: bool) -> torch.Tensor:
        found = self.wide(self.tall(inputs[:, :1]) * self.scale + self.one).tanh() @ self.turned
        found = self.now_and_then(found) if uses else found
        images = self.convolution(inputs.view(-1, 3, 4, 4)).square().mean()
        nothing = self.empty.sum() + 0.0 * self.without_effect(found).sum()
        return found.square().mean() + images + nothing


def _of_odd_shapes(rank: int) -> tuple[list[str], list[str]]:
    """Parameters whose gradients are not finite, or wrong; and those that were compressed."""
    model = _Odd()
    algorithm = PowerSGDAlgorithm(rank, 0)
    ours = DistributedDataParallel(model, algorithm=algorithm, find_unused_parameters=True)
    inputs = torch.randn(6, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    wrong = []
    for step in range(120):
        uses = step % 20 > 9
        used = {n: p for n, p in model.named_parameters() if n.partition(".")[0] != "unused"}
        if not uses:
            used = {n: p for n, p in used.items() if not n.startswith("now")}
        found = torch.autograd.grad(model(inputs, uses), list(used.values()))
        ours.zero_grad()
        ours(inputs, uses).backward()
        for (name, parameter), gradient in zip(used.items(), found, strict=True):
            assert parameter.grad is not None
            if not parameter.grad.isfinite().all():
                wrong.append(f"{name}: not finite in step {step}")
            totals[name] += parameter.grad
            expected[name] += gradient
    for name, mean in expected.items():
        dist.all_reduce(mean.div_(dist.get_world_size()))
        # The error of the last step, and what was taken up in steps that did not use it.
        room = 0.3 if name.startswith("now") else 0.1
        if float((totals[name] - mean).norm()) > room * float(mean.norm()):
            wrong.append(f"{name}: {float((totals[name] - mean).norm() / mean.norm()):.2f} off")
    return wrong, list(ours.algorithm.state_dict()["starts"])


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_all_shapes_train_and_what_is_not_used_does_no_harm(two_ranks: RankPool, rank: int) -> None:
    for wrong, compressed in two_ranks.run(_of_odd_shapes, rank):
        assert wrong == []
        if rank < 8:
            assert {"wide.weight", "turned", "convolution.weight"} <= set(compressed)
        assert not {"scale", "empty", "one", "tall.weight", "wide.bias"} & set(compressed)


def _with_a_sparse_gradient() -> tuple[list[int], list[bool]]:
    """The phase in each step, and whether gradients of the embedding are the mean."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(20, 16, sparse=True), nn.Linear(16, 16)
    model = nn.Sequential(embedding, layer)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=2))
    phases, right = [], []
    for _ in range(4):
        ours.zero_grad()
        phases.append(ours.algorithm.phase)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ours(torch.tensor([rank, 7])).sum().backward()
        assert embedding.weight.grad is not None
        mean = embedding.weight.grad.to_dense()
        shares = (mean.abs().sum(1) / mean.abs().sum(1).max()).tolist()
        right.append(shares[:ranks] == [1 / ranks] * ranks and shares[7] == 1.0)
    return phases, right


def test_sparse_gradients_are_summed_and_their_steps_count(two_ranks: RankPool) -> None:
    for phases, right in two_ranks.run(_with_a_sparse_gradient):
        assert phases == [1, 1, 2, 2]
        assert right == [True] * 4


def _warms_up() -> tuple[list[bool], list[bool], bool]:
    """Whether it does before each step; whether the gradient after it is that of all ranks as it
    is; and whether what a tuning would try does."""
    torch.manual_seed(0)
    model = nn.Linear(30, 40, bias=False)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=2))
    warms_up, is_whole = [], []
    for step in range(4):
        warms_up.append(ours.algorithm.is_warming_up)
        ours.zero_grad()
        given = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
        ours(given).square().sum().backward()
        (own,) = torch.autograd.grad(model(given).square().sum(), [model.weight])
        assert model.weight.grad is not None
        is_whole.append(torch.allclose(model.weight.grad, own, atol=1e-3))
    offered = PowerSGDAlgorithm.offered([model.weight])
    assert offered is not None
    return warms_up, is_whole, offered.is_warming_up


def test_a_tuning_waits_for_its_first_steps_and_tries_it_without(two_ranks: RankPool) -> None:
    for warms_up, is_whole, tried in two_ranks.run(_warms_up):
        assert warms_up == is_whole == [True, True, False, False]
        assert not tried


def _comes_back() -> tuple[list[tuple[str, bool]], bool]:
    """What is in force after each change, and whether its first steps are to come; and of another
    model that has the same instance."""
    algorithm = PowerSGDAlgorithm(start_powerSGD_iter=4)
    ours = DistributedDataParallel(_Model(), algorithm=algorithm)
    seen = []
    for name in ("", "bytegrad", "", "bytegrad", ""):
        assert ours.reconfigure(Configuration(3000, algorithm=name))
        _loss(ours, 0).backward()
        seen.append((ours.algorithm.name, ours.algorithm.is_warming_up))
        for _ in range(2):
            _loss(ours, 0).backward()
    other = DistributedDataParallel(_Model(), algorithm=algorithm)
    return seen, other.algorithm.is_warming_up


def test_its_first_steps_are_not_made_again_after_a_trial_of_another(two_ranks: RankPool) -> None:
    for seen, other in two_ranks.run(_comes_back):
        own, others = ("powersgd", True), ("bytegrad", False)
        # Three steps, one, and none.
        assert seen == [own, others, ("powersgd", False), others, ("powersgd", False)]
        assert other


def test_an_instance_goes_to_processes_that_have_no_group_yet() -> None:
    algorithm = PowerSGDAlgorithm(4, warm_start=False, hierarchical=True)
    for found in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert found.state.matrix_approximation_rank == 4
        assert (found.state.warm_start, found.hierarchical) == (False, True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"matrix_approximation_rank": 0},
        {"start_powerSGD_iter": -1},
        {"min_compression_rate": 0},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused_where_they_are_given(
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="powersgd needs"):
        PowerSGDAlgorithm(**arguments)


def _sums_held() -> int:
    """Sums of buckets that are over and still there, without the help of the cycle collector."""
    ours = DistributedDataParallel(_Model(), algorithm=PowerSGDAlgorithm(start_powerSGD_iter=0))
    gc.collect()
    gc.disable()
    try:
        for step in range(5):
            _loss(ours, step).backward()
        return sum(isinstance(it, LowRankSum) for it in gc.get_objects())
    finally:
        gc.enable()


def test_the_buffers_of_a_bucket_go_with_it(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_sums_held)) <= 1


def _begins_by_node(hierarchical: bool) -> str:
    algorithm = PowerSGDAlgorithm(hierarchical=hierarchical)
    return DistributedDataParallel(nn.Linear(4, 4), algorithm=algorithm).configuration.hierarchical


def test_it_begins_as_its_argument_says(four_ranks: RankPool) -> None:
    assert four_ranks.run(_begins_by_node, True) == ["leaders"] * 4
    assert four_ranks.run(_begins_by_node, False) == ["off"] * 4


def _join() -> float:
    """The last gradient of a rank that goes on after the others have ended."""
    model = nn.Linear(16, 16, bias=False)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=0))
    with ours.join():
        for _ in range(3 + 2 * dist.get_rank()):
            ours.zero_grad()
            ours(torch.ones(1, 16)).sum().backward()
    assert model.weight.grad is not None
    return float(model.weight.grad.mean())


def test_ranks_may_end_one_by_one(two_ranks: RankPool) -> None:
    first, last = two_ranks.run(_join)
    assert (first, last) == (1.0, 0.5)
