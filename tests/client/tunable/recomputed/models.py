"""Small models whose blocks are recomputed, in each way that a training can ask for it, trained
beside an untouched one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import bagua_client

WIDTH, BLOCKS = 16, 4
FIRST, STEPS = 1, 11
"""Before the first of them ours begins to look, and so many steps are made."""
Plan = Mapping[int, Mapping[str, Any]]
"""Before which step which knobs have other values than the default's."""


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


WAYS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": checkpoint_wrapper,
    "reentrant": lambda block: checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": lambda block: checkpoint_wrapper(block, context_fn=_selective),
    "to the end": lambda block: checkpoint_wrapper(block, early_stop=False),
    "composable": composable,
    "random state lost": lambda block: checkpoint_wrapper(block, preserve_rng_state=False),
}


@dataclass(frozen=True)
class Kind:
    """How a model is made and trained.

    Attributes:
        way: in which its blocks are recomputed, or a model of transformers.
        ranks: how they train together: ``replicated``, ``sharded``.
        every: of the blocks, each so-manyth one is recomputed; 0: none is.
        between: what the training does after each step.
    """

    way: str = "wrapper"
    ranks: str = "replicated"
    every: int = 1
    dropout: float = 0.1
    norm: bool = False
    frozen: bool = False
    tied: bool = False
    autocast: bool = False
    micro_batches: int = 1
    clips: bool = False
    static_graph: bool = False
    compiles: str = ""
    between: str = ""


class Block(nn.Module):
    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width) if kind.norm else nn.LayerNorm(width)
        self.dropout = kind.dropout

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found = self.down(F.gelu(self.up(self.norm(values))))
        return values + F.dropout(found, self.dropout, self.training)


class Net(nn.Module):
    def __init__(self, kind: Kind, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(kind, width) for _ in range(BLOCKS))
        if kind.tied:
            self.last.weight = self.first.weight
        if kind.frozen:
            self.blocks[1].requires_grad_(False)
        for place in range(0, BLOCKS, kind.every) if kind.every else ():
            block = self.blocks[place]
            if kind.compiles == "inside":
                block = torch.compile(block, backend="aot_eager")
            block = WAYS[kind.way](block)
            if kind.compiles == "around":
                block.compile(backend="aot_eager")
            self.blocks[place] = block

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        return self.last(values)


def _transformer(kind: Kind) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 32, "attn_implementation": "eager"}
    if kind.way.startswith("gpt2"):
        config = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, n_positions=16, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            **sizes,
        )
        model = transformers.LlamaForCausalLM(config)
    options = {"use_reentrant": "reentrant" in kind.way}
    model.gradient_checkpointing_enable(options)
    return model


def made(kind: Kind, is_ours: bool) -> Any:
    """The model as a training has it; ``is_ours``: and as it is tuned."""
    torch.manual_seed(0)
    model = Net(kind) if kind.way in WAYS else _transformer(kind)
    if kind.ranks == "replicated":
        wrapper = bagua_client.DistributedDataParallel if is_ours else Stock
        return wrapper(model, static_graph=kind.static_graph)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    layers = (
        model.blocks
        if isinstance(model, Net)
        else getattr(model.base_model, "h", getattr(model.base_model, "layers", ()))
    )
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return bagua_client.tune(model) if is_ours else model


def loss_of(model: Any, kind: Kind, generator: torch.Generator, rows: int = 6) -> torch.Tensor:
    context: AbstractContextManager[Any] = nullcontext()
    if kind.autocast:
        context = torch.autocast("cpu", torch.bfloat16)
    with context:
        if kind.way in WAYS:
            values = torch.randn(rows, WIDTH, generator=generator)
            found: torch.Tensor = (model(values) - values).square().mean()
        else:
            tokens = torch.randint(0, 32, (rows, 8), generator=generator)
            found = model(input_ids=tokens, labels=tokens).loss
    return found


@dataclass(frozen=True)
class Run:
    """What a training has come to."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    random: torch.Tensor
    recomputed: list[int]


def train(kind: Kind, plan: Plan, is_ours: bool, steps: int = STEPS, rank: int = 0) -> Run:
    """Train; ``recomputed``: how many blocks ran again in each backward pass."""
    model = made(kind, is_ours)
    torch.manual_seed(7 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses, recomputed, default = [], [], None
    for step in range(steps):
        if is_ours and step == FIRST:
            assert model.reconfigure(model.configuration)
        if is_ours and step in plan:
            default = default or model.configuration
            assert model.reconfigure(replace(default, **plan[step])), (step, plan[step])
        optimizer.zero_grad()
        for micro in range(kind.micro_batches):
            is_last = micro == kind.micro_batches - 1
            is_held = kind.ranks == "replicated" and not is_last
            with model.no_sync() if is_held else nullcontext():
                loss = loss_of(model, kind, generator)
                loss.backward()
        if kind.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
        if kind.between == "evaluation":
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, kind, generator, 9).item())
            model.train()
    whole = {f"model.{n}": v for n, v in model.state_dict().items()}
    for number, each in enumerate(optimizer.state.values()):
        whole |= {f"{number}.{name}": value for name, value in each.items()}
    state = {
        name.replace("module.", ""): getattr(v, "_local_tensor", v).detach().clone()
        for name, v in whole.items()
        if isinstance(v, torch.Tensor)
    }
    return Run(losses, state, torch.get_rng_state(), recomputed)


def differs(kind: Kind, plan: Plan) -> str:
    """What is not as in an untouched training, to the last bit; empty: nothing is."""
    rank = torch.distributed.get_rank()
    ours, stock = train(kind, plan, True, rank=rank), train(kind, plan, False, rank=rank)
    if list(ours.state) != list(stock.state):
        return "names"
    if ours.losses != stock.losses:
        return f"losses {ours.losses} {stock.losses}"
    if wrong := [n for n, v in stock.state.items() if not torch.equal(v, ours.state[n])]:
        return f"state {wrong}"
    return "" if torch.equal(ours.random, stock.random) else "random numbers"
