"""Handwritten digits through a network of ResNet-18's size, on every rank torchrun starts.

    python examples/launch.py examples/digits.py

The data are scikit-learn's (1,797 images of 8 x 8, shipped with it): nothing is downloaded.
The line that differs from a training under torch's DistributedDataParallel is marked.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import bagua_client


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut (He et al., 2016, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Sequential:
    """11.2 million parameters, 45 MB of gradients; half as wide, a quarter of that. The stem is for
    small images.
    """
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(width, outputs, stride), Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (1437, 1, 8, 8) in 0..1 and labels; the same for testing (360)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def device_of_rank() -> torch.device:
    """A GPU of its own, where there is one for each rank of this host."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def mean_over_ranks(device: torch.device, *values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [value / dist.get_world_size() for value in total.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="images of each rank in a step")
    parser.add_argument("--images", type=int, help="train with the first so many of 1437")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layers")
    parser.add_argument("--minutes", type=float, default=60, help="no new epoch after these")
    parser.add_argument("--until-tuned", action="store_true", help="as many epochs as that takes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    device = device_of_rank()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels, test_images, test_labels = (data.to(device) for data in digits())
    images, labels = images[: arguments.images], labels[: arguments.images]
    network = resnet18(arguments.width).to(device)
    model = bagua_client.DistributedDataParallel(network)  # the one changed line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = len(labels) // (world_size * arguments.batch)
    began = time.monotonic()

    for epoch in itertools.count(1):
        model.train()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        total_loss = 0.0
        for step in range(steps):
            first = (step * world_size + rank) * arguments.batch
            chosen = order[first : first + arguments.batch]
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.item()

        model.eval()
        with torch.no_grad():
            mine = slice(rank, None, world_size)
            right = (model(test_images[mine]).argmax(1) == test_labels[mine]).float().mean().item()
        minutes = (time.monotonic() - began) / 60
        loss_mean, accuracy, minutes = mean_over_ranks(device, total_loss / steps, right, minutes)
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {loss_mean:.4f}  accuracy {accuracy:.1%}", flush=True)
        is_enough = not model.is_tuning if arguments.until_tuned else epoch == arguments.epochs
        if is_enough or minutes > arguments.minutes:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
