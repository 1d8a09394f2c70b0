"""Small models whose blocks are recomputed, in each way that a training can ask for it, trained
beside an untouched one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bagua_client
from bagua_client.torch_private.reducer import is_in_backward

WIDTH, BLOCKS = 16, 4
FIRST, KNOWN, STEPS = 1, 4, 10
"""Ours begins to look before step 1, and anything may be changed from step 4 on."""


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _as_it_is(block: nn.Module) -> nn.Module:
    return block


WAYS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": checkpoint_wrapper,
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": partial(checkpoint_wrapper, context_fn=_selective),
    "to the end": partial(checkpoint_wrapper, early_stop=False),
    "composable": composable,
    "random state lost": partial(checkpoint_wrapper, preserve_rng_state=False),
    "older transformers": _as_it_is,
    "older transformers, reentrant": _as_it_is,
}


@dataclass(frozen=True)
class Kind:
    """How a model is made and trained.

    Attributes:
        way: in which its blocks are recomputed, or a model of transformers.
        ranks: how they train together: ``alone``, ``replicated``, ``sharded``, ``copies`` of what
            is sharded.
        every: of the blocks, each so-manyth one is recomputed; 0: none is.
        inner: what is in a block: ``layers``, ``lora``, ``experts``, ``nested`` (what is recomputed
            by itself, too).
        between: what the training does in or after a step.
        also: what else is changed, in turns, together with the number of blocks.
    """

    way: str = "wrapper"
    ranks: str = "alone"
    every: int = 1
    inner: str = "layers"
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
    also: tuple[Mapping[str, Any], ...] = ({},)


class Lora(nn.Module):
    """A layer that is not trained, and two small ones that are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found = self.up(self.down(F.dropout(values, 0.1, self.training)))
        return self.base(values) + 2 * found


class Experts(nn.Module):
    """Each row goes to the best two of four experts, by what noise leaves of its scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scores = self.router(values * torch.empty_like(values).uniform_(0.5, 1.5)).softmax(-1)
        weights, chosen = scores.topk(2)
        if is_in_backward():
            assert torch.equal(chosen, self.chosen), "other experts than in the forward pass"
        self.chosen = chosen
        found = torch.zeros_like(values)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            parts = expert(values[rows]) * weights[rows, places, None]
            found = found.index_add(0, rows, parts.to(found.dtype))
        return found


class Block(nn.Module):
    ran_again = 0
    """How many of all blocks ran in a backward pass."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        layer = Lora if kind.inner == "lora" else nn.Linear
        self.up, self.down = layer(width, 2 * width), layer(2 * width, width)
        if kind.inner == "nested":
            self.up = checkpoint_wrapper(self.up)
        self.experts = Experts(width) if kind.inner == "experts" else nn.Identity()
        self.norm = nn.BatchNorm1d(width) if kind.norm else nn.LayerNorm(width)
        self.dropout = kind.dropout

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            Block.ran_again += is_in_backward()
        found = self.experts(self.down(F.gelu(self.up(self.norm(values)))))
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
        if kind.inner == "lora":
            self.first.requires_grad_(False)  # And has its outputs require gradients, as by peft.
            self.first.register_forward_hook(lambda _, __, found: found.requires_grad_())
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


class OfOlderTransformers(Net):
    """Before 4.53 a model handed each of its layers to a function that it was given."""

    def __init__(self, kind: Kind, width: int = WIDTH) -> None:
        super().__init__(kind, width)
        self.gradient_checkpointing = True
        options = {"use_reentrant": "reentrant" in kind.way}
        self._gradient_checkpointing_func = partial(checkpoint, **options)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                values = self._gradient_checkpointing_func(block.__call__, values)
            else:
                values = block(values)
        return self.last(values)


def _transformer(kind: Kind) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 32, "attn_implementation": "eager"}
    if kind.way.startswith("gpt2"):
        config = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, n_positions=16, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": BLOCKS}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        if kind.way == "mixtral":
            sizes |= {"num_local_experts": 4, "router_jitter_noise": 0.3}
            model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in kind.way})
    if kind.inner == "lora":
        import peft

        options = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, options)
        model.enable_input_require_grads()
    return model


def made(kind: Kind, is_ours: bool) -> Any:
    """The model as a training has it; ``is_ours``: and as it is tuned."""
    torch.manual_seed(0)
    is_older = kind.way.startswith("older")
    model: Any = OfOlderTransformers(kind) if is_older else None
    model = model or (Net(kind) if kind.way in WAYS else _transformer(kind))
    if kind.ranks == "replicated":
        wrapper = bagua_client.DistributedDataParallel if is_ours else Stock
        return wrapper(model, static_graph=kind.static_graph)
    if kind.ranks in ("sharded", "copies"):
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        if kind.ranks == "copies":
            sizes, names = (2, dist.get_world_size() // 2), ("copies", "parts")
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        layers = getattr(model, "blocks", None)
        if layers is None:
            layers = getattr(model.base_model, "h", getattr(model.base_model, "layers", ()))
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
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


class Training:
    """What is trained on one rank; all it comes to is in ``values`` and ``losses``.

    Args:
        plan: before which step of it which knobs have other values than the default's.
        folder: where checkpoints go.
    """

    def __init__(self, kind: Kind, plan: Mapping[int, Any], is_ours: bool, folder: str) -> None:
        self._kind, self._plan, self._is_ours = kind, plan, is_ours
        self._folder = f"{folder}/{'ours' if is_ours else 'stock'}"
        self._rank = dist.get_rank() if kind.ranks != "alone" else 0
        self._generator = torch.Generator().manual_seed(self._rank)
        self.losses: list[float] = []
        self.values: dict[str, torch.Tensor] = {}
        self.recomputed: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self.model = made(self._kind, self._is_ours)
        torch.manual_seed(7 + self._rank)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-2)
        self._steps = 0

    def train(self) -> None:
        for _ in range(STEPS):
            self._step()
        if self._kind.between == "resumed":
            self._resume()
            for _ in range(STEPS):
                self._step()
        whole = {f"model.{n}": v for n, v in self.model.state_dict().items()}
        for number, each in enumerate(self.optimizer.state.values()):
            whole |= {f"{number}.{name}": value for name, value in each.items()}
        self._keep("", whole)
        self.values["random"] = torch.get_rng_state()

    def _step(self) -> None:
        kind, step = self._kind, self._steps
        if self._is_ours and step == FIRST:
            assert self.model.reconfigure(self.model.configuration)
            self._default = self.model.configuration
        if self._is_ours and step in self._plan:
            asked = replace(self._default, **self._plan[step])
            assert self.model.reconfigure(asked), (step, self._plan[step])
        self.optimizer.zero_grad()
        Block.ran_again = 0
        for micro in range(kind.micro_batches):
            is_held = kind.ranks == "replicated" and micro < kind.micro_batches - 1
            with self.model.no_sync() if is_held else nullcontext():
                loss = loss_of(self.model, kind, self._generator)
                if kind.between == "two passes":
                    loss = loss + loss_of(self.model, kind, self._generator)
                loss.backward()
        passes = kind.micro_batches * (1 + (kind.between == "two passes"))
        self.recomputed.add(Block.ran_again // passes)
        if kind.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.losses.append(loss.item())
        self._steps += 1
        if kind.between == "evaluation":
            self.model.eval()
            with torch.no_grad():
                self.losses.append(loss_of(self.model, kind, self._generator, 9).item())
            self.model.train()

    def _resume(self) -> None:
        """Save all in both ways, and go on with another model that has loaded it."""
        options = StateDictOptions(full_state_dict=True)
        self._keep("full.", get_model_state_dict(self.model, options=options))
        names = "model", "optimizer"
        saved = dict(zip(names, get_state_dict(self.model, self.optimizer), strict=True))
        dcp.save(saved, checkpoint_id=self._folder)
        self._begin()
        loaded = dict(zip(names, get_state_dict(self.model, self.optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=self._folder)
        set_state_dict(
            *(self.model, self.optimizer),
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )

    def _keep(self, prefix: str, whole: Mapping[str, Any]) -> None:
        self.values |= {
            prefix + name.replace("module.", ""): getattr(v, "_local_tensor", v).detach().clone()
            for name, v in whole.items()
            if isinstance(v, torch.Tensor)
        }


def plan_of(seed: str, kind: Kind) -> dict[int, dict[str, Any]]:
    """Before which steps how many blocks are recomputed from then on, and what else is changed."""
    draw = random.Random(seed)
    steps = [*sorted(draw.sample(range(KNOWN, STEPS - 1), 4)), STEPS - 1]
    counts = [draw.randint(0, BLOCKS) for _ in steps]
    return {
        step: {"recomputed_blocks": count, **kind.also[turn % len(kind.also)]}
        for turn, (step, count) in enumerate(zip(steps, counts, strict=True))
    }


def _trained(kind: Kind, plan: Mapping[int, Any], is_ours: bool, folder: str) -> Training:
    training = Training(kind, plan, is_ours, folder)
    training.train()
    return training


def differs(kind: Kind, seed: str, folder: str = "") -> str:
    """What is not as in an untouched training, to the last bit, while the number of recomputed
    blocks changes; empty: nothing is."""
    plan = plan_of(seed, kind)
    ours, stock = (_trained(kind, plan, is_ours, folder) for is_ours in (True, False))
    if list(ours.values) != list(stock.values):
        return "names"
    if ours.losses != stock.losses:
        return f"losses {ours.losses} {stock.losses}"
    planned = {each["recomputed_blocks"] for each in plan.values()}
    if kind.way in WAYS and not kind.compiles and not planned <= ours.recomputed:
        return f"{ours.recomputed} blocks ran again, and not {planned}"
    wrong = [n for n, value in stock.values.items() if not torch.equal(value, ours.values[n])]
    return f"values {wrong}" if wrong else ""
