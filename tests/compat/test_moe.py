"""Experts on all ranks, beside the same formulas on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_compat.torch_api.model_parallel.moe import TopKGate
from tests.compat.scripts import apart, begin
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

HIDDEN, LOCAL, TOKENS = 5, 2, 12


class Scale(nn.Module):
    """An expert whose weight tells it from the others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(rank + 1)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.factor


def _mixture(k: int, capacity_factor: float) -> Any:
    torch.manual_seed(1)
    layer: Any = bagua.moe.MoE(HIDDEN, Scale(dist.get_rank()), LOCAL, k, 0.0, capacity_factor)
    return layer


def _with_room_for_all(k: int) -> tuple[float, float, float]:
    """By how much outputs are wrong, the loss and the experts' gradients, where none is full."""
    layer, rank = _mixture(k, 8.0), dist.get_rank()
    torch.manual_seed(2)
    everything = torch.randn(dist.get_world_size(), TOKENS, HIDDEN)
    torch.manual_seed(3)
    output, loss, counts = layer(everything[rank].view(3, 4, HIDDEN))
    output.sum().backward()
    torch.manual_seed(3)
    weights = layer.bagua_moe.gate(everything[rank]).weights.sum(2)
    factors = torch.arange(2.0).repeat_interleave(LOCAL) + 1
    expected = everything[rank] * (weights @ factors)[:, None]
    gates = layer.bagua_moe.gate.wg(everything[rank]).softmax(1)
    aux = 4 * (gates.mean(0) * counts / TOKENS).sum()
    own = [expert.factor.grad for expert in layer.bagua_moe.experts.bagua_experts]
    gradient = torch.zeros(4)
    gradient[rank * LOCAL : rank * LOCAL + LOCAL] = torch.stack(own)
    by_token = (weights * everything[rank].sum(1, keepdim=True)).sum(0).detach()
    for tensor in (gradient, by_token):
        dist.all_reduce(tensor)
    assert output.shape == (3, 4, HIDDEN)
    return (
        float((output.reshape(TOKENS, HIDDEN) - expected).abs().max()),
        float((loss - aux).abs()),
        float((gradient - by_token).abs().max()),
    )


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_go_to_their_experts_and_come_back(two_ranks: RankPool, k: int) -> None:
    for wrong in two_ranks.run(_with_room_for_all, k):
        assert max(wrong) < 1e-5


@pytest.mark.parametrize("k", [1, 2])
def test_no_expert_gets_more_than_it_has_room_for(k: int) -> None:
    torch.manual_seed(0)
    gate = TopKGate(HIDDEN, 3, k, 1.0, 0.5, 1, None)
    with torch.no_grad():
        gate.wg.weight[0] += 3.0  # Tokens of positive numbers all choose the first expert.
    weights = gate(torch.rand(TOKENS, HIDDEN)).weights
    capacity = k * TOKENS // 3
    assert weights.shape == (TOKENS, 3, capacity)
    taken = weights != 0
    assert taken[:, 0].sum() == capacity
    assert (taken.sum(0) <= 1).all()
    if k == 2:
        assert set(weights.sum((1, 2)).round(decimals=5).tolist()) <= {0.0, 1.0}
    assert gate.eval()(torch.rand(TOKENS, HIDDEN)).weights.shape[2] == capacity // 2


@pytest.mark.parametrize("policy", ["Jitter", "RSample", "None"])
def test_noise_is_for_training_only(policy: str) -> None:
    gate = TopKGate(HIDDEN, 3, 1, 1.0, 1.0, 40, policy)
    tokens = torch.rand(40, HIDDEN)
    noisy = [gate(tokens).weights.sum(2) for _ in range(2)]
    assert torch.equal(*noisy) is (policy == "None")
    plain = [gate.eval()(tokens).weights.sum(2) for _ in range(2)]
    assert torch.equal(*plain)


def test_unused_tokens_go_nowhere() -> None:
    gate = TopKGate(HIDDEN, 3, 2, 1.0, 1.0, 4, None)
    used = torch.tensor([1.0, 0.0] * (TOKENS // 2))
    found = gate(torch.rand(TOKENS, HIDDEN), used)
    assert int(found.counts.sum()) == TOKENS // 2
    assert not found.weights[used == 0].any()


@pytest.mark.parametrize(("k", "policy"), [(3, None), (1, "noise")])
def test_what_a_gate_cannot_be(k: int, policy: str | None) -> None:
    with pytest.raises(ValueError, match=r"k must be|noisy_gate_policy must be"):
        TopKGate(HIDDEN, 3, k, 1.0, 1.0, 4, policy)


def _under_bagua() -> tuple[bool, bool, list[str]]:
    """Whether experts stay each rank's own and the gate does not; the names of the experts."""
    begin()
    model: Any = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), _mixture(2, 2.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = torch.tensor([p.sum().item() for p in model[1].bagua_moe.experts.parameters()])
    algorithm = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()
    model.with_bagua([optimizer], algorithm)
    kept = torch.tensor([p.sum().item() for p in model[1].bagua_moe.experts.parameters()])
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        output, loss, _ = model(torch.randn(TOKENS, HIDDEN))
        (output.square().mean() + loss).backward()
        optimizer.step()
    gate = model[1].bagua_moe.gate.wg.weight.detach()
    names = [name for name in model.state_dict() if "experts" in name]
    return torch.equal(first, kept), apart(gate) == 0.0, names


def test_with_bagua_leaves_experts_alone(two_ranks: RankPool) -> None:
    names = [f"1.bagua_moe.experts.bagua_experts.{place}.factor" for place in range(LOCAL)]
    assert two_ranks.run(_under_bagua) == [(True, True, names)] * 2
