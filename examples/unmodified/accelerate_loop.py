"""A perceptron that guesses the next character of Python's documentation, with Accelerate.

    torchrun --nproc-per-node 2 -m bagua_client --autotune examples/unmodified/accelerate_loop.py

Nothing in here knows of bagua_client. The text is in every Python installation.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT, EMBEDDED, WIDTH, LAYERS = 16, 64, 1024, 4


def model(characters: int) -> nn.Sequential:
    """4 million parameters, 17 MB of gradients (Bengio et al., 2003, with more layers)."""
    layers: list[nn.Module] = [nn.Embedding(characters, EMBEDDED), nn.Flatten()]
    for number in range(LAYERS):
        inputs = WIDTH if number else CONTEXT * EMBEDDED
        layers += [nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, characters))


def data() -> tuple[TensorDataset, int]:
    """Every place in the text: the characters before it, and the one that stands there."""
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    number_of = {character: number for number, character in enumerate(alphabet)}
    text = torch.tensor([number_of[character] for character in corpus])
    windows = text.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1]), len(alphabet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="places of each rank in a step")
    parser.add_argument("--bucket-cap-mb", type=float, help="[default: torch's]")
    arguments = parser.parse_args()

    given = {} if arguments.bucket_cap_mb is None else {"bucket_cap_mb": arguments.bucket_cap_mb}
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**given)])
    torch.manual_seed(0)
    dataset, characters = data()
    network = model(characters)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=arguments.batch, shuffle=True, drop_last=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)

    step = 0
    while step < arguments.steps:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(network(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0 or step == 1:
                accelerator.print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
            if step == arguments.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
