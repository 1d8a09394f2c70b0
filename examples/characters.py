"""A small GPT that learns to write Python's own documentation, character by character.

    python examples/launch.py examples/characters.py

The text is in every Python installation (pydoc_data.topics, 0.7 MB): nothing is downloaded.
The line that differs from a training under torch's DistributedDataParallel is marked.
"""

from __future__ import annotations

import argparse
import logging
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import bagua_client

CONTEXT = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm (Radford et al., 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class CharacterModel(nn.Module):
    """Predicts the next character; the output layer's weight is the embedding's (tied)."""

    def __init__(
        self,
        characters: int,
        width: int = 192,
        layers: int = 4,
        heads: int = 6,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        """Characters (batch, length) to logits (batch, length, characters)."""
        x = self.embedding(text) + self.position[: text.shape[1]]
        return self.output(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank in a step")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    number_of = {character: number for number, character in enumerate(alphabet)}
    text = torch.tensor([number_of[character] for character in corpus])
    torch.manual_seed(0)
    model = bagua_client.DistributedDataParallel(CharacterModel(len(alphabet)))  # changed line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # from here on the ranks read different parts of the text

    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (arguments.batch, 1))
        sequences = text[starts + torch.arange(CONTEXT + 1)]
        logits = model(sequences[:, :-1]).flatten(0, 1)
        target = sequences[:, 1:].flatten()
        loss = functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == 1:
            right = (logits.argmax(1) == target).float().mean()
            seen = torch.stack([loss.detach(), right])
            dist.all_reduce(seen)
            mean_loss, accuracy = (seen / dist.get_world_size()).tolist()
            if rank == 0:
                print(f"step {step:4d}  loss {mean_loss:.3f}  accuracy {accuracy:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
