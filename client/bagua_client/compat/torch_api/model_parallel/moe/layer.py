"""A layer of experts of which each rank has its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua_client.compat.torch_api.model_parallel.moe.gate import TopKGate


class MoE(nn.Module):
    """A mixture of experts (Lepikhin et al., GShard, arXiv 2006.16668, algorithm 2): each token
    goes to its best expert, or its two best, wherever they are. All ranks of the job must make it,
    and call it with equally many tokens.

    The experts are each rank's own: their parameters have an attribute ``expert`` that is True, and
    ``with_bagua`` does not communicate them. Their gradients are sums over the tokens of all ranks.

    Args:
        hidden_size: of a token, which an expert does not change.
        expert: copied for each; it is given tokens in the last dimension.
        num_local_experts: on each rank.
        k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy: see
            :class:`~bagua_client.compat.torch_api.model_parallel.moe.gate.TopKGate`.
        output_dropout_prob: of the output.

    Raises:
        ValueError: see there.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_local_experts * dist.get_world_size()
        gate = TopKGate(
            hidden_size,
            self.num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
        )
        self.bagua_moe = _Mixture(gate, _Experts(expert, num_local_experts))
        self.dropout = nn.Dropout(output_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, in the shape of ``hidden_states`` ([..., hidden size]); a loss that is least
        where the experts are used evenly; and how many of this rank's tokens chose each expert.

        Args:
            used_token: 0 for each token that goes to no expert; None: all go.
        """
        output, loss, counts = self.bagua_moe(hidden_states, used_token)
        return self.dropout(output), loss, counts


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether it is of an expert, and so this rank's own."""
    return bool(getattr(param, "expert", False))


class _Experts(nn.Module):
    """The experts of this rank."""

    def __init__(self, expert: nn.Module, count: int) -> None:
        super().__init__()
        self.bagua_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(count))
        for parameter in self.parameters():
            parameter.expert = True  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pass each expert its part of the input, [ranks, experts, capacity, hidden size]."""
        outputs = []
        for expert, own in zip(self.bagua_experts, torch.split(tokens, 1, dim=1), strict=True):
            output = expert(own)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return torch.cat(outputs, dim=1)


class _Mixture(nn.Module):
    def __init__(self, gate: TopKGate, experts: _Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None) -> Any:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        assigned = self.gate(tokens, used_token)
        weights = assigned.weights.to(tokens.dtype)
        # By global expert, which are ordered by rank: [experts, capacity, hidden size].
        sent = torch.einsum("sec,sm->ecm", (weights != 0).to(tokens.dtype), tokens)
        ranks = dist.get_world_size()
        received = _exchanged(sent).reshape(ranks, -1, *sent.shape[1:])
        returned = _exchanged(self.experts(received)).reshape(sent.shape)
        output = torch.einsum("sec,ecm->sm", weights, returned)
        return output.reshape(hidden_states.shape), assigned.loss, assigned.counts


def _exchanged(parts: torch.Tensor) -> torch.Tensor:
    """Send equal parts along the first dimension, each to its rank."""
    found: torch.Tensor = _AllToAll.apply(parts)  # type: ignore[no-untyped-call]
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _exchanged(gradients[0])
