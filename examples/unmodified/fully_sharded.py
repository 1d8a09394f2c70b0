"""A small GPT that guesses the next character of Python's documentation, sharded over the ranks.

    torchrun --nproc-per-node 2 -m bagua_client --autotune examples/unmodified/fully_sharded.py

Nothing in here knows of bagua_client. The text is in every Python installation.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CONTEXT, WIDTH, HEADS, BLOCKS = 32, 256, 4, 6


class Gpt(nn.Module):
    """4.8 million parameters (Radford et al., 2019, with fewer and smaller blocks)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedded = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        values = self.embedded(text) + self.places
        hidden = nn.Transformer.generate_square_subsequent_mask(CONTEXT, text.device)
        for block in self.blocks:
            values = block(values, src_mask=hidden.to(values.dtype), is_causal=True)
        found: Tensor = self.head(values)
        return found


def data() -> tuple[Tensor, int]:
    """The text as numbers, and how many characters there are."""
    corpus = "\n".join(topics.values())
    number_of = {character: number for number, character in enumerate(sorted(set(corpus)))}
    return torch.tensor([number_of[character] for character in corpus]), len(number_of)


def begin() -> torch.device:
    """Join the other ranks; on a GPU of its own, where there is one for each rank of this host."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if not on_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="places of each rank in a step")
    arguments = parser.parse_args()

    device = begin()
    torch.manual_seed(0)
    text, characters = data()
    model = Gpt(characters).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device.type == "cuda" else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    chosen = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (arguments.batch, 1), generator=chosen)
        places = starts + torch.arange(CONTEXT + 1)
        batch = text[places].to(device)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step:5}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
