"""A mixture of experts: a layer of experts of which each rank has its own, and the gate that says
which of them a token goes to, and which have room for it."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

JITTER = 1e-2
POLICIES = (None, "None", "Jitter", "RSample")


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
            :class:`TopKGate`.
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


class Assignment(NamedTuple):
    """An assignment of S tokens to E experts with room for C tokens of this rank each.

    Attributes:
        loss: that is least where the experts are used evenly; without dimensions.
        weights: by how much what an expert makes of a token counts, [S, E, C]; 0: the token is not
            in that place of that expert.
        counts: how many tokens had each expert for their first choice, [E], on the CPU.
    """

    loss: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor


class TopKGate(nn.Module):
    """Algorithm 1 of GShard (Lepikhin et al., arXiv 2006.16668), for the best or the two best
    experts. With ``g`` the softmax of a linear layer, all in float32::

        C = ceil(k S / E * capacity_factor)            with k = 1 at least min_capacity
        loss = E * sum over e of (mean of g_e) (share of tokens whose first choice is e)
        weights: g of the expert (k = 1), or g_1 and g_2 over their sum (k = 2)

    The second expert is drawn with the probabilities of ``g``, the first one left out. A token for
    which its expert has no room counts for nothing there. With k = 1 chance decides which tokens
    these are, with k = 2 the last ones.

    Args:
        hidden_size: of a token.
        num_experts: of all ranks.
        k: 1 or 2.
        capacity_factor, eval_capacity_factor: of the room that an expert has, in training and else.
        min_capacity: see above.
        noisy_gate_policy: while training, ``Jitter`` multiplies the token by up to 1 % more or
            less; ``RSample`` (k = 1) draws the expert.

    Raises:
        ValueError: another ``k``, or another policy.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        capacity_factor: float,
        eval_capacity_factor: float,
        min_capacity: int,
        noisy_gate_policy: str | None,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise ValueError(f"k must be 1 or 2, not {k}")
        if noisy_gate_policy not in POLICIES:
            raise ValueError(
                f"noisy_gate_policy must be 'Jitter', 'RSample' or None, not {noisy_gate_policy!r}"
            )
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Assignment:
        """Assign ``tokens``, [S, hidden size]; ``used_token``, [S]: 0 for those that go nowhere."""
        inputs = tokens.float()
        policy = self.noisy_gate_policy if self.training else None
        if policy == "Jitter":
            inputs = inputs * torch.empty_like(inputs).uniform_(1 - JITTER, 1 + JITTER)
        logits = F.linear(inputs, self.wg.weight.float())
        gates = logits.softmax(dim=1)
        choices = self._choices(logits, gates, policy == "RSample")
        if used_token is not None:
            choices = [chosen * used_token.reshape(-1, 1).to(chosen.dtype) for chosen in choices]
        first = choices[0]
        loss = (gates.mean(0) * first.float().mean(0)).sum() * gates.shape[1]
        return Assignment(loss, self._weights(gates, choices), first.sum(0).cpu())

    def _choices(
        self, logits: torch.Tensor, gates: torch.Tensor, draws: bool
    ) -> list[torch.Tensor]:
        """Return for each choice a one at the expert of each token, [S, E]."""
        experts = logits.shape[1]
        best = (_drawn(logits) if draws else gates).argmax(1)
        choices = [F.one_hot(best, experts)]
        if self.k == 2:
            others = _drawn(logits).masked_fill(choices[0].bool(), -math.inf)
            choices.append(F.one_hot(others.argmax(1), experts))
        return choices

    def _weights(self, gates: torch.Tensor, choices: list[torch.Tensor]) -> torch.Tensor:
        capacity = self._capacity(*gates.shape)
        taken = torch.zeros_like(choices[0][0])
        kept, places = [], []
        for chosen in choices:
            before = _before(chosen, in_random_order=self.k == 1) + taken
            kept.append(chosen * (before < capacity))
            places.append((before * chosen).sum(1).clamp(max=capacity - 1))
            taken = taken + chosen.sum(0)
        shares = [(gates * chosen).sum(1) for chosen in kept]
        if self.k == 2:
            total = (shares[0] + shares[1]).clamp(min=torch.finfo(gates.dtype).eps)
            shares = [share / total for share in shares]
        weights = torch.zeros(*gates.shape, capacity, device=gates.device)
        for chosen, place, share in zip(kept, places, shares, strict=True):
            place_of = F.one_hot(place, capacity).to(gates.dtype)
            weights = weights + torch.einsum(
                "s,se,sc->sec", share, chosen.to(gates.dtype), place_of
            )
        return weights

    def _capacity(self, tokens: int, experts: int) -> int:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = math.ceil(self.k * tokens / experts * factor)
        return max(capacity, self.min_capacity) if self.k == 1 else max(capacity, 1)


def _drawn(logits: torch.Tensor) -> torch.Tensor:
    """The largest is at an expert with the probability of its softmax (Gumbel's trick)."""
    noise = -torch.empty_like(logits).exponential_().log()
    return logits + noise


def _before(chosen: torch.Tensor, in_random_order: bool) -> torch.Tensor:
    """Count the tokens before each one in each expert's queue, [S, E]."""
    if not in_random_order:
        return chosen.cumsum(0) - chosen
    order = torch.randperm(chosen.shape[0], device=chosen.device)
    counted = torch.empty_like(chosen)
    counted[order] = chosen[order].cumsum(0) - chosen[order]
    return counted
