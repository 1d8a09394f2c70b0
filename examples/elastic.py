"""The training of characters.py as an elastic job: its nodes may come, go and be killed.

    BAGUA_AUTOTUNE=1 torchrun --nnodes=1:4 --nproc-per-node 2 --max-restarts=3 \\
        --rdzv-backend=c10d --rdzv-id=characters --rdzv-endpoint=HOST:29400 \\
        examples/elastic.py --snapshot /shared/characters.pt

torchrun starts all ranks again whenever the nodes change, or one of them fails. So the training
writes a snapshot from time to time, where all nodes can read it, and begins at the newest. The
text of a step is the same for any number of ranks, which share it.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from characters import CONTEXT, CharacterModel
from torch import Tensor, nn
from torch.nn import functional

import bagua_client


def corpus() -> tuple[Tensor, int]:
    """Python's documentation as numbers, and how many characters there are."""
    text = "\n".join(topics.values())
    number_of = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([number_of[character] for character in text]), len(number_of)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest snapshot, which is in the model and the optimizer then."""
    if not path.exists():
        return 0
    snapshot = torch.load(path, map_location="cpu")
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return int(snapshot["step"])


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whole or not at all: the training may be killed at any moment."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    written = path.with_suffix(".new")
    torch.save(state, written)
    os.replace(written, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step, of all ranks")
    parser.add_argument("--width", type=int, default=192, help="of the model, a multiple of 6")
    parser.add_argument("--snapshot", type=Path, default=Path("characters.pt"))
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text, characters = corpus()
    torch.manual_seed(0)
    plain = CharacterModel(characters, arguments.width)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    begin = load(arguments.snapshot, plain, optimizer)
    model = bagua_client.DistributedDataParallel(plain)
    if rank == 0:
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"step {begin}: {world_size} ranks, restart {life}", flush=True)

    for step in range(begin + 1, arguments.steps + 1):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - CONTEXT - 1, (arguments.batch, 1), generator=draw)
        sequences = text[starts[rank::world_size] + torch.arange(CONTEXT + 1)]
        logits = model(sequences[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % arguments.save_every == 0:
            save(arguments.snapshot, step, plain, optimizer)
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
