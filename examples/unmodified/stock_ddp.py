"""A transformer that reads Python's documentation, under torch's DistributedDataParallel alone.

    torchrun --nproc-per-node 2 -m bagua_client --autotune examples/unmodified/stock_ddp.py

Nothing in here knows of bagua_client. The text is in every Python installation.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONTEXT = 64


class CharacterModel(nn.Module):
    """5 million parameters, 19 MB of gradients."""

    def __init__(self, characters: int, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Characters (batch, length) to logits (batch, length, characters)."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embedding(text) + self.position
        logits: Tensor = self.output(self.layers(x, mask, is_causal=True))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank in a step")
    parser.add_argument("--bucket-cap-mb", type=float, help="[default: torch's]")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    number_of = {character: number for number, character in enumerate(alphabet)}
    text = torch.tensor([number_of[character] for character in corpus])
    torch.manual_seed(0)
    model = DDP(CharacterModel(len(alphabet)), bucket_cap_mb=arguments.bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # the ranks read different parts of the text

    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (arguments.batch, 1))
        sequences = text[starts + torch.arange(CONTEXT + 1)]
        logits = model(sequences[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == 1):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
