"""Adam whose momenta travel in eight bits after a warm-up, as Bagua has it and as it should be."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import QAdamAlgorithm, QAdamOptimizer
from tests.client.algorithms.reference import byte_sum
from tests.client.algorithms.small import SeesBuckets, small_model, summed_gradients
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WARM_UP, STEPS, RATE, BETAS, SMALL = 5, 20, 0.01, (0.9, 0.999), 1e-8


class Seen(SeesBuckets, QAdamAlgorithm):
    pass


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(6, 7, generator=generator)).square().sum()


class Reference:
    """One replica for each rank, all with the same weights; the moments by weight."""

    def __init__(self, weight_decay: float, compatible: bool) -> None:
        self.model = small_model()
        self.weights = list(self.model.parameters())
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        self.weight_decay, self.compatible = weight_decay, compatible
        self.t = 0

    def step(self, ranks: int, passes: int, buckets: list[list[int]]) -> None:
        self.t += 1
        local = [summed_gradients(self.model, rank, self.t, passes, _loss) for rank in range(ranks)]
        with torch.no_grad():
            if self.t <= WARM_UP:
                self._warm_up(local)
            else:
                self._average_momenta(local, buckets)
            self._update()

    def _warm_up(self, local: list[list[torch.Tensor]]) -> None:
        if self.t == WARM_UP and self.compatible:
            return
        for i, weight in enumerate(self.weights):
            gradient = sum(part[i] for part in local) / len(local)
            gradient = gradient + self.weight_decay * weight
            self.m[i] = BETAS[0] * self.m[i] + (1 - BETAS[0]) * gradient
            self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * gradient**2

    def _average_momenta(self, local: list[list[torch.Tensor]], buckets: list[list[int]]) -> None:
        momenta = []
        for part in local:
            blended = []
            for m, gradient, weight in zip(self.m, part, self.weights, strict=True):
                if not self.compatible:
                    gradient = gradient.add(weight, alpha=self.weight_decay)
                # Torch's own product and sum, which are rounded once where it fuses them.
                blended.append(m.mul(BETAS[0]).add(gradient, alpha=1 - BETAS[0]))
            momenta.append(blended)
        for bucket in buckets:
            flats = [np.concatenate([part[i].numpy().ravel() for i in bucket]) for part in momenta]
            flat = torch.from_numpy(byte_sum(flats, len(flats), len(flats)))
            ends = np.cumsum([self.m[i].numel() for i in bucket])[:-1].tolist()
            for i, piece in zip(bucket, flat.tensor_split(ends), strict=True):
                self.m[i] = piece.view_as(self.m[i])

    def _update(self) -> None:
        settled = self.t if self.compatible else min(self.t, WARM_UP)
        for weight, m, v in zip(self.weights, self.m, self.v, strict=True):
            scale = v.sqrt() / math.sqrt(1 - BETAS[1] ** settled) + SMALL
            weight -= RATE / (1 - BETAS[0] ** self.t) * m / scale


def _furthest(weight_decay: float, compatible: bool, passes: int) -> tuple[float, int]:
    """How far the weights are from the reference's in the worst step, and momenta that are off by
    more than a rounding."""
    model = small_model()
    optimizer = QAdamOptimizer(
        model.parameters(), RATE, WARM_UP, BETAS, SMALL, weight_decay, compatible=compatible
    )
    # A look at the state before the first step changes nothing.
    assert all(optimizer.state[each].get("step", 0) == 0 for each in model.parameters())
    algorithm = Seen(optimizer, hierarchical=False)
    algorithm.buckets = []
    ours = DistributedDataParallel(model, algorithm=algorithm, bucket_cap_mb=100 / 2**20)
    reference = Reference(weight_decay, compatible)
    weights, draw = list(model.parameters()), random.Random(1)
    index_of = {id(weight): index for index, weight in enumerate(weights)}
    furthest, odd = 0.0, 0
    for step in range(1, STEPS + 1):
        if step % 5 == 0:
            assert ours.reconfigure(Configuration(draw.choice([20, 100, 300, 10_000])))
        optimizer.zero_grad()
        algorithm.buckets = []
        for at in range(passes - 1):
            with ours.no_sync():
                _loss(ours, dist.get_rank(), passes * step + at).backward()
        _loss(ours, dist.get_rank(), passes * step + passes - 1).backward()
        optimizer.step()
        buckets = [[index_of[weight] for weight in bucket] for bucket in algorithm.buckets]
        # One step of the reference from where ours was: a rounding may tip a level.
        reference.step(dist.get_world_size(), passes, buckets)
        for weight, m, theirs, their_m in zip(
            weights, (optimizer.state[w]["exp_avg"] for w in weights), reference.weights,
            reference.m, strict=True,
        ):  # fmt: skip
            furthest = max(furthest, float((weight - theirs).detach().abs().max()))
            odd += int((~torch.isclose(m, their_m, rtol=1e-5, atol=1e-8)).sum())
            with torch.no_grad():
                theirs.copy_(weight)
                their_m.copy_(m)
        for v, state in zip(reference.v, (optimizer.state[w] for w in weights), strict=True):
            v.copy_(state["exp_avg_sq"])
    return furthest, odd


@pytest.mark.parametrize(
    ("compatible", "weight_decay", "passes"), [(True, 0.1, 2), (False, 0.0, 1), (False, 0.1, 1)]
)
def test_it_steps_as_the_formula_says_through_recuts(
    two_ranks: RankPool, compatible: bool, weight_decay: float, passes: int
) -> None:
    for furthest, odd in two_ranks.run(_furthest, weight_decay, compatible, passes):
        assert furthest < 1e-6
        assert odd == 0


def _convolved(channels_last: bool) -> list[float]:
    """The largest weight after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 2, 3))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = QAdamOptimizer(model.parameters(), RATE, warmup_steps=3, weight_decay=0.1)
    ours = DistributedDataParallel(model, algorithm=QAdamAlgorithm(optimizer))
    found = []
    for step in range(8):
        inputs = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ours(inputs).square().mean().backward()
        optimizer.step()
        found += [float(weight.detach().square().sum()) for weight in model.parameters()]
    return found


def test_weights_in_another_order_of_dimensions_have_their_own_momenta(two_ranks: RankPool) -> None:
    plain, last = (two_ranks.run(_convolved, way)[0] for way in (False, True))
    assert last == pytest.approx(plain, rel=2e-3)


def _thawed() -> float:
    """The largest weight of a layer that takes part from the sixth step on."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, values: torch.Tensor, count: int) -> torch.Tensor:
            for layer in list(self.layers)[:count]:
                values = layer(values)
            return values

    net = Net()
    optimizer = QAdamOptimizer(net.parameters(), RATE, warmup_steps=3)
    ours = DistributedDataParallel(
        net, algorithm=QAdamAlgorithm(optimizer), find_unused_parameters=True
    )
    for step in range(10):
        optimizer.zero_grad()
        ours(torch.ones(2, 4), 1 if step < 5 else 2).square().mean().backward()
        optimizer.step()
    return max(float(weight.abs().max()) for weight in model[1].parameters())


def test_a_layer_that_joins_after_the_warm_up_has_one_of_its_own(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_thawed)) < 1


def _scaled(with_scaler: bool) -> tuple[list[float], list[bool]]:
    """The weights in the end, and which steps were skipped; an infinite gradient on one rank in
    two of them."""
    model = small_model()
    optimizer = QAdamOptimizer(model.parameters(), RATE, warmup_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=with_scaler)
    algorithm = QAdamAlgorithm(optimizer, grad_scaler=scaler if with_scaler else None)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    skipped = []
    for step in range(10):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        loss = _loss(ours, dist.get_rank(), step)
        if step in (1, 6) and dist.get_rank() == 1 and with_scaler:
            loss = loss * float("inf")
        if step in (1, 6) and not with_scaler:
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, model[0].weight))
    return [float(weight.sum()) for weight in model.parameters()], skipped


def test_scaled_gradients_make_the_same_momenta_and_an_infinite_one_skips_the_step_on_all(
    two_ranks: RankPool,
) -> None:
    plain = two_ranks.run(_scaled, False)[0][0]
    for weights, skipped in two_ranks.run(_scaled, True):
        assert [step for step, was in enumerate(skipped) if was] == [1, 6]
        assert weights == pytest.approx(plain, rel=1e-3, abs=1e-3)


def _other_steps() -> str:
    model = small_model()
    optimizer = QAdamOptimizer(model.parameters(), RATE, warmup_steps=2)
    if dist.get_rank() == 1:
        for _ in range(2):
            model(torch.ones(1, 7)).sum().backward()
            optimizer.step()
    ours = DistributedDataParallel(model, algorithm=QAdamAlgorithm(optimizer))
    loss = ours(torch.ones(1, 7)).sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    return str(raised.value)


def test_ranks_whose_optimizers_have_made_other_steps_are_told(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_other_steps):
        assert "rank 1 has not made as many steps as the others" in said
